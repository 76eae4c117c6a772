"""The launchers of one run among themselves: who is there, start together, fall together.

Node 0 is the hub: it listens, and every other node holds one connection to it. The one rule: nothing is believed from a
connection that has not shown the run's token, and a node that is silent for `SILENCE_SECONDS` counts as lost, whatever
its connection looks like.
"""

from __future__ import annotations

import time

from .bare import EVENT_READ
from .report import LONGEST_LINE, ConnectionLost, Link, Message

TYPE_CHECKING = False  # as `typing` has it, without the time that importing it takes
if TYPE_CHECKING:
    import socket
    from selectors import BaseSelector
    from typing import Dict, List, Optional, Sequence, Set, Tuple

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 10.0
_CONNECT_SECONDS = 2.0
_HELLO_SECONDS = 5.0
_LONGEST_HELLO = 4096
_MOST_STRANGERS = 64


class Peers:
    """The other nodes. `events` yields what they said as (node, message).

    A lost one says `{"type": "lost"}`, once; with `silent` where its connection stood, but nothing came any more.
    """

    def __init__(self, selector: BaseSelector, node: int, nodes: int, token: str) -> None:
        self._selector = selector
        self._node = node
        self._nodes = nodes
        self._token = token
        self._listener: Optional[socket.socket] = None
        self._strangers: Dict[Link, float] = {}
        self._links: Dict[int, Link] = {}
        self._heard: Dict[int, float] = {}
        self._finished: Set[int] = set()
        self._hub_address: Optional[Tuple[str, int]] = None
        self._beat_at = 0.0

    def listen(self, listener: socket.socket) -> None:
        """Be the hub, on a socket that listens already."""
        listener.setblocking(False)
        self._listener = listener
        self._selector.register(listener, EVENT_READ, self)

    def join(self, address: Tuple[str, int]) -> None:
        """Join the hub, now or, when it comes up later than this node, at a later `events(None)`."""
        # Imported here for speed alone: a run of one node joins nobody.
        import socket  # noqa: PLC0415

        self._hub_address = address
        try:
            connection = socket.create_connection(address, timeout=_CONNECT_SECONDS)
        except OSError:
            return
        self._hub_address = None
        connection.settimeout(SILENCE_SECONDS)
        link = Link(connection)
        self._add(0, link)
        self.tell({"type": "hello", "token": self._token, "node": self._node})

    @property
    def complete(self) -> bool:
        """Whether the hub has met every node."""
        return len(self._heard) == self._nodes - 1

    @property
    def missing(self) -> List[int]:
        """Nodes that the hub has not met."""
        return [node for node in range(1, self._nodes) if node not in self._heard]

    def finished(self, node: int) -> None:
        """From now on this node may leave without being missed."""
        self._finished.add(node)

    def have_finished(self, members: Sequence[int]) -> bool:
        """Whether each of these nodes, but this one, has said that its ranks are done."""
        return all(member in self._finished for member in members if member != self._node)

    @property
    def some_finished(self) -> bool:
        """Whether a node has said that its ranks are done."""
        return bool(self._finished)

    def tell(self, message: Message) -> None:
        """Say something to every node we hold a connection to; a broken one is noticed by `events`."""
        for link in list(self._links.values()):
            try:
                link.send(message)
            except ConnectionLost:
                continue

    def events(self, ready: object) -> List[Tuple[int, Message]]:
        """What follows from one ready object of ours (None: from the time that has passed)."""
        if ready is None:
            return self._tick()
        if not isinstance(ready, Link):
            self._accept()
            return []
        if ready in self._strangers:
            self._greet(ready)
            return []
        node = next((node for node, link in self._links.items() if link is ready), None)
        if node is None:
            return []
        try:
            messages = ready.receive()
        except ConnectionLost:
            return self._lose(node)
        self._heard[node] = time.monotonic()
        return [(node, message) for message in messages if message.get("type") != "beat"]

    def _tick(self) -> List[Tuple[int, Message]]:
        now = time.monotonic()
        for link, since in list(self._strangers.items()):
            if now - since > _HELLO_SECONDS:
                self._refuse(link)
        if now >= self._beat_at:
            self._beat_at = now + BEAT_SECONDS
            self.tell({"type": "beat"})
        lost: List[Tuple[int, Message]] = []
        for node in [node for node, heard in self._heard.items() if now - heard > SILENCE_SECONDS]:
            lost += self._lose(node, silent=True)
        if self._hub_address is not None:
            self.join(self._hub_address)
        return lost

    def _accept(self) -> None:
        if self._listener is None:
            return
        try:
            connection, _address = self._listener.accept()
        except OSError:
            return
        if len(self._strangers) >= _MOST_STRANGERS:
            connection.close()
            return
        connection.setblocking(False)
        link = Link(connection, _LONGEST_HELLO)
        self._strangers[link] = time.monotonic()
        self._selector.register(link, EVENT_READ, link)

    def _greet(self, link: Link) -> None:
        try:
            messages = link.receive()
        except ConnectionLost:
            self._refuse(link)
            return
        if not messages:
            return
        hello = messages[0]
        node = hello.get("node")
        # Imported here for speed alone: a run of one node greets nobody.
        import hmac  # noqa: PLC0415

        known = hmac.compare_digest(str(hello.get("token", "")).encode(), self._token.encode())
        if not known or not isinstance(node, int) or not 0 < node < self._nodes or node in self._heard:
            self._refuse(link)
            return
        del self._strangers[link]
        self._selector.unregister(link)
        link.socket.settimeout(SILENCE_SECONDS)
        link.longest_line = LONGEST_LINE
        self._add(node, link)

    def _add(self, node: int, link: Link) -> None:
        self._links[node] = link
        self._heard[node] = time.monotonic()
        self._selector.register(link, EVENT_READ, link)

    def _refuse(self, link: Link) -> None:
        del self._strangers[link]
        self._selector.unregister(link)
        link.close()

    def _lose(self, node: int, silent: bool = False) -> List[Tuple[int, Message]]:
        link = self._links.pop(node, None)
        if link is not None:
            self._selector.unregister(link)
            link.close()
        # Kept as infinitely heard: the node has been met, and is reported lost once.
        self._heard[node] = float("inf")
        return [] if node in self._finished else [(node, {"type": "lost", "silent": silent})]
