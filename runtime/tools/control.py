"""Ask the owner of the tools for a session, and find a session by its key.

A session is one running tool. It has a folder of its own, named by its key, below the owner's folder `root`. Only the
console's user can enter the session's folder, and no sandbox sees it. The folder holds the socket that the tool listens
on, and a record of the user for whom the tool runs. The console checks this record at each request.
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
"""The tool's socket in its session's folder. This name, SESSIONS_FOLDER and keys are short, since the address of a Unix
socket has at most 107 bytes."""
CONTROL_SOCKET = "tools.sock"
"""The owner's socket in `root`."""
SESSIONS_FOLDER = "t"
"""The folder of all sessions' folders, in `root`."""
RECORD = "session.json"
"""The session's record in its folder. Its modification time is the last use of the session."""
_KEY = re.compile(r"[A-Za-z0-9_-]{16}")
"""A session's key: 96 random bits as URL-safe base64."""
_TIMEOUT_SECONDS = 10.0
"""How long the owner may take to start a tool and answer. Starting takes well below a second, but the owner may have to
handle other requests first."""
_MAX_ANSWER_BYTES = 65536
"""Maximum length of an answer that is read. The owner sends a key or an error message, which are far shorter."""


class ToolsUnavailable(Exception):
    """No owner of tools runs here, or it could not start the tool."""


class TooManySessions(Exception):
    """The organization, or the installation, has as many sessions as its limit allows."""


@dataclass(frozen=True)
class LogFolder:
    """Logs that a session shows as `name`. They are at `subpath` in `folder`.

    `folder` is mounted into the sandbox, so customers' code must not be able to replace it. That code may put links at
    `subpath`: they are followed only inside the sandbox, where they cannot lead to other files of the host.
    """

    name: str
    folder: str
    subpath: str


@dataclass(frozen=True)
class SessionRequest:
    """The organization and the user for whom to start a session, and the logs that it shows."""

    organization_id: int
    user_id: int
    logs: tuple[LogFolder, ...]

    @classmethod
    def from_data(cls, data: dict[str, object]) -> SessionRequest:
        """Return the request that `to_data` has converted to JSON data."""
        logs = tuple(LogFolder(**log_data) for log_data in data["logs"])  # type: ignore[attr-defined]
        return cls(int(data["organization_id"]), int(data["user_id"]), logs)  # type: ignore[call-overload]

    def to_data(self) -> dict[str, object]:
        """Return the request as JSON data."""
        return asdict(self)


@dataclass(frozen=True)
class Session:
    """A session that the owner has started, and that may have ended meanwhile."""

    key: str
    folder: Path
    organization_id: int
    user_id: int

    @property
    def socket(self) -> Path:
        """The path of the socket that the tool listens on."""
        return self.folder / SOCKET

    def mark_used(self) -> None:
        """Record a use of the session now, so that the owner does not end it as idle."""
        with contextlib.suppress(FileNotFoundError):  # the session has ended
            os.utime(self.folder / RECORD)


def has_owner(root: Path) -> bool:
    """Whether an owner of tools uses this folder. True also if it was killed and has not been restarted yet."""
    return (root / CONTROL_SOCKET).exists()


def start(root: Path, request: SessionRequest) -> str:
    """Have the owner start a session; return its key. Raises ToolsUnavailable, TooManySessions.

    If the same user already has a session with the same logs, return the key of that session.
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
    """Return the session with this key; None if it never existed or has ended."""
    if not _KEY.fullmatch(key):
        return None
    folder = root / SESSIONS_FOLDER / key
    try:
        record = json.loads((folder / RECORD).read_bytes())
    except (OSError, ValueError):
        return None
    return Session(key, folder, record["organization"], record["user"])


def _connect(root: Path) -> socket.socket:
    """Return a connection to the owner. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_TIMEOUT_SECONDS)
    try:
        connection.connect(str(root / CONTROL_SOCKET))
    except BaseException:
        connection.close()
        raise
    return connection
