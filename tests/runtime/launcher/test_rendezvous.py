from __future__ import annotations

import http.client
from collections.abc import Iterator

import pytest

from runtime.launcher.rendezvous import RendezvousServer


@pytest.fixture
def client() -> Iterator[http.client.HTTPConnection]:
    server = RendezvousServer("127.0.0.1")
    server.serve()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    yield connection
    connection.close()
    server.shutdown()
    server.server_close()


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
