"""An HTTP proxy on a Unix socket that connects only to the hosts of package indexes.

Sandboxed code without a network reaches the proxy through a mounted socket. The proxy serves CONNECT (for https) and
requests with an absolute http address, and resolves the names of hosts itself. A host that the operator has not chosen
must have a public address. So a forged answer of a name server gives no access to a private network.
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
"""Maximum length of a request's head. Those of pip and uv have less than 1 KiB."""
_HEAD_SECONDS = 10.0
"""How long a client may take to send a request's head. Clients on the same machine send it at once."""
_CONNECT_SECONDS = 20.0
"""How long each address of an index may take to accept a connection. Even a far server accepts within a second."""
_IDLE_SECONDS = 120.0
"""How long a connection may stay without data. An index may take a minute to prepare a large listing."""
_MAX_CONNECTIONS = 64
"""Connections that are served at once; further ones wait. An installation downloads 8 files at once."""
_CHUNK_BYTES = 1 << 16
"""Bytes that are read at a time."""
_MAX_REFUSED_HOSTS = 20
"""Maximum number of refused hosts that are kept for the installation's log, since hostile code can try any number."""
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
"""The IPv6 addresses that IANA assigns to hosts of the Internet."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""IPv6 addresses whose last 32 bits are an IPv4 address (RFC 6052)."""

Hosts = Mapping[tuple[str, int], bool]
"""Allowed hosts. A key is the lower-case name and the port, a value whether the host may have a private address."""


class Proxy:
    """The proxy while it runs. `refused_hosts` has the hosts, as `name:port`, to which it has refused connections."""

    def __init__(self, hosts: Hosts) -> None:
        self.refused_hosts: set[str] = set()
        self._hosts = hosts
        self._connection_slots = asyncio.Semaphore(_MAX_CONNECTIONS)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to its end."""
        async with self._connection_slots:
            try:
                await self._handle_request(reader, writer)
            except (TimeoutError, OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                pass  # a malformed request, or a connection that ended or timed out: the client reports it itself
            finally:
                writer.close()

    async def _handle_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connect the client to the host that it requests, if that is allowed. Raises the errors of the connections."""
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _HEAD_SECONDS)
        first_line, *header_lines = head.decode("latin-1").split("\r\n")
        method, target, _version = first_line.split(" ")
        if method == "CONNECT":
            name, _, port = target.rpartition(":")
            forwarded_head = b""
        else:
            address = urlsplit(target)
            if address.scheme != "http":
                await _refuse(writer, 400, "Only http addresses and CONNECT are served.")
                return
            name, port = address.hostname or "", str(address.port or 80)
            path = (address.path or "/") + (f"?{address.query}" if address.query else "")
            forwarded_head = _rewrite_head(method, path, header_lines)
        host, port_number = name.strip("[]").lower(), int(port)
        if (host, port_number) not in self._hosts:
            if len(self.refused_hosts) < _MAX_REFUSED_HOSTS:
                self.refused_hosts.add(f"{host[:253]}:{port_number}")  # a host name has at most 253 characters
            await _refuse(writer, 403, "This host is not one of the configured package indexes.")
            return
        upstream = await self._connect(host, port_number)
        if upstream is None:
            await _refuse(writer, 502, "The package index cannot be reached.")
            return
        upstream_reader, upstream_writer = upstream
        try:
            if forwarded_head:
                upstream_writer.write(forwarded_head)
            else:
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await asyncio.gather(_pipe(reader, upstream_writer), _pipe(upstream_reader, writer))
        finally:
            upstream_writer.close()

    async def _connect(self, name: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """Connect to the first allowed address of a host that answers; None if there is none."""
        loop = asyncio.get_running_loop()
        try:
            entries = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        except OSError:
            return None
        # The fifth part of an entry is the socket's address: the IP address and the port.
        for address in dict.fromkeys(str(entry[4][0]) for entry in entries):
            if not self._hosts[name, port] and not is_public(address):
                continue
            with contextlib.suppress(OSError, asyncio.TimeoutError):  # the next address may answer
                return await asyncio.wait_for(asyncio.open_connection(address, port), _CONNECT_SECONDS)
        return None


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the public Internet; see `effective_ip`."""
    ip = effective_ip(address)
    # Python takes obsolete kinds of IPv6 addresses for public, such as site-local ones (fec0::1).
    if isinstance(ip, ipaddress.IPv6Address) and ip not in _GLOBAL_UNICAST:
        return False
    return ip.is_global and not ip.is_multicast


def effective_ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the IPv4 address to which an IPv6 address leads (mapped, 6to4, NAT64), or else the address itself."""
    ip = ipaddress.ip_address(address.partition("%")[0])  # without the scope of a link-local IPv6 address
    if isinstance(ip, ipaddress.IPv4Address):
        return ip
    nat64 = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else None
    return ip.ipv4_mapped or ip.sixtofour or nat64 or ip


@contextlib.contextmanager
def run_in_thread(folder: Path, name: str, hosts: Hosts) -> Iterator[Proxy]:
    """Serve on the socket `name` in `folder`, in a thread of its own, until the `with` block ends."""
    listener = socket.socket(socket.AF_UNIX)
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # By the short path of the descriptor, since the address of a Unix socket has at most 107 bytes.
        listener.bind(f"/proc/self/fd/{folder_fd}/{name}")
    finally:
        os.close(folder_fd)
    listener.listen(_MAX_CONNECTIONS)
    proxy = Proxy(hosts)
    # The thread puts its loop and its stop event here once it accepts connections.
    server_handles: queue.SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = queue.SimpleQueue()

    async def serve() -> None:
        stop = asyncio.Event()
        async with await asyncio.start_unix_server(proxy.serve, sock=listener, limit=_MAX_HEAD_BYTES):
            server_handles.put((asyncio.get_running_loop(), stop))
            await stop.wait()

    # When the event ends `serve`, `asyncio.run` cancels the connections that are still open.
    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="index-proxy", daemon=True)
    thread.start()
    loop, stop = server_handles.get()
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        (folder / name).unlink(missing_ok=True)


def _rewrite_head(method: str, path: str, header_lines: list[str]) -> bytes:
    """Return the head of an http request as the index gets it.

    It asks the index to close the connection afterwards. So a client cannot send a second request for another host.
    """
    proxy_headers = ("connection:", "proxy-connection:", "proxy-authorization:", "keep-alive:")
    headers = [line for line in header_lines if line and not line.lower().startswith(proxy_headers)]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *headers, "Connection: close", "", ""]).encode("latin-1")


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes until `reader` ends, and then close the writing side of `writer`'s connection."""
    try:
        while data := await asyncio.wait_for(reader.read(_CHUNK_BYTES), _IDLE_SECONDS):
            writer.write(data)
            await writer.drain()
    finally:
        with contextlib.suppress(OSError):  # the connection has ended already
            writer.write_eof()


async def _refuse(writer: asyncio.StreamWriter, status: int, sentence: str) -> None:
    """Respond with this HTTP status and sentence."""
    text = sentence.encode()
    writer.write(
        b"HTTP/1.1 %d Refused\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s"
        % (status, len(text), text)
    )
    await writer.drain()
