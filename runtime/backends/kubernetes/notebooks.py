"""Connect to the JupyterLab of a Pod, through the API server (`pods/portforward`).

JupyterLab listens on 127.0.0.1 of its Pod, where no other Pod can connect. The kubelet connects to it from inside the
Pod's network, which no NetworkPolicy has to allow.

A websocket with the subprotocol `v4.channel.k8s.io` carries one connection. The first byte of each message is its
channel: `_DATA` for the connection's bytes, `_ERROR` for an error of the kubelet. On each channel, the server first
sends the number of the port, in two bytes. The server closes the websocket when the connection ends.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, SecurityError, WebSocketException
from websockets.typing import Subprotocol

from runtime.backends.kubernetes.client import ApiClient, ApiError, WebsocketTarget, resource_path
from runtime.backends.kubernetes.objects import is_deleting, pod_phase
from runtime.backends.kubernetes.pod_plan import NOTEBOOK_PORT
from runtime.backends.kubernetes.runs import Runs
from runtime.errors import BackendUnavailable, RunNotFound

logger = logging.getLogger(__name__)
_websocket_logger = logging.getLogger(f"{__name__}.websocket")
_websocket_logger.setLevel(logging.WARNING)  # its debug messages show the credentials

# The module's docstring explains the protocol.
_SUBPROTOCOL = Subprotocol("v4.channel.k8s.io")
_DATA, _ERROR = 0, 1
_PORT_BYTES = 2
_CHUNK_BYTES = 32 * 1024
"""Maximum bytes of one message that this module sends: as many as a kubelet sends."""
_START_SECONDS = 30.0
"""How long opening a tunnel may take, including the start of JupyterLab, which takes 3 to 15 s on a small node."""
_RETRY_SECONDS = 1.0
"""The interval of attempts to connect to a JupyterLab that starts."""
_PING_SECONDS = 20.0
"""The interval of pings, so that no load balancer closes an idle websocket: the shortest limits are about a minute."""
_STALLED_SECONDS = 90
"""How long the API server may leave sent bytes unacknowledged. Then the network has failed. It does not limit how long
JupyterLab takes to respond."""
_CLOSE_SECONDS = 2.0
"""How long to wait for the server to close a websocket: short, since its last messages are not needed."""
_LOOKUP_THREADS = 4
"""Threads that wait for the API server when tunnels are opened. If all of them wait, further tunnels fail after
_START_SECONDS, but nothing else in the process becomes slower."""
_MAX_KNOWN = 1000
"""Maximum number of notebooks whose Pod is remembered, 200 bytes each: more than are in use at a time."""
_PROBE = b"GET /api HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
"""A request to JupyterLab that changes nothing and does not count as the user's activity."""


class NotebookTunnels:
    """Tunnels to the notebooks of one cluster."""

    def __init__(self, api: ApiClient, runs: Runs) -> None:
        self._api = api
        self._runs = runs
        self._paths: dict[str, str] = {}
        """By run: the path of its Pod, for notebooks that have answered. The oldest first."""
        self._threads = ThreadPoolExecutor(_LOOKUP_THREADS, "notebook-lookup")

    @asynccontextmanager
    async def open(self, name: str) -> AsyncIterator[str]:
        """Connect to the notebook of a run. See `runtime.backends.base.Tunnel`."""
        async with await self._connect(name) as connection:
            # Only this user can enter the folder, and so connect.
            with tempfile.TemporaryDirectory(prefix="trainyard-") as folder, socket.socket(socket.AF_UNIX) as listener:
                path = f"{folder}/s"
                listener.setblocking(False)
                listener.bind(path)
                listener.listen(1)
                relay = asyncio.create_task(_relay(listener, connection))
                try:
                    yield path
                finally:
                    relay.cancel()
                    await asyncio.gather(relay, return_exceptions=True)

    async def _connect(self, name: str) -> ClientConnection:
        """Return a connection to JupyterLab; wait for one that starts. Raises RunNotFound, BackendUnavailable."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_START_SECONDS):
                while True:
                    path, target = await loop.run_in_executor(self._threads, self._find, name)
                    if name in self._paths:  # JupyterLab has answered before
                        return await _connect_to(target)
                    if await _is_listening(target):
                        self._remember(name, path)
                    else:
                        await asyncio.sleep(_RETRY_SECONDS)
        except (OSError, WebSocketException, BackendUnavailable) as error:
            self._paths.pop(name, None)
            reason = str(error) or type(error).__name__
            logger.warning("The notebook of the run '%s' cannot be reached: %s", name, reason)
            raise BackendUnavailable(f"The notebook of the run '{name}' cannot be reached: {reason}") from error

    def _find(self, name: str) -> tuple[str, WebsocketTarget]:
        """Return the path of the run's Pod, and how to connect to it. Raises RunNotFound, BackendUnavailable."""
        path = self._paths.get(name) or self._find_pod(name)
        return path, self._api.websocket_target(f"{path}/portforward", ports=str(NOTEBOOK_PORT))

    def _find_pod(self, name: str) -> str:
        """Return the path of the run's Pod. Raises RunNotFound if it does not run, BackendUnavailable."""
        try:
            pods = self._runs.list_pods(self._runs.get_job(name))
        except ApiError as error:
            raise BackendUnavailable(str(error)) from error
        for pod in pods:
            if pod_phase(pod) == "Running" and not is_deleting(pod):
                return resource_path("v1", "pods", pod["metadata"]["namespace"], pod["metadata"]["name"])
        raise RunNotFound(f"The run '{name}' has no pod that runs.")

    def _remember(self, name: str, path: str) -> None:
        self._paths[name] = path
        while len(self._paths) > _MAX_KNOWN:
            del self._paths[next(iter(self._paths))]


