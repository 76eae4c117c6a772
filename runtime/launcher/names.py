"""From the names of a run's pods to their addresses, which the cluster's DNS may know only later.

The one rule: a resolver that does not answer keeps nobody waiting: a process of its own asks, again and again, and
whoever wants the addresses can end it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from typing import Callable, Dict, List, Mapping, Optional, Sequence

from .processes import send_signal

_SOON_SECONDS = 0.2
_LATER_SECONDS = 1.0
_OFTEN = 20
_LONGEST = 1 << 20
_RESOLVER = "/etc/resolv.conf"

Resolve = Callable[[str], Optional[str]]


class Names:
    """All nodes' addresses, to come: the descriptor `fileno` can be read once there is something to say.

    `known` are the addresses that need not be asked for, by node.
    """

    def __init__(self, names: Sequence[str], known: Mapping[int, str]) -> None:
        self._reading, writing = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                os.close(self._reading)
                signal.pthread_sigmask(signal.SIG_SETMASK, set())
                found = resolve(names, known)
                with os.fdopen(writing, "wb") as pipe:
                    pipe.write(json.dumps(found).encode())
            finally:
                os._exit(0)
        os.close(writing)
        self._said = b""

    def fileno(self) -> int:
        """The pipe, for a selector."""
        return self._reading

    def read(self) -> Optional[List[str]]:
        """Take what has come: the addresses, nothing where they are still to come. Raises OSError where none will."""
        data = os.read(self._reading, _LONGEST)
        self._said += data
        if data:
            return None
        try:
            return [str(address) for address in json.loads(self._said)]
        except ValueError as error:
            raise OSError("the process that asks for the nodes' addresses has ended") from error

    def close(self) -> None:
        """Ask no more. The process is reaped by whoever reaps."""
        os.close(self._reading)
        send_signal(self.pid, signal.SIGKILL)


def resolve(names: Sequence[str], known: Mapping[int, str], ask: Optional[Resolve] = None) -> List[str]:
    """Each node's address. Returns only when all have been found."""
    found: Dict[int, str] = dict(known)
    tries = 0
    while True:
        for node, name in enumerate(names):
            if node not in found:
                address = (ask or look_up)(name)
                if address:
                    found[node] = address
        if len(found) >= len(names):
            return [found[node] for node in range(len(names))]
        tries += 1
        time.sleep(_SOON_SECONDS if tries < _OFTEN else _LATER_SECONDS)  # nobody tells when a name appears


def look_up(name: str) -> Optional[str]:
    """The name's address, IPv4 where there is one; None where it is not known now."""
    try:
        answers = socket.getaddrinfo(whole(name), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    answers.sort(key=lambda answer: answer[0] != socket.AF_INET)
    return str(answers[0][4][0]) if answers else None


def whole(name: str) -> str:
    """The name with the cluster's domain, and ended, where the resolver's file tells of one.

    A shorter one that is not known yet would be asked for in each domain of the resolver's, and at last of the world's
    servers: where those cannot be reached, that takes many seconds each time.
    """
    try:
        with open(_RESOLVER) as file:
            lines = [line.split() for line in file]
    except (OSError, UnicodeError):
        return name
    for domain in [word for words in lines if words[:1] == ["search"] for word in words[1:]]:
        if domain.split(".")[1:2] == ["svc"]:
            return "{}.{}.".format(name, domain.strip("."))
    return name
