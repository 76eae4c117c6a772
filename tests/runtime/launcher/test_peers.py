"""The launchers among themselves, over real sockets on loopback: who is believed, and who counts as lost."""

from __future__ import annotations

import json
import selectors
import socket
from collections.abc import Iterator

import pytest

from runtime.launcher import peers as peers_module
from runtime.launcher.peers import Peers

TOKEN = "the-runs-token"


class Meeting:
    """A hub that expects two more nodes, and a loop that turns until something holds."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.hub = Peers(self.selector, 0, 3, TOKEN)
        listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = listener.getsockname()
        self.listener = listener
        self.hub.listen(listener)
        self.said: list[tuple[int, str]] = []
        self.open: list[socket.socket] = []

    def join(self, hello: dict[str, object]) -> socket.socket:
        connection = socket.create_connection(self.address, timeout=10)
        connection.sendall(json.dumps({"type": "hello", **hello}).encode() + b"\n")
        self.open.append(connection)
        return connection

    def turn(self, times: int = 1) -> None:
        """Handle what there is, at least `times` ready sockets."""
        while times > 0:
            ready = self.selector.select(10)
            assert ready, "nothing happened"
            for key, _events in ready:
                times -= 1
                self.said += [(node, message["type"]) for node, message in self.hub.events(key.data)]

    def tick(self) -> None:
        self.said += [(node, message["type"]) for node, message in self.hub.events(None)]


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    made = Meeting()
    yield made
    for connection in [made.listener, *made.open]:
        connection.close()
    for key in list(made.selector.get_map().values()):
        if hasattr(key.fileobj, "close"):
            key.fileobj.close()
    made.selector.close()


def test_all_nodes_meet_and_finish(meeting: Meeting) -> None:
    first = meeting.join({"token": TOKEN, "node": 1})
    meeting.turn(2)
    assert meeting.hub.missing == [2]
    meeting.join({"token": TOKEN, "node": 2})
    meeting.turn(2)
    assert meeting.hub.complete
    first.sendall(b'{"type": "done"}\n')
    meeting.turn()
    assert meeting.said == [(1, "done")]
    meeting.hub.finished(1)
    assert meeting.hub.some_finished
    assert not meeting.hub.have_finished([0, 1, 2])
    assert meeting.hub.have_finished([0, 1]), "of those that are left"
    meeting.hub.finished(2)
    assert meeting.hub.have_finished([0, 1, 2])


@pytest.mark.parametrize(
    "hello",
    [
        {"token": "", "node": 1},
        {"token": "guess", "node": 1},
        {"node": 1},
        {"token": TOKEN, "node": 0},
        {"token": TOKEN, "node": 3},
        {"token": TOKEN, "node": "1"},
        {"token": [TOKEN], "node": 1},
    ],
)
def test_strangers_are_refused(meeting: Meeting, hello: dict[str, object]) -> None:
    stranger = meeting.join(hello)
    meeting.turn(2)
    assert stranger.recv(1) == b""
    assert meeting.hub.missing == [1, 2]


def test_a_second_node_of_the_same_number_is_refused(meeting: Meeting) -> None:
    meeting.join({"token": TOKEN, "node": 1})
    meeting.turn(2)
    again = meeting.join({"token": TOKEN, "node": 1})
    meeting.turn(2)
    assert again.recv(1) == b""
    assert meeting.said == []


def test_a_node_that_hangs_up_is_lost_once(meeting: Meeting) -> None:
    meeting.join({"token": TOKEN, "node": 1}).close()
    meeting.turn(3)
    meeting.tick()
    assert meeting.said == [(1, "lost")]


def test_a_finished_node_may_hang_up(meeting: Meeting) -> None:
    connection = meeting.join({"token": TOKEN, "node": 1})
    meeting.turn(2)
    meeting.hub.finished(1)
    connection.close()
    meeting.turn()
    assert meeting.said == []


def test_a_silent_node_is_lost(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    meeting.join({"token": TOKEN, "node": 1})
    meeting.turn(2)
    meeting.tick()
    assert meeting.said == []
    monkeypatch.setattr(peers_module, "SILENCE_SECONDS", -1.0)
    meeting.tick()
    meeting.tick()
    assert meeting.said == [(1, "lost")]


def test_strangers_that_say_nothing_are_let_go(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = socket.create_connection(meeting.address, timeout=10)
    meeting.open.append(connection)
    meeting.turn()
    monkeypatch.setattr(peers_module, "_HELLO_SECONDS", -1.0)
    meeting.tick()
    assert connection.recv(1) == b""
