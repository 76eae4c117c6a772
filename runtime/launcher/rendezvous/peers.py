"""The connections between the launchers of one run.

Node 0 is the hub: it listens, and every other node holds one connection to it. A cluster's DNS may return an old
address, on which another run's pod now listens. A node therefore reconnects until the hub has proved that it knows the
run's token. The hub closes connections of nodes that have not proved it. A node that sends nothing for
`SILENCE_SECONDS` counts as lost, even if its connection is open.

Neither side sends the token. Each proves it by an HMAC over random numbers of both sides (nonces), as in the three-pass
mutual authentication of ISO/IEC 9798-4. A proof is of no use on another connection, because the other side's nonce
differs there. The messages that follow are neither encrypted nor signed. A program on the network path between two
nodes can therefore read and change them.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import time
from contextlib import suppress
from selectors import EVENT_READ, BaseSelector
from typing import Dict, List, Optional, Sequence, Set, Tuple, Union

from ..protocol import MAX_LINE_BYTES, ConnectionLost, Link, Message

HEARTBEAT_SECONDS = 1.0
"""Interval of heartbeats between nodes, and to the supervisor: a tenth of SILENCE_SECONDS."""
SILENCE_SECONDS = 10.0
"""A node that sends nothing for so long is lost. Ten heartbeats may be late on a loaded machine or network."""
_CONNECT_SECONDS = 2.0
"""How long connecting to the hub may block this launcher. Meanwhile it sends no heartbeats to its supervisor, which
waits 12 s for one."""
_CONNECT_RETRY_SECONDS = 0.25
"""Interval between tries to connect to the hub: short, since the start of the run waits for the connection."""
_HELLO_SECONDS = 5.0
"""How long a new connection may take to send its hello. A launcher answers the challenge at once; a slow network takes
longer."""
_MAX_HELLO_BYTES = 4096
"""Maximum length of a message before the other side has proved the token. A hello has some hundred bytes."""
_MAX_UNVERIFIED = 64
"""Maximum number of connections without a valid proof, so that other processes cannot use up the descriptors."""


class Peers:
    """The other nodes. `events` returns their messages as (node, message).

    For a lost node, `events` returns `{"type": "lost", "silent": bool}` once. `silent`: the node sent no more messages,
    although its connection was still open. On nodes other than the hub, the hub is the only other node. `node` is this
    node's number, and `nodes` how many nodes the run has. `address` is this node's own, sent in its hello.
    """

    def __init__(self, selector: BaseSelector, node: int, nodes: int, token: str, address: str = "") -> None:
        self._selector = selector
        self._node = node
        self._nodes = nodes
        self._token = token
        self._listener: Optional[socket.socket] = None
        # On the hub: connections without a hello, with the nonce of their challenge and when they were accepted.
        self._unverified: Dict[Link, Tuple[str, float]] = {}
        self._links: Dict[int, Link] = {}  # verified connections, by node
        # Every node that was ever connected, with the monotonic time of its last message (infinite: lost).
        self._last_message_at: Dict[int, float] = {}
        self._finished: Set[int] = set()  # nodes that may disconnect without being lost
        self._addresses: Dict[int, str] = {node: address} if address else {}
        self._next_heartbeat_at = 0.0
        # On nodes other than the hub.
        self._hub_address: Optional[Tuple[str, int]] = None  # None before `join`, and once the hub has answered
        self._pending_link: Optional[Link] = None  # the connection that waits for the hub's welcome
        self._hub_proof: Optional[str] = None  # the proof that its welcome must have; None before the challenge
        self._next_connect_at = 0.0  # monotonic

    def listen(self, listener: socket.socket) -> None:
        """Act as the hub, on a listening socket."""
        listener.setblocking(False)
        self._listener = listener
        self._selector.register(listener, EVENT_READ, self)

    def join(self, address: Tuple[str, int]) -> None:
        """Connect to the hub, now or later, when `events` handles its timers.

        Calling this again with a new address replaces the old one.
        """
        if 0 in self._last_message_at:
            return  # the hub has answered already
        if address != self._hub_address and self._pending_link is not None:
            self._drop_pending()
        self._hub_address = address
        if self._pending_link is None:
            self._connect(address)

    def addresses(self, planned: Sequence[str]) -> List[str]:
        """Return each node's address: the one in its hello, or else the one in `planned`, the plan's addresses."""
        return [self._addresses.get(node, address) for node, address in enumerate(planned)]

    @property
    def is_complete(self) -> bool:
        """Whether the hub has met every node."""
        return len(self._last_message_at) == self._nodes - 1

    @property
    def missing(self) -> List[int]:
        """The nodes that the hub has not met."""
        return [node for node in range(1, self._nodes) if node not in self._last_message_at]

    def note_finished(self, node: int) -> None:
        """Let this node disconnect from now on without counting as lost."""
        self._finished.add(node)

    def all_finished(self, members: Sequence[int]) -> bool:
        """Whether all of these nodes, except this one, have reported that their ranks are done."""
        return all(member in self._finished for member in members if member != self._node)

    @property
    def any_finished(self) -> bool:
        """Whether any node has reported that its ranks are done."""
        return bool(self._finished)

    def send(self, message: Message) -> None:
        """Send a message to every connected node; `events` reports broken connections."""
        for link in list(self._links.values()):
            try:
                link.send(message)
            except ConnectionLost:
                continue

    def events(self, source: object) -> List[Tuple[int, Message]]:
        """Handle one ready file, or timers if it is None; return the messages that result.

        `source` is what was registered with the selector: a Link, or this object for the listening socket.
        """
        if source is None:
            return self._handle_timers()
        if isinstance(source, Link) and source is self._pending_link:
            return self._continue_join(source)
        if not isinstance(source, Link):
            self._accept()
        elif source in self._unverified:
            self._verify(source)
        else:
            return self._read_messages(source)
        return []

    def _read_messages(self, link: Link) -> List[Tuple[int, Message]]:
        """Read the messages of a connected node."""
        node = next((node for node, other_link in self._links.items() if other_link is link), None)
        if node is None:
            return []  # lost by an earlier event of the same poll
        try:
            messages = link.receive()
        except ConnectionLost:
            return self._mark_lost(node)
        self._last_message_at[node] = time.monotonic()
        return [(node, message) for message in messages if message.get("type") != "heartbeat"]

    def _handle_timers(self) -> List[Tuple[int, Message]]:
        """Send heartbeats, reject late hellos, reconnect; return a `lost` message for each silent node."""
        now = time.monotonic()
        for link, (_nonce, since) in list(self._unverified.items()):
            if now - since > _HELLO_SECONDS:
                self._reject(link)
        if now >= self._next_heartbeat_at:
            self._next_heartbeat_at = now + HEARTBEAT_SECONDS
            self.send({"type": "heartbeat"})
        lost_messages: List[Tuple[int, Message]] = []
        for node in [node for node, at in self._last_message_at.items() if now - at > SILENCE_SECONDS]:
            lost_messages += self._mark_lost(node, was_silent=True)
        if self._hub_address is not None and self._pending_link is None and now >= self._next_connect_at:
            self._connect(self._hub_address)
        return lost_messages

    def _connect(self, address: Tuple[str, int]) -> None:
        """Connect to this address. The other end counts as the hub once it has sent a valid welcome."""
        self._next_connect_at = time.monotonic() + _CONNECT_RETRY_SECONDS
        try:
            connection = socket.create_connection(address, timeout=_CONNECT_SECONDS)
        except OSError:
            return  # `_handle_timers` tries again
        _send_at_once(connection)
        connection.settimeout(SILENCE_SECONDS)  # a hub that reads nothing for so long counts as lost anyway
        self._pending_link = Link(connection, _MAX_HELLO_BYTES)
        self._selector.register(self._pending_link, EVENT_READ, self._pending_link)
        self._hub_proof = None

    def _continue_join(self, link: Link) -> List[Tuple[int, Message]]:
        """Answer the hub's challenge with a hello, or handle its welcome. Drop the connection if either is invalid."""
        try:
            messages = link.receive()
            if not messages:
                return []
            if self._hub_proof is None:
                self._send_hello(link, messages[0])
                return []
            self._check_welcome(messages[0])
        except ConnectionLost:
            self._drop_pending()
            return []
        self._pending_link = self._hub_address = None
        self._selector.unregister(link)  # `_add_link` registers it again
        link.max_line_bytes = MAX_LINE_BYTES
        self._add_link(0, link)
        return [(0, message) for message in messages[1:] if message.get("type") != "heartbeat"]

    def _send_hello(self, link: Link, challenge: Message) -> None:
        """Answer a challenge. Raises ConnectionLost, also if it is none."""
        challenge_nonce = challenge.get("nonce")
        if challenge.get("type") != "challenge" or not isinstance(challenge_nonce, str):
            raise ConnectionLost("no valid challenge")
        nonce, address = _new_nonce(), self._addresses.get(self._node, "")
        self._hub_proof = _proof(self._token, "welcome", challenge_nonce, nonce, self._node)
        proof = _proof(self._token, "hello", challenge_nonce, nonce, self._node, address)
        link.send({"type": "hello", "node": self._node, "nonce": nonce, "address": address, "proof": proof})

    def _check_welcome(self, welcome: Message) -> None:
        """Raise ConnectionLost unless this is the welcome of the hub."""
        if welcome.get("type") != "welcome" or not _is_equal(welcome.get("proof", ""), self._hub_proof or ""):
            raise ConnectionLost("no valid welcome")

    def _drop_pending(self) -> None:
        if self._pending_link is not None:
            self._selector.unregister(self._pending_link)
            self._pending_link.close()
            self._pending_link = None

    def _accept(self) -> None:
        """On the hub, accept a connection and send it a challenge, which it must answer with a hello."""
        if self._listener is None:
            return
        try:
            connection, _address = self._listener.accept()
        except OSError:
            return  # the other end has disconnected already
        if len(self._unverified) >= _MAX_UNVERIFIED:
            connection.close()
            return
        _send_at_once(connection)
        connection.setblocking(False)
        link, nonce = Link(connection, _MAX_HELLO_BYTES), _new_nonce()
        self._unverified[link] = (nonce, time.monotonic())
        self._selector.register(link, EVENT_READ, link)
        try:
            link.send({"type": "challenge", "nonce": nonce})
        except ConnectionLost:
            self._reject(link)

    def _verify(self, link: Link) -> None:
        """On the hub, welcome a node that is missing and whose hello proves the token; reject other connections."""
        try:
            messages = link.receive()
        except ConnectionLost:
            self._reject(link)
            return
        if not messages:
            return
        hello = messages[0]
        node, nonce, address = hello.get("node"), hello.get("nonce"), hello.get("address")
        challenge_nonce, _since = self._unverified[link]
        if (
            not isinstance(node, int)
            or not isinstance(nonce, str)
            or not isinstance(address, str)
            or not 0 < node < self._nodes
            or node in self._last_message_at
            or not _is_equal(
                hello.get("proof", ""), _proof(self._token, "hello", challenge_nonce, nonce, node, address)
            )
        ):
            self._reject(link)
            return
        del self._unverified[link]
        self._selector.unregister(link)
        link.socket.settimeout(SILENCE_SECONDS)  # a node that reads nothing for so long counts as lost anyway
        link.max_line_bytes = MAX_LINE_BYTES
        if address:
            self._addresses[node] = address
        self._add_link(node, link)
        try:
            link.send({"type": "welcome", "proof": _proof(self._token, "welcome", challenge_nonce, nonce, node)})
        except ConnectionLost:
            return  # `events` reports it

    def _add_link(self, node: int, link: Link) -> None:
        self._links[node] = link
        self._last_message_at[node] = time.monotonic()
        self._selector.register(link, EVENT_READ, link)

    def _reject(self, link: Link) -> None:
        del self._unverified[link]
        self._selector.unregister(link)
        link.close()

    def _mark_lost(self, node: int, *, was_silent: bool = False) -> List[Tuple[int, Message]]:
        """Close a node's connection; return the message `lost`, or none if the node had finished."""
        link = self._links.pop(node, None)
        if link is not None:
            self._selector.unregister(link)
            link.close()
        # The entry stays, because `is_complete` counts every node that was ever connected. The time is infinite, so
        # that the node is not reported as silent again.
        self._last_message_at[node] = float("inf")
        return [] if node in self._finished else [(node, {"type": "lost", "silent": was_silent})]


def _send_at_once(connection: socket.socket) -> None:
    """Let no message wait until the other side has acknowledged the last one, which takes up to 40 ms."""
    with suppress(OSError):  # the other side has disconnected already, which the next call finds too
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _new_nonce() -> str:
    return os.urandom(16).hex()


def _proof(token: str, *values: Union[int, str]) -> str:
    """Return the proof that the sender of a message knows the token: see the module's docstring.

    `values` are the message's type, the nonces of hub and node, and what else the proof covers.
    """
    return hmac.new(token.encode(), json.dumps(values).encode(), "sha256").hexdigest()


def _is_equal(received: object, expected: str) -> bool:
    """Compare in constant time. `received` may be any JSON value."""
    return hmac.compare_digest(str(received).encode("utf-8", "replace"), expected.encode())
