"""Connect to hosts that customers name, at IP addresses that are allowed.

A name is resolved once, and the connection goes to the address that was checked. So a name that resolves differently
afterwards cannot redirect the connection.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

from runtime.packages.proxy import is_public

TIMEOUT_SECONDS = 60
"""How long a server may send nothing."""
_TUNNELS = tuple(ipaddress.ip_network(text) for text in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32"))
"""IPv6 ranges that contain IPv4 addresses, which may be private (NAT64, 6to4, Teredo)."""


class ForbiddenAddress(Exception):
    """A host has no IP address that is allowed."""


class _Connection(http.client.HTTPConnection):
    """A connection to the IP address that was checked; over TLS, with the certificate of the host."""

    def __init__(self, host: str, port: int, *, ip: str, tls: ssl.SSLContext | None) -> None:
        self.default_port = http.client.HTTPS_PORT if tls else http.client.HTTP_PORT
        super().__init__(host, port, timeout=TIMEOUT_SECONDS)
        self._ip, self._tls = ip, tls

    def connect(self) -> None:
        """Connect without resolving the name again."""
        tcp = socket.create_connection((self._ip, self.port), self.timeout)
        try:
            self.sock = self._tls.wrap_socket(tcp, server_hostname=self.host) if self._tls else tcp
        except BaseException:
            tcp.close()
            raise


def connection_to(origin: str, *, allows_private: bool = False) -> http.client.HTTPConnection:
    """Return a connection to an origin such as `https://host:8443`; only to a public address unless `allows_private`.

    Link-local addresses are never reached. Raises ForbiddenAddress, OSError.
    """
    parts = urlsplit(origin)
    is_tls = parts.scheme == "https"
    host, port = parts.hostname or "", parts.port or (http.client.HTTPS_PORT if is_tls else http.client.HTTP_PORT)
    resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(socket_address[0]) for _family, _type, _protocol, _name, socket_address in resolved]
    for address in dict.fromkeys(addresses):
        if _is_allowed(address, allows_private):
            return _Connection(host, port, ip=address, tls=tls_context() if is_tls else None)
    raise ForbiddenAddress(host)


@contextlib.contextmanager
def time_limit(connection: http.client.HTTPConnection, seconds: float) -> Iterator[None]:
    """Shut the connection down if the block takes longer than `seconds`; a read or write in the block then fails."""
    open_socket = connection.sock  # stored here: `http.client` sets `connection.sock` to None before the body is read

    def shut_down() -> None:
        with contextlib.suppress(OSError):
            open_socket.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, shut_down)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _is_allowed(address: str, allows_private: bool) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])  # without the zone of an IPv6 address, such as %eth0
    ip = getattr(ip, "ipv4_mapped", None) or ip
    if any(ip in network for network in _TUNNELS):
        return False
    # Link-local addresses hold the metadata services of clouds, so no setting allows them.
    return is_public(address) or (allows_private and not (ip.is_link_local or ip.is_multicast or ip.is_unspecified))


def tls_context() -> ssl.SSLContext:
    """Return the context that checks certificates."""
    return ssl.create_default_context()
