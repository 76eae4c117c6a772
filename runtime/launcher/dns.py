"""Resolve the host name of a run's first pod. The cluster's DNS may know it late, or still have an old address.

A separate process asks the resolver repeatedly, so a slow resolver blocks only that process.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import Callable, Optional

from .processes import send_signal

_FREQUENT_INTERVAL_SECONDS = 0.2
"""Interval of the first lookups: most names become known within a few seconds, and the start waits for them."""
_INTERVAL_SECONDS = 1.0
"""Interval of all later lookups, which would otherwise load the cluster's DNS."""
_FREQUENT_LOOKUPS = 20
"""How many lookups use the short interval: those of the first four seconds, in which most names become known."""
_READ_BYTES = 1 << 16
"""The default size of a pipe, so one read returns all addresses."""
_RESOLVER_CONFIG = "/etc/resolv.conf"

Resolve = Callable[[str], Optional[str]]
"""Returns a name's address; None while it is unknown."""


class NameLookup:
    """Resolves a name repeatedly until `close`. `fileno` becomes readable whenever the address has changed.

    The name is resolved again because a cluster's DNS may return the address of an earlier pod for half a minute.
    """

    def __init__(self, name: str) -> None:
        self._read_end, write_end = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                os.close(self._read_end)
                # The parent has blocked signals in order to read them (`pod.signals`), and a fork inherits that.
                signal.pthread_sigmask(signal.SIG_SETMASK, set())
                watch_address(name, lambda address: os.write(write_end, address.encode() + b"\n"))
            finally:
                os._exit(0)  # this process must never return into the caller's code
        os.close(write_end)
        self._partial_line = b""  # the beginning of an incomplete line

    def fileno(self) -> int:
        """The pipe's descriptor, for a selector."""
        return self._read_end

    def read(self) -> Optional[str]:
        """Return the newest address, or None if there is none yet. Raises OSError if the lookup process has ended."""
        data = os.read(self._read_end, _READ_BYTES)
        if not data:
            raise OSError("the process that looks up the hub's address has ended")
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        return lines[-1].decode() if lines else None

    def close(self) -> None:
        """End the lookup. The caller reaps its process."""
        os.close(self._read_end)
        send_signal(self.pid, signal.SIGKILL)


def watch_address(name: str, report: Callable[[str], object], resolver: Optional[Resolve] = None) -> None:
    """Resolve the name repeatedly, without end, and call `report` with each new address.

    `resolver` replaces `resolve` in tests.
    """
    last_address: Optional[str] = None
    lookups = 0
    while True:
        address = (resolver or resolve)(name)
        if address and address != last_address:
            last_address = address
            report(address)
        lookups += 1
        interval = _FREQUENT_INTERVAL_SECONDS if lookups < _FREQUENT_LOOKUPS else _INTERVAL_SECONDS
        time.sleep(interval)  # there is no event for a new name


def resolve(name: str) -> Optional[str]:
    """Return the name's address, IPv4 if it has one; None while it is unknown."""
    try:
        addresses = socket.getaddrinfo(qualify_name(name), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    addresses.sort(key=lambda entry: entry[0] != socket.AF_INET)
    # The fifth part of an entry is the socket's address, which begins with the IP address.
    return str(addresses[0][4][0]) if addresses else None


def qualify_name(name: str) -> str:
    """Return the fully qualified name, in the search domain of the pod's namespace in the resolver's configuration.

    The resolver searches for an unknown relative name in each of its domains, and finally on public servers. If the
    public servers are unreachable, this search takes many seconds.
    """
    try:
        with open(_RESOLVER_CONFIG) as file:
            lines = [line.split() for line in file]
    except (OSError, UnicodeError):
        return name
    for fields in lines:
        search_domains = fields[1:] if fields[:1] == ["search"] else []
        for domain in search_domains:
            if domain.split(".")[1:2] == ["svc"]:  # <namespace>.svc.<cluster domain>
                return "{}.{}.".format(name, domain.strip("."))
    return name
