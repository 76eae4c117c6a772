"""How the launcher speaks: JSON lines over a socket, to its supervisor and to the other nodes' launchers.

The one rule: a line is a hint about the run and never about money; times and limits are the supervisor's own. The
customer's code shares our user id, so what a socket says is believed only where that code cannot reach it: ranks do
not inherit the sockets, and `shield` keeps them out of `/proc/<launcher>/fd`.
"""

from __future__ import annotations

import ctypes
import json
import socket
from typing import Any, Dict, List, Optional, Sequence

Message = Dict[str, Any]

_LONGEST_LINE = 1 << 16
_PR_SET_DUMPABLE = 4
# A peer that has lost its connection may abort by itself, and SIGTERM is what we send: neither is a first cause
# beside a rank that died by another signal.
_ECHO_SIGNALS = ("", "SIGABRT", "SIGTERM")
_ECHO_SECONDS = 1.0


class ConnectionLost(Exception):
    """The other side is gone."""


class Link:
    """One end of a JSON-lines connection. Reading never blocks longer than the socket's own time-out."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._buffer = b""

    def fileno(self) -> int:
        """The descriptor, for a selector."""
        return self.socket.fileno()

    def send(self, message: Message) -> None:
        """Write one message. Raises ConnectionLost."""
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ConnectionLost(str(error)) from error

    def receive(self) -> List[Message]:
        """What has come so far, whole lines only; lines that are no JSON object are left out. Raises ConnectionLost."""
        try:
            data = self.socket.recv(_LONGEST_LINE)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError as error:
            raise ConnectionLost(str(error)) from error
        if not data:
            raise ConnectionLost("closed")
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > _LONGEST_LINE:
            raise ConnectionLost("a line without an end")
        return [message for message in map(_parse, lines) if message is not None]

    def close(self) -> None:
        """Hang up."""
        self.socket.close()


def _parse(line: bytes) -> Optional[Message]:
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def first_cause(causes: Sequence[Message]) -> Optional[Message]:
    """Of everything that went wrong, what went wrong first; the rest are its echoes. PURE.

    A cause has `kind` and `at` (Unix seconds), and `signal` where a signal ended the rank. Clocks and reaping are a
    little apart, so a rank killed by a signal outranks one that failed up to a second sooner: a peer's
    "connection closed" can be reaped before the death that caused it.
    """
    if not causes:
        return None
    ordered = sorted(causes, key=lambda cause: float(cause["at"]))
    first = ordered[0]
    if first["kind"] != "code_failed":
        return first
    for cause in ordered:
        if cause["at"] - first["at"] > _ECHO_SECONDS:
            break
        if cause["kind"] == "code_failed" and cause.get("signal", "") not in _ECHO_SIGNALS:
            return cause
    return first


def shield() -> None:
    """Make this process non-dumpable: others of the same user may not open its descriptors, memory or environment."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
