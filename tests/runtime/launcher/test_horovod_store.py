"""The HTTP store at which Horovod's workers meet and get their ranks."""

import http.client
import threading

import pytest

from runtime.launcher.horovod_store import RendezvousServer

pytestmark = pytest.mark.rerun_if_late("it talks over real sockets, with time limits of seconds")


@pytest.fixture
def server(request):
    """The store, as the hub's launcher serves it, on the address that a test chooses (default: IPv4)."""
    try:
        created = RendezvousServer(getattr(request, "param", "127.0.0.1"))
    except OSError:
        pytest.skip("there is no IPv6 here")
    created.serve()
    yield created
    created.shutdown()
    created.server_close()


@pytest.fixture
def client(server):
    connection = http.client.HTTPConnection(server.server_name, server.port, timeout=10)
    yield connection
    connection.close()


def ask(client, method, path, body=None):
    client.request(method, path, body)
    answer = client.getresponse()
    return answer.status, answer.read()


@pytest.mark.parametrize("server", ["127.0.0.1", "::1"], indirect=True)
def test_values_are_kept_until_they_are_deleted_or_a_round_begins(server, client):
    assert ask(client, "GET", "/scope/key") == (404, b"")
    assert ask(client, "PUT", "/scope/key", b"\0value") == (200, b"")
    assert ask(client, "GET", "/scope/key") == (200, b"\0value")
    assert ask(client, "GET", "/other/key") == (404, b"")
    assert ask(client, "DELETE", "/scope/key") == (200, b"")
    assert ask(client, "GET", "/scope/key") == (404, b"")
    ask(client, "PUT", "/global/0", b"an address")
    # A round begins. By host and local rank: the worker's rank and size among all, on its host, and among those of its
    # local rank.
    server.assign({"a:0": "0,1,0,1,0,1"}, new_workers=True)
    assert ask(client, "GET", "/global/0") == (404, b"")


@pytest.mark.parametrize("length", [1 << 30, -1])
def test_a_value_too_large_is_refused(client, length):
    client.putrequest("PUT", "/scope/key")
    client.putheader("Content-Length", str(length))
    client.endheaders()
    assert client.getresponse().status == 413


class Worker(threading.Thread):
    """A Horovod worker that lost a peer, asks for its new rank, and waits."""

    def __init__(self, server, name):
        super().__init__(daemon=True)
        self._server = server
        self._name = name
        self.answer = b""
        self.asking = threading.Event()
        self.start()

    def run(self):
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=10)
        connection.request("GET", f"/rank_and_size/{self._name}")
        self.asking.set()
        self.answer = connection.getresponse().read()
        connection.close()


def test_workers_get_ranks_once_all_have_asked_except_those_of_a_lost_node(server):
    # One worker on each of the hosts a, b and c; then b is lost.
    server.assign({"a:0": "0,3,0,1,0,3", "b:0": "1,3,0,1,1,3", "c:0": "2,3,0,1,2,3"}, new_workers=True)
    early = Worker(server, "a:0")
    early.asking.wait(10)
    # The launcher learns of the lost node only now.
    server.assign({"a:0": "0,2,0,1,0,2", "c:0": "1,2,0,1,1,2"})
    assert not server.have_all_met
    late, lost = Worker(server, "c:0"), Worker(server, "b:0")
    for worker in (early, late, lost):
        worker.join(10)
    assert (early.answer, late.answer) == (b"0,2,0,1,0,2", b"1,2,0,1,1,2")
    assert lost.answer == b"-1,-1,-1,-1,-1,-1", "it has no place in the run any more"
    assert server.have_all_met
