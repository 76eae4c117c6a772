"""The messages between the backend and the warm pool's daemon.

Sockets lie in `<root>/.warm_pool`, which only the console's user may enter. If the daemon does not answer within a
second, the run starts cold. Imports no installed package: the daemon and the starter use Python without site-packages.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

from runtime.backends.supervision.node_plan import SupervisorPlan
from runtime.backends.supervision.rank_fork import connect

FOLDER = ".warm_pool"
"""The pool's folder, below the root folder of runs."""
SOCKET = "daemon.sock"
"""The daemon's socket, in the pool's folder."""
ACCEPTED = b"+"
"""The daemon's answer to a request that it accepts."""
_LENGTH = struct.Struct("!I")
"""Precedes a request: its number of bytes."""
_REQUEST_SECONDS = 10.0
"""How long a submitter may take to send its request after it has connected. It needs milliseconds; a machine under
heavy load may need seconds."""
_MAX_DESCRIPTORS = 250
"""Maximum number of locks in one request, one for each node. The kernel passes at most 253 descriptors at once
(SCM_MAX_FD), so a run with more nodes starts cold."""


class ForkServer(TypedDict):
    """One image's fork server: the name of its socket, and how to start it. It imports `modules` in advance."""

    name: str
    python: str
    modules: list[str]
    environment: dict[str, str]


class StartRequest(TypedDict):
    """All data that the starter of a run's supervisors needs.

    `folder` is the run's folder. `network` is `private` or `host`. `worker_ports` and `spare_ports` say how many ports
    to reserve. `locks` are descriptors, and `nodes` the plans, one for each node. `nonce` distinguishes this submission
    from a later one of the same name.
    """

    folder: str
    nonce: str
    network: str
    worker_ports: int
    spare_ports: int
    locks: list[int]
    nodes: list[SupervisorPlan]


class PoolRequest(TypedDict):
    """A request to the daemon: start this fork server, unless it runs already, and start this run. None: start none."""

    fork_server: ForkServer | None
    start: StartRequest | None


@contextlib.contextmanager
def sending_request(root: Path, request: PoolRequest) -> Iterator[bool]:
    """Send a request to the daemon and yield whether it accepted the request. The run starts when the block ends."""
    try:
        connection = connect(root / FOLDER, SOCKET)
    except OSError:
        yield False
        return
    with connection:
        yield _send(connection, request)


def _send(connection: socket.socket, request: PoolRequest) -> bool:
    """Send a request with its locks; return whether the daemon accepted it."""
    data = json.dumps(request).encode()
    start = request["start"]
    try:
        socket.send_fds(connection, [_LENGTH.pack(len(data))], [] if start is None else start["locks"])
        connection.sendall(data)
        return connection.recv(1) == ACCEPTED
    except OSError:
        return False


def receive_request(connection: socket.socket) -> PoolRequest:
    """Receive one request. In the result, `locks` are descriptors of this process. Raises OSError, ValueError."""
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
