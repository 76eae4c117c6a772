"""The Unix socket through which the console opens shells in a node. Standard library only: the supervisor imports this.

The socket is in the run's folder `nodes`, which only the console's user may enter and which the sandbox does not
contain. So only processes of that user can connect, and nothing in the sandbox can replace the socket. The launcher
inherits the listener, and starts a shell for each connection (`runtime.launcher.shells`).
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

_BACKLOG = 8
"""Connections that may wait until the launcher accepts them. Few wait at once: only people open shells,
and the launcher accepts a connection within milliseconds."""


def path_of(folder: Path, node: int) -> Path:
    """Return the path of a node's socket in the run's folder."""
    return folder / "nodes" / f"{node}.shell"


class ShellSocket:
    """One node's socket, in the supervisor."""

    def __init__(self, folder: Path, node: int) -> None:
        self._path = path_of(folder, node)

    def listen(self) -> socket.socket | None:
        """Return a listening socket; None where it cannot be created, since a run needs no shells."""
        try:
            folder_fd = os.open(self._path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return None
        listener = socket.socket(socket.AF_UNIX)
        try:
            # By this short path, since the address of a Unix socket has at most 107 bytes.
            listener.bind(f"/proc/self/fd/{folder_fd}/{self._path.name}")
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            return None
        finally:
            os.close(folder_fd)
        return listener

    def remove(self) -> None:
        """Remove the socket's file. Call this after the launcher's end, when nothing listens any more."""
        with contextlib.suppress(OSError):
            self._path.unlink()
