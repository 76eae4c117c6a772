"""Ask a fork server, which has imported a framework in advance, to fork the ranks of a node into the node's sandbox.

The node starts cold if the fork server does not accept the connection, or has no rank ready in time. No third-party
packages: the supervisor imports this.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from runtime import pids

OOM_SCORE = 500
"""`oom_score_adj` of a rank: halfway between the default, 0, and the maximum, 1000. When the machine's memory runs out,
the kernel kills ranks before the console, whose value is 0."""
_TIMEOUT_SECONDS = 1.0
"""How long each call on the socket may take: to connect to the fork server, a local process, and to send it a request.
Waiting longer would not be worth it, since a cold start takes about as long."""


def connect(folder: Path, name: str) -> socket.socket:
    """Connect to the socket `name` in this folder. Raises OSError.

    A socket's address has at most 107 bytes, and the folder's path may be longer. So the folder is opened, and its
    short path in /proc is used.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(_TIMEOUT_SECONDS)
            connection.connect(f"/proc/self/fd/{descriptor}/{name}")
        except BaseException:
            connection.close()
            raise
        return connection
    finally:
        os.close(descriptor)


class ForkServerConnection:
    """A connection to a fork server that is to fork the ranks of one node.

    The ranks and the launcher each get one end of a socket pair; the launcher's is `launcher_end`. Through it the
    launcher tells the ranks when to enter the sandbox, and passes each its script (`runtime.launcher.warm.client`).
    """

    def __init__(self, connection: socket.socket, ranks: int) -> None:
        self._connection = connection
        self._ranks = ranks
        self._ranks_end, self.launcher_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def send_sandbox(self, init_pid: int, parent_pid: int, limits: dict[str, int], cgroups: Sequence[Path]) -> None:
        """Send the fork server the sandbox in which to fork the ranks, then close this connection.

        `init_pid` is the sandbox's first process, a child of the process `parent_pid`. That process must be a child of
        the caller that is not reaped yet, since the kernel could give a reaped one's pid to another process. Each rank
        gets the `limits`, as `resource_limits.kernel_limits` returns them. `cgroups` are the folders of the node's
        control groups.

        Raises nothing. This process closes its copy of the ranks' end in any case. If the request was not sent, that
        was the only copy. Then the launcher reads the end of the stream, and starts the ranks cold.
        """
        with self._connection, self._ranks_end, contextlib.suppress(OSError):
            pidfd = os.pidfd_open(init_pid)
            try:
                # The kernel may have reused `init_pid` for another process, but not `parent_pid`, which is not reaped.
                # So if the parent is still the same, the descriptor refers to the sandbox's first process.
                if pids.parent(init_pid) != parent_pid:
                    return
                request = {
                    "ranks": self._ranks,
                    "limits": limits,
                    "cgroups": [str(group) for group in cgroups],
                    "oom_score_adj": OOM_SCORE,
                }
                descriptors = array.array("i", [self._ranks_end.fileno(), pidfd])
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
                self._connection.sendmsg([json.dumps(request).encode()], ancillary)
            finally:
                os.close(pidfd)


def connect_fork_server(socket_path: str, ranks: int) -> ForkServerConnection | None:
    """Connect to the fork server at this path, to fork `ranks` ranks of a node; return None if it does not run yet."""
    try:
        return ForkServerConnection(connect(Path(socket_path).parent, Path(socket_path).name), ranks)
    except OSError:
        return None
