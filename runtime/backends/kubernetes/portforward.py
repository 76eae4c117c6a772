"""Connect to a port on 127.0.0.1 of a Pod, through the API server (`pods/portforward`).

No other Pod can connect to such a port. The kubelet connects to it from inside the Pod's network, so no
NetworkPolicy has to allow that.

A websocket with the subprotocol `v4.channel.k8s.io` carries one connection. The first byte of each message is its
channel: `_DATA` for the connection's bytes, `_ERROR` for an error of the kubelet. On each channel, the server first
sends the number of the port, in two bytes. The server closes the websocket when the connection ends.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, SecurityError
from websockets.typing import Subprotocol

from runtime.backends.kubernetes.client import WebsocketTarget

_websocket_logger = logging.getLogger(f"{__name__}.websocket")
_websocket_logger.setLevel(logging.WARNING)  # its debug messages show the credentials

# The module's docstring explains the protocol.
_SUBPROTOCOL = Subprotocol("v4.channel.k8s.io")
_DATA, _ERROR = 0, 1
_PORT_BYTES = 2
_CHUNK_BYTES = 32 * 1024
"""Maximum bytes of one message that this module sends: as many as a kubelet sends."""
_PING_SECONDS = 20.0
"""The interval of pings, so that no load balancer closes an idle websocket: the shortest limits are about a minute."""
_STALLED_SECONDS = 90
"""How long the API server may leave sent bytes unacknowledged. Then the network has failed. This does not limit how
long the program in the Pod takes to respond."""
_CLOSE_SECONDS = 2.0
"""How long to wait for the server to close a websocket: short, since its last messages are not needed."""


async def connect_to(target: WebsocketTarget) -> ClientConnection:
    """Return an open websocket. Raises OSError, WebSocketException.

    An open websocket does not show that something listens on the port, since the kubelet connects only afterwards.
    """
    tls: dict[str, Any] = {} if target.ssl is None else {"ssl": target.ssl}
    if target.server_hostname is not None:
        tls["server_hostname"] = target.server_hostname
    connection = await connect(
        target.url,
        additional_headers=target.headers,
        subprotocols=[_SUBPROTOCOL],
        proxy=target.proxy,
        compression=None,  # JupyterLab compresses most of its data, and the rest is small
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


async def send(connection: ClientConnection, data: bytes) -> None:
    """Send bytes to the program in the Pod. Raises ConnectionClosed."""
    await connection.send(bytes([_DATA]) + data)


async def receive(connection: ClientConnection) -> AsyncGenerator[bytes]:
    """Yield the bytes that the program in the Pod sends, until the connection ends or the kubelet reports an error."""
    port_bytes_left = {_DATA: _PORT_BYTES, _ERROR: _PORT_BYTES}  # bytes of the port's number to skip, by channel
    with suppress(ConnectionClosed):
        async for message in connection:
            if not isinstance(message, bytes) or not message or message[0] not in port_bytes_left:
                return  # not a message of this protocol
            channel, content = message[0], message[1:]
            payload = content[port_bytes_left[channel] :]
            port_bytes_left[channel] = max(0, port_bytes_left[channel] - len(content))
            if payload and channel == _ERROR:
                return
            if payload:
                yield payload


async def relay(client: socket.socket, connection: ClientConnection) -> None:
    """Pass on the bytes of a Unix socket, in both directions, until one side closes its connection. Closes `client`."""
    reader, writer = await asyncio.open_connection(sock=client)

    async def to_pod() -> None:
        while chunk := await reader.read(_CHUNK_BYTES):
            await send(connection, chunk)

    async def to_client() -> None:
        async with aclosing(receive(connection)) as chunks:
            async for chunk in chunks:
                writer.write(chunk)
                await writer.drain()

    tasks = [asyncio.create_task(direction()) for direction in (to_pod, to_client)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        writer.close()  # sends first what is still buffered
