"""Which process is meant. The one rule: a pid alone names nobody; a pid and its start time do.

Standard library only: the supervisor imports this.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def start_time(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None where it is gone (a zombie counts as gone)."""
    fields = _fields(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def parent(pid: int) -> int | None:
    """Whose child the process is; None where it is gone."""
    fields = _fields(pid)
    return None if fields is None else int(fields[1])


def _fields(pid: int) -> list[str] | None:
    """Of /proc/<pid>/stat, from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def is_alive(pid: int, started: int) -> bool:
    """Whether this very process still runs."""
    return start_time(pid) == started


def send(pid: int, started: int, number: signal.Signals) -> bool:
    """Signal this very process; False when it is gone. The descriptor pins it, so that no successor is hit."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not is_alive(pid, started):
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, number)
        return True
    finally:
        os.close(descriptor)
