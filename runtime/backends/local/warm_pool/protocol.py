"""The messages among the backend, the warm pool's daemon, the supervisors and the fork servers.

Sockets lie in `<root>/.warm_pool`, which only the console's user may enter. If a process does not answer within a
second, the caller starts cold. Standard library only: the supervisor imports this.
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
from typing import TypedDict

from runtime import pids
from runtime.backends.local.node_plan import LocalNodePlan

FOLDER = ".warm_pool"
SOCKET = "daemon.sock"
ACCEPTED = b"+"
OOM_SCORE = 500
"""`oom_score_adj` of a rank. The kernel kills it before the console (0) when the machine's memory runs out."""
_LENGTH = struct.Struct("!I")
_ANSWER_SECONDS = 1.0
"""How long a local process may take to answer. A cold start takes less than a second."""
_REQUEST_SECONDS = 10.0
"""How long a submitter that has connected may take to send a request, on a machine under heavy load."""
_MAX_DESCRIPTORS = 250
"""Locks of one request, one for each node. The kernel passes 253 descriptors at most (SCM_MAX_FD)."""


class ForkServer(TypedDict):
    """One image's fork server: the name of its socket, and how to start it. It imports `modules` in advance."""

    name: str
    python: str
    modules: list[str]
    environment: dict[str, str]


class StartRequest(TypedDict):
    """Everything needed to start the supervisors of one submitted run.

    `folder` is the run's folder, `network` is `private` or `host`, and the ports are numbers of ports. `locks` are
    descriptors, one for each node. `nonce` distinguishes this submission from a later one of the same name.
    """

    folder: str
    nonce: str
    network: str
    worker_ports: int
    spare_ports: int
    locks: list[int]
    nodes: list[LocalNodePlan]


class PoolRequest(TypedDict):
    """A request to the daemon: start this fork server unless it runs, and start this run. None: neither is wanted."""

    fork_server: ForkServer | None
    start: StartRequest | None


@contextlib.contextmanager
def request_sent(root: Path, request: PoolRequest) -> Iterator[bool]:
    """Send a request to the daemon and yield whether it accepted. The run starts when the block is left."""
    try:
        connection = connect(root / FOLDER, SOCKET)
    except OSError:
        yield False
        return
    with connection:
        yield _send(connection, request)


def _send(connection: socket.socket, request: PoolRequest) -> bool:
    data = json.dumps(request).encode()
    start = request["start"]
    try:
        socket.send_fds(connection, [_LENGTH.pack(len(data))], [] if start is None else start["locks"])
        connection.sendall(data)
        return connection.recv(1) == ACCEPTED
    except OSError:
        return False


def receive_request(connection: socket.socket) -> PoolRequest:
    """Receive one request. Its `locks` are then descriptors of this process. Raises OSError, ValueError."""
    connection.settimeout(_REQUEST_SECONDS)
    length, locks, _flags, _address = socket.recv_fds(connection, _LENGTH.size, _MAX_DESCRIPTORS)
    missing_bytes = _LENGTH.unpack(length)[0]
    chunks = []
    while missing_bytes:
        chunk = connection.recv(min(missing_bytes, 1 << 20))
        if not chunk:
            raise ConnectionResetError("the request is incomplete")
        chunks.append(chunk)
        missing_bytes -= len(chunk)
    request: PoolRequest = json.loads(b"".join(chunks))
    start = request["start"]
    if len(locks) != (0 if start is None else len(start["nodes"])):
        raise ValueError("the request came without its locks")
    if start is not None:
        start["locks"] = list(locks)
    return request


def connect(folder: Path, name: str) -> socket.socket:
    """Connect to a socket in this folder. Raises OSError.

    The path through /proc is short. The folder's own path may be longer than the 107 bytes of a socket's address.
    """
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


class RankFork:
    """A connection to a fork server that forks the ranks of one node. The launcher gets `launcher_end`."""

    def __init__(self, connection: socket.socket, ranks: int) -> None:
        self._connection = connection
        self._ranks = ranks
        self._ranks_end, self.launcher_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def offer_sandbox(self, init: int, parent: int, limits: dict[str, int], cgroups: Sequence[Path]) -> None:
        """Send the fork server the sandbox in which to fork the ranks, then close this connection.

        `init` is the sandbox's first process, a child of `parent`. `parent` must be a child of this process that it has
        not reaped.
        """
        with self._connection, self._ranks_end, contextlib.suppress(OSError):
            pidfd = os.pidfd_open(init)
            try:
                # `parent` is not reaped, so its pid is not reused. If it is still the parent of `init`, the descriptor
                # refers to the sandbox.
                if pids.parent(init) != parent:
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


def request_ranks(server: str, ranks: int) -> RankFork | None:
    """Connect to the fork server whose socket has this path; return None if it does not run yet."""
    try:
        return RankFork(connect(Path(server).parent, Path(server).name), ranks)
    except OSError:
        return None
