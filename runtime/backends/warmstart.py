"""Asking for what is kept ready: a supervisor to be (of the nursery), and ranks (of an image's zygote).

The one rule: who does not answer at once is not there, and the caller starts cold. Sockets lie in `<root>/.nursery`,
which nobody else may enter. Standard library only: the supervisor imports this.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from runtime.backends import identity

FOLDER = ".nursery"
SOCKET = "supervisors"
ACCEPTED = b"+"
LENGTH = struct.Struct("!I")
OOM_SCORE = 500
_ANSWER_SECONDS = 1.0


@contextlib.contextmanager
def handed_over(root: Path, order: dict[str, Any], descriptors: Sequence[int]) -> Iterator[bool]:
    """Give an order to the nursery; False where it does not take it. What it made starts when the block is left."""
    try:
        connection = connect(root / FOLDER, SOCKET)
    except OSError:
        yield False
        return
    with connection:
        yield _is_taken(connection, order, descriptors)


def _is_taken(connection: socket.socket, order: dict[str, Any], descriptors: Sequence[int]) -> bool:
    data = json.dumps(order).encode()
    try:
        socket.send_fds(connection, [LENGTH.pack(len(data))], list(descriptors))
        connection.sendall(data)
        return connection.recv(1) == ACCEPTED
    except OSError:
        return False


def connect(folder: Path, name: str) -> socket.socket:
    """A connection to a socket in this folder, however long its path is. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_ANSWER_SECONDS)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        connection.connect(f"/proc/self/fd/{descriptor}/{name}")
    except BaseException:
        connection.close()
        raise
    finally:
        os.close(descriptor)
    return connection


class Midwife:
    """The way for warm ranks into one node's sandbox. `launcher_end` is for the launcher, who calls them in."""

    def __init__(self, connection: socket.socket, ranks: int) -> None:
        self._connection = connection
        self._ranks = ranks
        self._ours, self.launcher_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def show_in(self, init: int, parent: int, limits: dict[str, int], groups: Sequence[Path]) -> None:
        """Give away the sandbox whose first process this is, a child of `parent`, which we have not reaped."""
        with self._connection, self._ours, contextlib.suppress(OSError):
            pinned = os.pidfd_open(init)
            try:
                # Nobody else can have got this pid: while its parent lives unreaped and names it, it is the one.
                if identity.parent(init) != parent:
                    return
                order = {
                    "ranks": self._ranks,
                    "limits": limits,
                    "cgroups": [str(group) for group in groups],
                    "oom_score_adj": OOM_SCORE,
                }
                given = array.array("i", [self._ours.fileno(), pinned]).tobytes()
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, given)]
                self._connection.sendmsg([json.dumps(order).encode()], ancillary)
            finally:
                os.close(pinned)

    def close(self) -> None:
        """Not needed."""
        self._connection.close()
        self._ours.close()


def midwife(zygote: str, ranks: int) -> Midwife | None:
    """One from the zygote at this path; None where there is none, or none yet."""
    try:
        return Midwife(connect(Path(zygote).parent, Path(zygote).name), ranks)
    except OSError:
        return None