def _create_connection_class() -> type[ClientConnection]:
    """Return a class that has at most one object, so that `connect` cannot follow a redirect.

    `connect` would open a second connection to the redirect's target and send it the credentials, which are for the API
    server only. The API server itself sends no redirects.
    """

    class SingleConnection(ClientConnection):
        exists = False

        def __init__(self, *args: Any, **options: Any) -> None:
            if SingleConnection.exists:
                raise SecurityError("The API server must not redirect.")
            SingleConnection.exists = True
            super().__init__(*args, **options)

    return SingleConnection


async def _connect_to(target: WebsocketTarget) -> ClientConnection:
    """Return an open websocket. Raises OSError, WebSocketException."""
    tls: dict[str, Any] = {} if target.ssl is None else {"ssl": target.ssl}
    if target.server_hostname is not None:
        tls["server_hostname"] = target.server_hostname
    connection = await connect(
        target.url,
        additional_headers=target.headers,
        subprotocols=[_SUBPROTOCOL],
        proxy=target.proxy,
        compression=None,  # most is compressed by JupyterLab, or small
        open_timeout=None,  # the caller has one
        close_timeout=_CLOSE_SECONDS,
        ping_interval=_PING_SECONDS,
        ping_timeout=None,  # a pong waits behind data, which a slow browser may leave unread for long
        max_queue=1,  # as few messages as possible wait in memory for a slow browser
        logger=_websocket_logger,
        create_connection=_create_connection_class(),
        **tls,
    )
    tcp = connection.transport.get_extra_info("socket")
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _STALLED_SECONDS * 1000)
    return connection


async def _is_listening(target: WebsocketTarget) -> bool:
    """Return whether JupyterLab answers a request. Raises OSError, WebSocketException.

    An open websocket does not show that JupyterLab listens, since the kubelet connects to it only afterwards.
    """
    async with await _connect_to(target) as connection:
        with suppress(ConnectionClosed):  # the kubelet may have failed to connect already
            await connection.send(bytes([_DATA]) + _PROBE)
        async with aclosing(_receive(connection)) as chunks:
            async for _chunk in chunks:
                return True
    return False


async def _relay(listener: socket.socket, connection: ClientConnection) -> None:
    """Pass on the bytes of one client of `listener`, in both directions, until one side closes its connection."""
    client, _address = await asyncio.get_running_loop().sock_accept(listener)
    reader, writer = await asyncio.open_connection(sock=client)

    async def to_notebook() -> None:
        while chunk := await reader.read(_CHUNK_BYTES):
            await connection.send(bytes([_DATA]) + chunk)

    async def to_client() -> None:
        async with aclosing(_receive(connection)) as chunks:
            async for chunk in chunks:
                writer.write(chunk)
                await writer.drain()

    tasks = [asyncio.create_task(each()) for each in (to_notebook, to_client)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        writer.close()  # sends first what is still buffered


async def _receive(connection: ClientConnection) -> AsyncGenerator[bytes]:
    """Yield the bytes that JupyterLab sends, until the connection ends or the kubelet reports an error."""
    port_bytes_left = {_DATA: _PORT_BYTES, _ERROR: _PORT_BYTES}  # bytes of the port's number to skip, by channel
    with suppress(ConnectionClosed):
        async for message in connection:
            if not isinstance(message, bytes) or not message or message[0] not in port_bytes_left:
                return  # another protocol
            channel, content = message[0], message[1:]
            payload = content[port_bytes_left[channel] :]
            port_bytes_left[channel] = max(0, port_bytes_left[channel] - len(content))
            if payload and channel == _ERROR:
                return
            if payload:
                yield payload
