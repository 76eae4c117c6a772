"""Find out the client's IP address, also behind trusted proxies.

No other module reads `X-Forwarded-For`. For each request `RequestMiddleware` calls `resolve_client`, which puts the
client's address into `REMOTE_ADDR`. Django, rate limits and the audit log read it there.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
IPV6_PREFIX = 64
"""Limits count all addresses of a /64 network as one, because providers give each customer at least such a network."""


def parse_networks(texts: Iterable[str]) -> list[Network]:
    """Parse the setting TRUSTED_PROXIES, IP addresses or CIDR ranges, into networks. Raises ImproperlyConfigured."""
    try:
        return [ip_network(text.strip(), strict=False) for text in texts if text.strip()]
    except ValueError as error:
        raise ImproperlyConfigured(
            f"TRUSTED_PROXIES: {error}. Name addresses or networks, such as 10.0.0.0/8."
        ) from None


def resolve_client(environ: MutableMapping[str, Any]) -> str | None:
    """Replace a proxy's address in REMOTE_ADDR by the client's, and return the client's.

    Return None if the connection has no IP address, as on a Unix socket.
    """
    peer = str(environ.get("REMOTE_ADDR") or "")
    forwarded_for = str(environ.get("HTTP_X_FORWARDED_FOR") or "")
    address = client_address(peer, forwarded_for, settings.TRUSTED_PROXIES)
    if address is not None:
        environ["REMOTE_ADDR"] = address
    return address


def client_address(peer: str, forwarded_for: str, proxies: Sequence[Network]) -> str | None:
    """Return the client's IP address; None if `peer` is no IP address.

    `peer` is the address of the connection: the client's, unless it is a trusted proxy's. Each proxy appends the
    address of its own peer to `X-Forwarded-For`. So this function reads `forwarded_for` from its end, up to the first
    address that is no trusted proxy's. Entries that a client itself wrote come before that address, and are not read.
    An entry that is no address ends the search too.
    """
    address = _parse_address(peer)
    if address is None:
        return None
    for hop in reversed(forwarded_for.split(",")):
        if not _is_proxy(address, proxies):
            break
        forwarded = _parse_address(hop)
        if forwarded is None:
            break
        address = forwarded
    return str(address)


def rate_limit_key(address: str) -> str:
    """Return the key under which limits count an address: for IPv6 its network of IPV6_PREFIX bits, else itself."""
    parsed = _parse_address(address)
    if isinstance(parsed, IPv6Address):
        return str(ip_network((parsed, IPV6_PREFIX), strict=False).network_address)
    return address


def connection_key(peer: str, proxies: Sequence[Network]) -> str | None:
    """Return the key under which limits count a connection from `peer`; None for a trusted proxy or a Unix socket."""
    address = _parse_address(peer)
    return None if address is None or _is_proxy(address, proxies) else rate_limit_key(str(address))


def _is_proxy(address: Address, proxies: Sequence[Network]) -> bool:
    """Return whether an address is that of a trusted proxy."""
    return any(address in network for network in proxies)


def _parse_address(text: str) -> Address | None:
    """Return the address in `text`, without its port and its zone (`%eth0`); None if `text` is no IP address."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
