"""Start processes and collect their ends. A child inherits only the descriptors that it is given.

This replaces `subprocess`, whose import takes as long as the rest of the launcher's start.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Callable, List, Mapping, NamedTuple, Optional, Sequence


class Exit(NamedTuple):
    """How a process ended: by an exit code, with "" as `signal`, or by a named signal, with None as `exit_code`."""

    pid: int
    exit_code: Optional[int]
    signal: str


def spawn(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    output_fd: int,
    inherit_fds: Sequence[int] = (),
    folder: Optional[str] = None,
    new_session: bool = False,
    delay_seconds: float = 0.0,
    prepare: Optional[Callable[[], None]] = None,
) -> int:
    """Start a program with `output_fd` as its stdout and stderr and an empty stdin; return its pid at once.

    The program begins after `delay_seconds`. Before that, the new process calls `prepare` and changes to `folder`. If
    the program cannot be started, the new process writes the reason to `output_fd` and exits with 127, as a shell does.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        if new_session:
            os.setsid()
        signal.set_wakeup_fd(-1)  # a signal here must not write to the parent's pipe
        # Python ignores these signals; a program expects the defaults.
        for name in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(name, signal.SIG_DFL)
        dev_null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(dev_null, 0)
        os.dup2(output_fd, 1)
        os.dup2(output_fd, 2)
        if prepare is not None:
            prepare()
        for descriptor in inherit_fds:
            os.set_inheritable(descriptor, True)
        if folder is not None:
            os.chdir(folder)
        if delay_seconds:
            time.sleep(delay_seconds)  # a head start for rank 0 (`worker_group.HEAD_START_SECONDS`)
        os.execve(arguments[0], list(arguments), dict(environment))  # noqa: S606 - no shell is wanted
    except BaseException as error:  # the child must never return into the parent's code
        os.write(2, "cannot start {}: {}\n".format(arguments[0], error).encode())
    finally:
        os._exit(127)


def reap() -> List[Exit]:
    """Collect all children that have ended, adopted ones included."""
    exits: List[Exit] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return exits
        if not pid:
            return exits
        if os.WIFSIGNALED(status):
            exits.append(Exit(pid, None, signal_name(os.WTERMSIG(status))))
        else:
            exits.append(Exit(pid, os.WEXITSTATUS(status), ""))


def signal_name(number: int) -> str:
    """Return a signal's name; real-time signals are named by number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "signal {}".format(number)


def send_signal(pid: int, number: int) -> None:
    """Send a signal; do nothing if there is no such process. `pid` is as in kill(2): -1 stands for all processes.

    A child's pid cannot be reused before the child is reaped, so until then the signal reaches no other process.
    """
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
