"""The launcher's entry: `start`, with `--socket FD`. Reads its order from the supervisor and runs one node.

The order is one JSON line: the plan, a token shared by the run's launchers, and descriptors that this process inherits.
Whoever calls `start` (`runtime.backends.orders`, and the `__main__.py` of `runtime.backends.zipapp`'s archive) has
imported this package as `launcher`. With `--pod` this process is the first of a pod instead, and starts a launcher
itself: see `pod`.
The one rule: before any customer code runs, nothing of the order is left where that code could read it.
"""

from __future__ import annotations

import os
import stat
import sys

from .agent import Agent
from .bare import socket
from .report import Link, shield
from .topology import Plan, imported_names, local_rank_flag
from .warm import Warm, import_folders, unfit

TYPE_CHECKING = False  # as `typing` has it, without the time that importing it takes
if TYPE_CHECKING:
    from typing import Any, Dict, Iterator, List, Optional

_LARGEST_SOURCE = 1 << 20
_MOST_SOURCES = 64


def main(arguments: List[str]) -> int:
    """Run this node to its end; returns its exit code."""
    _prefer_for_oom()
    shield()
    channel = socket(fileno=int(arguments[arguments.index("--socket") + 1]))
    supervisor = Link(channel)
    order = _read_order(supervisor)
    os.umask(order.get("umask", 0o022))
    warm = socket(fileno=order["warm"]) if order.get("warm") is not None else None
    if warm is not None:
        os.set_inheritable(warm.fileno(), False)
        Warm(warm).join()
    listener = order.get("listener")
    for descriptor in [channel.fileno(), *order["outputs"], *([] if listener is None else [listener])]:
        os.set_inheritable(descriptor, False)
    plan = Plan.from_data(order["plan"])
    order["folder"] = os.path.dirname(plan.script)
    sources = list(_sources(plan, order["folder"]))
    order["flag"] = local_rank_flag(sources)
    order["import_folders"] = import_folders(sources, order["folder"], plan.workspace)
    order["warm"] = Warm(None if warm is None or unfit(sources) else warm)
    order["environment"] = dict(order["environment"])
    return Agent(plan, order, supervisor).run(listener)


def _read_order(supervisor: Link) -> Dict[str, Any]:
    while True:
        for message in supervisor.receive():
            return message


def _prefer_for_oom() -> None:
    """Where the machine runs out of memory, a run is to die before the console does. Must precede `shield`."""
    try:
        score = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.write(score, b"500")
    finally:
        os.close(score)


def _sources(plan: Plan, folder: str) -> Iterator[str]:
    """The script and the modules beside it that it imports, for a look at their argument parsers.

    One that runs others (`runpy`) brings along the scripts that its arguments name.
    """
    waiting = [plan.script]
    seen = set(waiting)
    while waiting and len(seen) <= _MOST_SOURCES:
        path = waiting.pop(0)
        source = _text_of(path)
        if source is None:
            continue
        yield source
        names = imported_names(source)
        modules = [name + ".py" for name in names]
        if "runpy" in names:
            modules.extend(word for word in plan.arguments if word.endswith(".py"))
        for name in modules:
            module = os.path.join(folder, name)
            if module not in seen and os.path.isfile(module):
                seen.add(module)
                waiting.append(module)


def _text_of(path: str) -> Optional[str]:
    """A file's text; None where there is none. What lies there may be a pipe by now, which keeps who reads waiting."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        return os.read(descriptor, _LARGEST_SOURCE).decode("utf-8", "replace")
    except OSError:
        return None
    finally:
        os.close(descriptor)


def start() -> None:
    """Do what the command line says, and leave."""
    if "--pod" in sys.argv[1:]:
        # Imported here for speed alone: on one machine nobody needs it.
        from .pod import main as be_pod  # noqa: PLC0415

        code = be_pod()
    else:
        code = main(sys.argv[1:])
    # Nothing is left to tidy up, and an interpreter's own shutdown takes a while.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
