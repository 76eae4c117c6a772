"""Connections between launchers, over real sockets on loopback: authentication and lost nodes."""

import json
import selectors
import socket
import time

import pytest

from runtime.launcher.rendezvous import peers as peers_module
from runtime.launcher.rendezvous.peers import Peers, _proof

pytestmark = pytest.mark.rerun_if_late("it talks over real sockets, with time limits of seconds")

TOKEN = "the-runs-token"


def read_message(connection):
    with connection.makefile("rb", buffering=0) as stream:
        return json.loads(stream.readline())


class Hub:
    """A hub that expects two more nodes, and its event loop."""

    def __init__(self):
        self.selector = selectors.DefaultSelector()
        self.peers = Peers(self.selector, node=0, nodes=3, token=TOKEN)
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.listener = listener
        self.peers.listen(listener)
        self.messages = []
        self.open = []

    def join(self, token=TOKEN, node=1, **changes):
        """Connect as a node, and let the hub handle the hello."""
        connection = socket.create_connection(self.address, timeout=10)
        self.open.append(connection)
        self.handle()
        challenge = read_message(connection)
        proof = _proof(token, "hello", challenge["nonce"], "nonce", node, "")
        hello = {"type": "hello", "node": node, "nonce": "nonce", "address": "", "proof": proof, **changes}
        connection.sendall(json.dumps(hello).encode() + b"\n")
        self.handle()
        return connection

    @property
    def closed_address(self):
        """Return an address at which nothing listens."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            return free.getsockname()

    def handle(self, times=1):
        """Handle at least `times` ready sockets."""
        while times > 0:
            ready = self.selector.select(10)
            assert ready, "nothing happened"
            for key, _events in ready:
                times -= 1
                self.messages += [(node, message["type"]) for node, message in self.peers.events(key.data)]

    def handle_timers(self):
        self.messages += [(node, message["type"]) for node, message in self.peers.events(None)]


@pytest.fixture
def hub():
    started = Hub()
    yield started
    for connection in [started.listener, *started.open]:
        connection.close()
    for key in list(started.selector.get_map().values()):
        if hasattr(key.fileobj, "close"):
            key.fileobj.close()
    started.selector.close()


@pytest.mark.parametrize(
    "hello",
    [
        {"token": "guess"},
        {"proof": None},
        {"proof": [TOKEN]},
        {"node": 0},
        {"node": 3},
        {"node": "1"},
        {"nonce": ["nonce"]},
        {"nonce": "another"},
        {"address": "10.0.0.66"},
    ],
)
def test_connections_without_the_token_or_the_number_of_a_missing_node_are_refused(hub, hello):
    impostor = hub.join(**hello)
    assert impostor.recv(1) == b""
    assert hub.peers.missing == [1, 2]


def test_a_silent_node_is_lost(hub, monkeypatch):
    hub.join()
    hub.handle_timers()
    assert hub.messages == []
    monkeypatch.setattr(peers_module, "SILENCE_SECONDS", -1.0)
    for _twice in range(2):
        hub.handle_timers()
    assert hub.messages == [(1, "lost")], "once"


def test_connections_without_a_hello_are_closed(hub, monkeypatch):
    connection = socket.create_connection(hub.address, timeout=10)
    hub.open.append(connection)
    hub.handle()
    assert read_message(connection)["type"] == "challenge"
    monkeypatch.setattr(peers_module, "_HELLO_SECONDS", -1.0)
    hub.handle_timers()
    assert connection.recv(1) == b""


# A node that looks for the hub


def wait_for_start(hub, node):
    """Run both event loops until the node has received the hub's `start`."""
    messages = []
    give_up_at = time.monotonic() + 20
    while not messages:
        assert time.monotonic() < give_up_at
        node.events(None)
        for key, _events in node.selector.select(0.05):
            messages += [(number, message["type"]) for number, message in node.events(key.data)]
        for key, _events in hub.selector.select(0):
            hub.peers.events(key.data)
        if 1 not in hub.peers.missing:
            hub.peers.send({"type": "start"})
    return messages


def handle_ready(node):
    for key, _events in node.selector.select(10):
        assert node.events(key.data) == []


def learn_hello(node, connection, nonce="chosen by the impostor"):
    """As an impostor, send a challenge; return the line that the node answers."""
    connection.sendall(json.dumps({"type": "challenge", "nonce": nonce}).encode() + b"\n")
    handle_ready(node)
    return json.dumps(read_message(connection)).encode() + b"\n"


@pytest.fixture
def node():
    """Node 1, with an event loop of its own."""
    selector = selectors.DefaultSelector()
    started = Peers(selector, node=1, nodes=3, token=TOKEN, address="10.0.0.2")
    started.selector = selector  # for `wait_for_start`
    yield started
    for key in list(started.selector.get_map().values()):
        key.data.close()
    started.selector.close()


@pytest.mark.parametrize("behaviour", ["refuses", "is silent", "lies"])
def test_a_listener_that_is_not_the_hub_is_ignored_and_the_hub_is_searched_again(hub, node, behaviour):
    """DNS may return the address of another run's Pod or of another program. Neither is a lost node."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        if behaviour == "refuses":
            impostor.close()
            node.join(hub.closed_address)
        else:
            node.join(impostor.getsockname())
            connection = impostor.accept()[0]
            hub.open.append(connection)
            # A silent impostor sends nothing, so there is nothing to wait for.
            assert node.selector.select(0) == []
            if behaviour == "lies":
                learn_hello(node, connection)
                connection.sendall(b'{"type": "welcome", "proof": "made up"}\n{"type": "start"}\n')
                handle_ready(node)
    node.join(hub.address)
    assert wait_for_start(hub, node) == [(0, "start")]
    # Node 1 has told the hub its own address, which replaces the one in the plan.
    assert hub.peers.addresses(["10.0.0.1", "stale", "10.0.0.3"]) == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    node.join(("127.0.0.1", 1))
    assert wait_for_start(hub, node) == [(0, "start")], "a node that has met the hub stays connected"


def test_an_impostor_learns_nothing_that_it_could_send_to_the_hub_or_a_node(hub, node):
    """It has taken the hub's address on a shared network, and has spoken to the hub before."""
    hub_connections = [socket.create_connection(hub.address, timeout=10) for _twice in range(2)]
    hub.open += hub_connections
    hub.handle(2)
    challenge, later_challenge = (read_message(connection)["nonce"] for connection in hub_connections)
    assert challenge != later_challenge
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        node.join(impostor.getsockname())
        with impostor.accept()[0] as connection:
            hello = learn_hello(node, connection, challenge)
        handle_ready(node)
        assert TOKEN.encode() not in hello
        hub_connections[1].sendall(hello)
        hub.handle()
        assert hub_connections[1].recv(1) == b"", "the hello answers the challenge of one connection only"
        assert hub.peers.missing == [1, 2]

        node.join(impostor.getsockname())
        with impostor.accept()[0] as connection:
            assert learn_hello(node, connection, challenge) != hello
            proof = _proof(TOKEN, "welcome", challenge, json.loads(hello)["nonce"], 1)
            connection.sendall(json.dumps({"type": "welcome", "proof": proof}).encode() + b"\n")
            handle_ready(node)
            assert connection.recv(1) == b"", "the welcome answers an earlier hello"
