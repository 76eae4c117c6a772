"""Ask the process that owns the tools for a session, and find a session by its key.

A session has a folder of its own, named by its key, below the owner's folder. Only the console's user can enter that
folder, and no sandbox sees it. It holds the socket that the tool listens on, and what the console checks at each
request.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

SOCKET = "s"
"""The socket of the tool in its session's folder. Names are short: a socket's path has at most 107 characters."""
CONTROL_SOCKET = "tools.sock"
SESSIONS_FOLDER = "t"
RECORD = "session.json"
_KEY = re.compile(r"[A-Za-z0-9_-]{16}")
_TIMEOUT_SECONDS = 10.0
_MAX_ANSWER_BYTES = 65536


class ToolsUnavailable(Exception):
    """No process owns tools here, or it could not start one."""


class TooManySessions(Exception):
    """The organization, or all of them together, has as many sessions as are allowed."""


@dataclass(frozen=True)
class LogFolder:
    """Logs that a session shows as `name`: the path `below` in `folder`.

    Customers' code may put links on the way from `folder` to the logs: they are followed only inside the sandbox, where
    they lead nowhere else. `folder` itself must be out of its reach.
    """

    name: str
    folder: str
    below: str


@dataclass(frozen=True)
class SessionRequest:
    """Whose session to start, and what it may see."""

    organization: int
    user: int
    logs: tuple[LogFolder, ...]

    @classmethod
    def from_data(cls, data: dict[str, object]) -> SessionRequest:
        """Return the request that `to_data` wrote."""
        logs = tuple(LogFolder(**each) for each in data["logs"])  # type: ignore[attr-defined]
        return cls(int(data["organization"]), int(data["user"]), logs)  # type: ignore[call-overload]

    def to_data(self) -> dict[str, object]:
        """Return the request as JSON data."""
        return asdict(self)


@dataclass(frozen=True)
class Session:
    """A session that was started. It may have ended since."""

    key: str
    folder: Path
    organization: int
    user: int

    @property
    def socket(self) -> Path:
        """Return the socket that the tool listens on."""
        return self.folder / SOCKET

    def mark_used(self) -> None:
        """Put off the end of an idle session."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(self.folder / RECORD)


def is_served(root: Path) -> bool:
    """Return whether a process owns tools in this folder. One that was killed counts until it is back."""
    return (root / CONTROL_SOCKET).exists()


def start(root: Path, request: SessionRequest) -> str:
    """Return the key of a session that shows these logs. Raises ToolsUnavailable, TooManySessions.

    A user who asks again for the same gets the same session.
    """
    try:
        with _connect(root) as connection, connection.makefile("rwb") as stream:
            stream.write(json.dumps(request.to_data()).encode() + b"\n")
            stream.flush()
            answer = json.loads(stream.readline(_MAX_ANSWER_BYTES))
    except (OSError, ValueError) as error:
        raise ToolsUnavailable(str(error)) from error
    if answer.get("error") == "limit":
        raise TooManySessions
    if "key" not in answer:
        raise ToolsUnavailable(str(answer.get("error")))
    return str(answer["key"])


def find(root: Path, key: str) -> Session | None:
    """Return the session with this key; None if there is none, or none any more."""
    if not _KEY.fullmatch(key):
        return None
    folder = root / SESSIONS_FOLDER / key
    try:
        record = json.loads((folder / RECORD).read_bytes())
    except (OSError, ValueError):
        return None
    return Session(key, folder, record["organization"], record["user"])


def _connect(root: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_TIMEOUT_SECONDS)
    try:
        connection.connect(str(root / CONTROL_SOCKET))
    except BaseException:
        connection.close()
        raise
    return connection
