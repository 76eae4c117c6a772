"""Connections to hosts that customers name. `storage/test_imports.py` tests which addresses are refused."""

from __future__ import annotations

import socket

import pytest

from console.core import connections


def test_an_address_that_refuses_is_followed_by_the_hosts_next_one(monkeypatch):
    resolve = socket.getaddrinfo
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        addresses = [entry for address in ("127.0.0.2", "127.0.0.1") for entry in resolve(address, port)]
        monkeypatch.setattr(
            connections.socket,
            "getaddrinfo",
            lambda host, *rest, **options: addresses if host == "two.example" else resolve(host, *rest, **options),
        )
        connection = connections.connection_to(f"http://two.example:{port}", allows_private=True)
        connection.connect()
        assert connection.sock.getpeername() == ("127.0.0.1", port)
        assert connection.sock.gettimeout() == connections.TIMEOUT_SECONDS, "a read must have the whole limit"
        connection.close()
    with pytest.raises(ConnectionRefusedError):  # the server has ended, so both addresses refuse
        connection.connect()
