"""Connect to hosts that customers name, such as receivers of webhooks, but not to private addresses of the operator.

A host name is resolved once, and the connection goes to an address that was checked. Therefore a DNS server that
returns another address the second time (DNS rebinding) cannot redirect the connection.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from runtime.packages.proxy import is_public

TIMEOUT_SECONDS = 60
"""How long a connection waits for the server to accept it, or to send the next bytes: servers of large files may be
slow. Webhooks set a shorter limit."""
MAX_ADDRESSES = 4
"""How many of a host's addresses are tried in turn, such as one of IPv6 and one of IPv4. They share the time limit."""
_TUNNELS = tuple(ipaddress.ip_network(text) for text in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32"))
"""IPv6 ranges (NAT64, 6to4, Teredo) whose addresses contain an IPv4 address, which may be private."""


class ForbiddenAddress(Exception):
    """A host has no IP address to which the console may connect."""


class _Connection(http.client.HTTPConnection):
    """A connection to the first of `addresses` that accepts it. The certificate for TLS must be for `host`."""

    timeout: float

    def __init__(self, host: str, port: int, *, addresses: Sequence[str], tls: ssl.SSLContext | None) -> None:
        # http.client leaves this port out of the header Host, as servers expect it.
        self.default_port = http.client.HTTPS_PORT if tls else http.client.HTTP_PORT
        super().__init__(host, port, timeout=TIMEOUT_SECONDS)
        self._addresses, self._tls = addresses, tls

    def connect(self) -> None:
        """Connect to an address, without resolving the name again. If all fail, raise the last address's error."""
        for number, address in enumerate(self._addresses, start=1):
            try:
                tcp = socket.create_connection((address, self.port), self.timeout / len(self._addresses))
                break
            except OSError:
                if number == len(self._addresses):
                    raise
        tcp.settimeout(self.timeout)
        try:
            self.sock = self._tls.wrap_socket(tcp, server_hostname=self.host) if self._tls else tcp
        except BaseException:  # also a KeyboardInterrupt, else the socket would stay open
            tcp.close()
            raise


def connection_to(origin: str, *, allows_private: bool = False) -> http.client.HTTPConnection:
    """Return a connection, not yet open, to an origin such as `https://host:8443`. Raises ForbiddenAddress, OSError.

    It leads to a public address of the host or, with `allows_private`, to a public or private one.
    """
    parts = urlsplit(origin)
    is_tls = parts.scheme == "https"
    host, port = parts.hostname or "", parts.port or (http.client.HTTPS_PORT if is_tls else http.client.HTTP_PORT)
    resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(socket_address[0]) for _family, _type, _protocol, _name, socket_address in resolved]
    allowed = [address for address in dict.fromkeys(addresses) if _is_allowed(address, allows_private)]
    if not allowed:
        raise ForbiddenAddress(host)
    return _Connection(host, port, addresses=allowed[:MAX_ADDRESSES], tls=tls_context() if is_tls else None)


@contextlib.contextmanager
def time_limit(connection: http.client.HTTPConnection, seconds: float) -> Iterator[None]:
    """Shut the open connection down if the block takes longer than `seconds`; reads and writes in it then fail."""
    open_socket = connection.sock  # http.client sets `connection.sock` to None before the response's body is read

    def shut_down() -> None:
        with contextlib.suppress(OSError):  # the connection has already ended
            open_socket.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, shut_down)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _is_allowed(address: str, allows_private: bool) -> bool:
    """Return whether the console may connect to an IP address."""
    ip = ipaddress.ip_address(address.partition("%")[0])  # without the zone of an IPv6 address, such as %eth0
    ip = getattr(ip, "ipv4_mapped", None) or ip  # ::ffff:10.0.0.1 leads to 10.0.0.1
    if any(ip in network for network in _TUNNELS):
        return False
    # Clouds serve machines' credentials at link-local addresses (169.254.169.254), so no setting allows these.
    return is_public(address) or (allows_private and not (ip.is_link_local or ip.is_multicast or ip.is_unspecified))


def tls_context() -> ssl.SSLContext:
    """Return a TLS context that checks certificates. Tests replace this function."""
    return ssl.create_default_context()
