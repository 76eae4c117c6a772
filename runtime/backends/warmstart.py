"""Asking for what is kept ready: a supervisor to be (of the nursery), and ranks (of an image's zygote).

The one rule: who does not answer at once is not there, and the caller starts cold. Sockets lie in `<root>/.nursery`,
which nobody else may enter. Standard library only: the supervisor imports this.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import re
import socket
import stat
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from runtime.backends import identity
from runtime.launcher.topology import imported_names

FOLDER = ".nursery"
SOCKET = "supervisors"
PLAIN = "-plain"
"""After a zygote's name: of the one beside it that has imported nothing; see `runtime.launcher.zygote`."""
ACCEPTED = b"+"
LENGTH = struct.Struct("!I")
OOM_SCORE = 500
_ANSWER_SECONDS = 1.0
_LARGEST_SOURCE = 1 << 20
_MOST_SOURCES = 64
_UNTOLD = re.compile(r"\bimportlib\b|\b__import__\b|\brunpy\b|\bsys\.path\b")


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


def is_of_use(workspace: Path, script: str) -> bool:
    """Whether a script may import anything beyond the standard library and the modules beside it.

    One that does not ends much sooner without a framework that is to be taken apart. What lies there is a customer's,
    seen from outside the sandbox: it is read as text, links are not followed, and what is not plain counts as a yes.
    """
    *folders, name = script.split("/")
    try:
        folder = os.open(workspace, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        for part in folders:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            os.close(folder)
            folder = inner
        return _imports_more(folder, name)
    except OSError:
        return True
    finally:
        os.close(folder)


def _imports_more(folder: int, script: str) -> bool:
    waiting, seen, read = [script], {script}, 0
    while waiting:
        source = _source(folder, waiting.pop())
        read += len(source)
        if len(seen) > _MOST_SOURCES or read > _LARGEST_SOURCE or _UNTOLD.search(source):
            return True
        for name in imported_names(source):
            module = f"{name}.py"
            if module not in seen and name not in sys.stdlib_module_names:
                seen.add(module)
                waiting.append(module)
    return False


def _source(folder: int, name: str) -> str:
    """A plain file's text. Raises OSError for anything else, and where there is none."""
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("not a file")
        data = file.read(_LARGEST_SOURCE + 1)
    if len(data) > _LARGEST_SOURCE:
        raise OSError("too long to look at")
    return data.decode("utf-8", "replace")


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
