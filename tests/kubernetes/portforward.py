"""`pods/portforward` over a websocket, as an API server and a kubelet serve it: the subprotocol v4.channel.k8s.io.

Each message begins with its channel: 0 for data, 1 for errors. The first message on each channel is the port. The
websocket ends with the connection in the Pod.
"""

from __future__ import annotations

import select
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping

from websockets.frames import Frame, Opcode
from websockets.protocol import Protocol, Side, State
from websockets.utils import accept_key

from tests.kubernetes.resources import ApiError

SUBPROTOCOL = "v4.channel.k8s.io"
Dial = Callable[[int], socket.socket]
"""Connects to a port of a Pod. Raises OSError."""
_DATA, _ERROR = b"\0", b"\1"
_CHUNK_BYTES = 32 * 1024
_TICK_SECONDS = 0.25
_CONNECT = """
import socket, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
socket.send_fds(socket.socket(fileno=0), [b"x"], [connection.fileno()])
"""
"""Run in another network namespace: connects to a port there, and sends the connection back over stdin, a socket."""


def dial(network: str, port: int) -> socket.socket:
    """Connect to 127.0.0.1 in a network namespace; an empty one is this machine's. Raises OSError."""
    if not network:
        return socket.create_connection(("127.0.0.1", port))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = ["nsenter", f"--net={network}", "--", sys.executable, "-I", "-S", "-c", _CONNECT, str(port)]
        done = subprocess.run(command, stdin=theirs, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise ConnectionRefusedError(f"dial tcp4 127.0.0.1:{port}: {done.stderr.strip().splitlines()[-1]}")
        return socket.socket(fileno=socket.recv_fds(ours, 1, 1)[1][0])


def handshake(headers: Mapping[str, str]) -> bytes:
    """Return the response that opens the websocket. Raises ApiError 400 for another request."""
    offered = [name.strip() for name in headers.get("Sec-WebSocket-Protocol", "").split(",")]
    if headers.get("Upgrade", "").lower() != "websocket" or SUBPROTOCOL not in offered:
        raise ApiError(400, "BadRequest", "Upgrade request required")
    lines = (
        "HTTP/1.1 101 Switching Protocols", "Upgrade: websocket", "Connection: Upgrade",
        f"Sec-WebSocket-Accept: {accept_key(headers['Sec-WebSocket-Key'])}", f"Sec-WebSocket-Protocol: {SUBPROTOCOL}",
    )  # fmt: skip
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode()


def serve(client: socket.socket, port: int, dial_pod: Dial, closing: threading.Event) -> None:
    """Forward one connection over an open websocket, until one side closes it."""
    websocket = Protocol(Side.SERVER, state=State.OPEN)

    def send(channel: bytes, content: bytes) -> None:
        websocket.send_binary(channel + content)
        _flush(websocket, client)

    for channel in (_DATA, _ERROR):
        send(channel, port.to_bytes(2, "little"))
    try:
        with dial_pod(port) as pod:
            _relay(websocket, client, pod, lambda content: send(_DATA, content), closing)
    except OSError as error:
        send(_ERROR, f"error forwarding port {port} to pod: {error}".encode())
    if websocket.state is State.OPEN:
        websocket.send_close(1000)
        _flush(websocket, client)


def _relay(
    websocket: Protocol,
    client: socket.socket,
    pod: socket.socket,
    send: Callable[[bytes], None],
    closing: threading.Event,
) -> None:
    while websocket.state is State.OPEN and not closing.is_set():
        # TLS may hold bytes that it has read from the socket and `recv` has not returned. `select` does not see them.
        has_decrypted = isinstance(client, ssl.SSLSocket) and client.pending()
        ready = [client] if has_decrypted else select.select([client, pod], [], [], _TICK_SECONDS)[0]
        if client in ready:
            received = client.recv(_CHUNK_BYTES)
            if not received:
                return
            websocket.receive_data(received)
            for frame in websocket.events_received():
                if isinstance(frame, Frame) and frame.opcode is Opcode.BINARY and frame.data[:1] == _DATA:
                    pod.sendall(frame.data[1:])
            _flush(websocket, client)
        if pod in ready:
            content = pod.recv(_CHUNK_BYTES)
            if not content:
                return
            send(content)


def _flush(websocket: Protocol, client: socket.socket) -> None:
    for data in websocket.data_to_send():
        if data:  # empty data asks to close the connection, which its owner does
            client.sendall(data)
