"""An HTTP proxy on a Unix socket that connects to the hosts of package indexes only.

Sandboxed code without a network reaches it through a mounted socket. It serves CONNECT (for https) and requests with an
absolute http address. Names are resolved here. A host that the operator has not chosen must have a public address, so
that a forged answer of a name server opens no private network.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import queue
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

_MAX_HEAD_BYTES = 16 * 1024
"""Bytes of a request's head; pip's and uv's have less than 1 KiB."""
_HEAD_SECONDS = 10.0
_CONNECT_SECONDS = 20.0
_IDLE_SECONDS = 120.0
"""How long a connection may stay without data. An index may take a minute to prepare a large listing."""
_MAX_CONNECTIONS = 64
_CHUNK_BYTES = 1 << 16
_MAX_REFUSALS = 20
"""Refused hosts that are kept for the log."""

Hosts = Mapping[tuple[str, int], bool]
"""Allowed hosts: (lower-case name, port) to whether the host may have a private address."""


class Proxy:
    """The proxy while it runs. `refused` has the hosts, as `name:port`, that were asked for in vain."""

    def __init__(self, hosts: Hosts) -> None:
        self.refused: set[str] = set()
        self._hosts = hosts
        self._free = asyncio.Semaphore(_MAX_CONNECTIONS)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to its end."""
        async with self._free:
            try:
                await self._serve(reader, writer)
            except (TimeoutError, OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                pass  # a client or an index that broke off: the client's own error says so
            finally:
                writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _HEAD_SECONDS)
        first_line, *header_lines = head.decode("latin-1").split("\r\n")
        method, target, _version = first_line.split(" ")
        if method == "CONNECT":
            name, _, port = target.rpartition(":")
            forwarded = b""
        else:
            address = urlsplit(target)
            if address.scheme != "http":
                await _refuse(writer, 400, "Only http addresses and CONNECT are served.")
                return
            name, port = address.hostname or "", str(address.port or 80)
            path = (address.path or "/") + (f"?{address.query}" if address.query else "")
            forwarded = _origin_request(method, path, header_lines)
        host = name.strip("[]").lower(), int(port)
        if host not in self._hosts:
            if len(self.refused) < _MAX_REFUSALS:
                self.refused.add(f"{host[0][:253]}:{host[1]}")
            await _refuse(writer, 403, "This host is not one of the configured package indexes.")
            return
        upstream = await self._connect(*host)
        if upstream is None:
            await _refuse(writer, 502, "The package index cannot be reached.")
            return
        upstream_reader, upstream_writer = upstream
        try:
            if forwarded:
                upstream_writer.write(forwarded)
            else:
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await asyncio.gather(_pipe(reader, upstream_writer), _pipe(upstream_reader, writer))
        finally:
            upstream_writer.close()

    async def _connect(self, name: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """Connect to the first allowed address of a host that answers; None if there is none."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        except OSError:
            return None
        for address in dict.fromkeys(str(entry[4][0]) for entry in found):
            if not self._hosts[name, port] and not is_public(address):
                continue
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                return await asyncio.wait_for(asyncio.open_connection(address, port), _CONNECT_SECONDS)
        return None


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the public Internet."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(ip, "ipv4_mapped", None)
    ip = mapped or ip
    return ip.is_global and not ip.is_multicast


@contextlib.contextmanager
def running(folder: Path, name: str, hosts: Hosts) -> Iterator[Proxy]:
    """Serve on the socket `name` in `folder` while the block runs, in a thread of its own."""
    listener = socket.socket(socket.AF_UNIX)
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Through the descriptor, since the path of a socket may have at most 107 characters.
        listener.bind(f"/proc/self/fd/{folder_fd}/{name}")
    finally:
        os.close(folder_fd)
    listener.listen(_MAX_CONNECTIONS)
    proxy = Proxy(hosts)
    started: queue.SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = queue.SimpleQueue()

    async def serve() -> None:
        stop = asyncio.Event()
        async with await asyncio.start_unix_server(proxy.serve, sock=listener, limit=_MAX_HEAD_BYTES):
            started.put((asyncio.get_running_loop(), stop))
            await stop.wait()

    # When the event ends `serve`, `asyncio.run` cancels the connections that are still open.
    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="index-proxy", daemon=True)
    thread.start()
    loop, stop = started.get()
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        (folder / name).unlink(missing_ok=True)


def _origin_request(method: str, path: str, header_lines: list[str]) -> bytes:
    """Return the head for the index itself. It asks for the connection's end, so that each request names its host."""
    dropped = ("connection:", "proxy-connection:", "proxy-authorization:", "keep-alive:")
    kept = [line for line in header_lines if line and not line.lower().startswith(dropped)]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *kept, "Connection: close", "", ""]).encode("latin-1")


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes to the end of the stream, and then close the other one's writing side."""
    try:
        while data := await asyncio.wait_for(reader.read(_CHUNK_BYTES), _IDLE_SECONDS):
            writer.write(data)
            await writer.drain()
    finally:
        with contextlib.suppress(OSError):
            writer.write_eof()


async def _refuse(writer: asyncio.StreamWriter, status: int, sentence: str) -> None:
    text = sentence.encode()
    writer.write(
        b"HTTP/1.1 %d Refused\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s"
        % (status, len(text), text)
    )
    await writer.drain()
