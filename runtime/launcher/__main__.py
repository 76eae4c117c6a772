"""The launcher's entry point, `start`: reads the launch plan from the socket of `--socket FD`, and runs one node.

The launch plan is one JSON line (`topology.LaunchPlan`). Two places call `start`, and both import this package as
`launcher`: the command line of `runtime.backends.launch_plan`, and the `__main__.py` of the archive that
`runtime.backends.kubernetes.launcher_archive` builds. With `--pod` this process is the first of a pod, and starts a
launcher itself: see `pod.main`.

The supervisor sends the launch plan over a socket, because the plan holds the run's token, and customer code can never
read that socket.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import sys
from typing import Iterator, List, Optional, Tuple, cast

from .agent import Agent
from .protocol import Link, Message, make_undumpable
from .topology import LaunchPlan, Plan, find_imports, local_rank_flag
from .variables import need_cold_start
from .warm.client import WarmRanks, import_folders, is_warm_start_useful, python_path

_MAX_SOURCE_BYTES = 1 << 20
"""Maximum bytes of a source that are searched for flags and imports. Larger files are usually generated data."""
_MAX_MODULES = 64
"""Maximum number of modules beside the script that are searched, since the ranks start only after the search. Reading
so many takes milliseconds."""


def main(arguments: List[str]) -> int:
    """Run this node to its end; return its exit code."""
    _raise_oom_score()
    make_undumpable()
    # Python's own handler would let any process in the sandbox end this one by SIGINT. Without a handler, the first
    # process of a pid namespace does not receive the signal.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # On Slurm the sandbox starts with SIGTERM ignored. The ranks would inherit that, but SIGTERM must reach them.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    supervisor_socket = socket.socket(fileno=int(arguments[arguments.index("--socket") + 1]))
    supervisor = Link(supervisor_socket)
    launch_plan, early_messages = _read_launch_plan(supervisor)
    os.umask(launch_plan.get("umask", 0o022))
    listener_fd = launch_plan.get("listener")
    warm_fd = launch_plan.get("warm")
    shells_fd = launch_plan.get("shells")
    # This process inherited these descriptors, but its children must not inherit them.
    for descriptor in (supervisor_socket.fileno(), listener_fd, warm_fd, shells_fd, *launch_plan["outputs"]):
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
    plan = Plan.from_data(launch_plan["plan"])
    script_folder = os.path.dirname(plan.script)
    sources = list(_read_sources(plan, script_folder))
    warm_ranks = WarmRanks(None if warm_fd is None else socket.socket(fileno=warm_fd))
    order_variables = [*launch_plan.get("variables", {}), *launch_plan.get("secrets", {})]
    if is_warm_start_useful(sources, script_folder) and not need_cold_start(order_variables):
        warm_ranks.enter_sandbox()
    else:
        warm_ranks.close()  # the ranks that the fork server holds for this node end, and all ranks start cold
    launch_plan["folder"] = script_folder
    launch_plan["local_rank_flag"] = local_rank_flag(sources, plan.local_rank_argument)
    launch_plan["import_folders"] = [
        *import_folders(sources, script_folder, plan.workspace),
        *python_path(launch_plan["environment"]),
    ]
    return Agent(plan, launch_plan, supervisor, warm_ranks).run(listener_fd, early_messages)


def _read_launch_plan(supervisor: Link) -> Tuple[LaunchPlan, List[Message]]:
    """Wait for the supervisor's first message, the launch plan. Return it, and the messages that came with it.

    While this interpreter started, the supervisor may have sent more, such as a new address of the hub. Raises
    ConnectionLost.
    """
    messages: List[Message] = []
    while not messages:
        messages = supervisor.receive()
    return cast("LaunchPlan", messages[0]), messages[1:]


def _raise_oom_score() -> None:
    """Let the kernel kill a run before the console when memory runs out: the ranks inherit this process's score.

    Call this before `make_undumpable`, after which this process cannot open the file.
    """
    try:
        oom_score = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return  # the run starts without it: the kernel then chooses by memory use alone
    try:
        os.write(oom_score, b"500")  # the value of `runtime.backends.supervision.rank_fork.OOM_SCORE`
    finally:
        os.close(oom_score)


def _read_sources(plan: Plan, script_folder: str) -> Iterator[str]:
    """Yield the source of the script and of the modules beside it that it imports.

    If the script runs others by `runpy`, the scripts that its arguments name are included.
    """
    pending_paths = [plan.script]
    found_paths = set(pending_paths)
    while pending_paths and len(found_paths) <= _MAX_MODULES:
        source = _read_text(pending_paths.pop(0))
        if source is None:
            continue
        yield source
        module_names = find_imports(source)
        file_names = [name + ".py" for name in module_names]
        if "runpy" in module_names:
            file_names.extend(argument for argument in plan.arguments if argument.endswith(".py"))
        for file_name in file_names:
            path = os.path.join(script_folder, file_name)
            if path not in found_paths and os.path.isfile(path):
                found_paths.add(path)
                pending_paths.append(path)


def _read_text(path: str) -> Optional[str]:
    """Return the start of a file's text; None where it is not a regular file: reading a pipe could block."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        return os.read(descriptor, _MAX_SOURCE_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
    finally:
        os.close(descriptor)


def start() -> None:
    """Run a launcher, or with `--pod` the first process of a pod, and end this process with its exit code."""
    if "--pod" in sys.argv[1:]:
        # Imported here because a local launcher does not need it, and starts faster without it.
        from .pod.main import main as run_pod  # noqa: PLC0415

        exit_code = run_pod()
    else:
        exit_code = main(sys.argv[1:])
    # `os._exit` skips the interpreter's shutdown, which would only take time: everything is closed or written by now.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
