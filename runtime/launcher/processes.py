"""Starting a process and hearing of its end. The one rule: a child inherits what it is given and nothing else.

By hand instead of `subprocess`, whose import alone takes as long as the rest of the launcher's start.
"""

from __future__ import annotations

import os
import time

from .bare import signal

TYPE_CHECKING = False  # as `typing` has it, without the time that importing it takes
if TYPE_CHECKING:
    from typing import Callable, List, Mapping, NamedTuple, Optional, Sequence
else:
    from .plain import NamedTuple


class Exit(NamedTuple):
    """How a process ended: an exit code, or the name of the signal that ended it (the other is None or empty)."""

    pid: int
    exit_code: Optional[int]
    signal: str


def spawn(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    output: int,
    inherit: Sequence[int] = (),
    folder: Optional[str] = None,
    new_session: bool = False,
    delay_seconds: float = 0.0,
    prepare: Optional[Callable[[], None]] = None,
) -> int:
    """Start a program with `output` as its stdout and stderr and nothing on its stdin; returns the pid at once.

    The program itself begins `delay_seconds` later. `prepare` is called in the new process before that.
    A program that cannot be started exits with 127 and says why on its own output.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        if new_session:
            os.setsid()
        signal.set_wakeup_fd(-1)
        # Python ignores these; a program expects them as they come.
        for name in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(name, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if prepare is not None:
            prepare()
        for descriptor in inherit:
            os.set_inheritable(descriptor, True)
        if folder is not None:
            os.chdir(folder)
        if delay_seconds:
            time.sleep(delay_seconds)  # the wait is the purpose: a head start for another
        os.execve(arguments[0], list(arguments), dict(environment))  # noqa: S606 - no shell is wanted
    except BaseException as error:  # the child must never return into the parent's code
        os.write(2, "cannot start {}: {}\n".format(arguments[0], error).encode())
    finally:
        os._exit(127)


def reap() -> List[Exit]:
    """Collect every child that has ended, adopted ones too."""
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
    """`SIGKILL` for 9; real-time signals by number."""
    try:
        # Imported here for speed alone: few processes are ended by one.
        from signal import Signals  # noqa: PLC0415

        return Signals(number).name
    except ValueError:
        return "signal {}".format(number)


def send_signal(pid: int, number: int) -> None:
    """Signal a child that is not reaped yet; one that has just ended is fine."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
