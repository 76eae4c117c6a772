from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator

import pytest

from runtime.launcher.rendezvous import RendezvousServer


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    made = RendezvousServer("127.0.0.1")
    made.serve()
    made.serve()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture
def client(server: RendezvousServer) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    yield connection
    connection.close()


def ask(client: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    client.request(method, path, body)
    answer = client.getresponse()
    return answer.status, answer.read()


def test_values_are_kept_until_deleted(client: http.client.HTTPConnection) -> None:
    assert ask(client, "GET", "/scope/key") == (404, b"")
    assert ask(client, "PUT", "/scope/key", b"\0value") == (200, b"")
    assert ask(client, "GET", "/scope/key") == (200, b"\0value")
    assert ask(client, "GET", "/other/key") == (404, b"")
    assert ask(client, "DELETE", "/scope/key") == (200, b"")
    assert ask(client, "DELETE", "/scope/key") == (200, b"")
    assert ask(client, "GET", "/scope/key") == (404, b"")


def test_a_value_too_large_is_refused(client: http.client.HTTPConnection) -> None:
    client.putrequest("PUT", "/scope/key")
    client.putheader("Content-Length", str(1 << 30))
    client.endheaders()
    assert client.getresponse().status == 413


class Worker(threading.Thread):
    """A Horovod worker that lost a peer: asks for its new place, and waits."""

    def __init__(self, server: RendezvousServer, name: str) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._name = name
        self.answer = b""
        self.asking = threading.Event()
        self.start()

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=10)
        connection.request("GET", f"/rank_and_size/{self._name}")
        self.asking.set()
        self.answer = connection.getresponse().read()
        connection.close()


def test_workers_get_their_places_when_all_have_asked(server: RendezvousServer) -> None:
    server.assign({"a:0": "0,3,0,1,0,3", "b:0": "1,3,0,1,1,3", "c:0": "2,3,0,1,2,3"}, anew=True)
    early = Worker(server, "a:0")
    early.asking.wait(10)
    # The launcher learns of the lost node only now.
    server.assign({"a:0": "0,2,0,1,0,2", "c:0": "1,2,0,1,1,2"})
    assert not server.settled
    late = Worker(server, "c:0")
    for worker in (early, late):
        worker.join(10)
    assert (early.answer, late.answer) == (b"0,2,0,1,0,2", b"1,2,0,1,1,2")
    assert server.settled


def test_workers_that_lost_nobody_meet_again(server: RendezvousServer) -> None:
    server.assign({"a:0": "0,2,0,1,0,2", "c:0": "1,2,0,1,1,2"}, anew=True)
    for _time in range(2):
        workers = [Worker(server, "a:0"), Worker(server, "c:0")]
        for worker in workers:
            worker.join(10)
        assert [worker.answer for worker in workers] == [b"0,2,0,1,0,2", b"1,2,0,1,1,2"]


def test_a_worker_of_a_lost_node_is_told_so(server: RendezvousServer) -> None:
    server.assign({"a:0": "0,1,0,1,0,1"})
    worker = Worker(server, "b:0")
    worker.join(10)
    assert worker.answer == b"-1,-1,-1,-1,-1,-1"


def test_a_node_lost_while_workers_wait_changes_their_places(server: RendezvousServer) -> None:
    server.assign({"a:0": "0,2,0,1,0,2", "c:0": "1,2,0,1,1,2"})
    waiting = Worker(server, "a:0")
    server.assign({"a:0": "0,1,0,1,0,1"})
    waiting.join(10)
    assert waiting.answer == b"0,1,0,1,0,1"


def test_a_round_forgets_what_was_left_by_the_one_before(
    server: RendezvousServer, client: http.client.HTTPConnection
) -> None:
    ask(client, "PUT", "/global/0", b"an address")
    server.assign({"a:0": "0,1,0,1,0,1"}, anew=True)
    assert ask(client, "GET", "/global/0") == (404, b"")


def test_nobody_asks_for_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_host: str = "") -> str:
        raise AssertionError("a name was asked for")

    monkeypatch.setattr("socket.getfqdn", fail)
    server = RendezvousServer("127.0.0.1")
    assert server.port
    server.server_close()


@pytest.mark.skipif(not _has_ipv6(), reason="there is no IPv6 here")
def test_the_server_listens_at_addresses_of_the_new_kind() -> None:
    server = RendezvousServer("::1")
    server.serve()
    client = http.client.HTTPConnection("::1", server.port, timeout=10)
    client.request("GET", "/scope/none")
    assert client.getresponse().status == 404
    client.close()
    server.shutdown()
    server.server_close()
