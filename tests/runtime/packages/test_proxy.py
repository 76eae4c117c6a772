"""The proxy through which installations reach their indexes and nothing else."""

import contextlib
import http.server
import socket
import struct

import pytest

from runtime.launcher import install
from runtime.packages import indexes, proxy
from runtime.packages.indexes import InvalidIndexes
from tests.http_server import serving


@pytest.fixture
def server():
    """A server on the loopback that answers with the path and the headers Host and Connection of the request."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            text = f"{self.path} {self.headers['Host']} {self.headers['Connection']}".encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *arguments):
            """Print nothing."""

    with serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as served:
        yield served.server_address[1]


def ask(folder, request):
    """Send a request to the proxy and return all that it answers."""
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as client:
        client.settimeout(20)
        client.connect(str(folder / "proxy"))
        client.sendall(request)
        answer = b""
        while data := client.recv(65536):
            answer += data
    return answer


def test_only_allowed_hosts_and_ports_are_reached(tmp_path, server):
    # True: also if the host has a private address.
    with proxy.run_in_thread(tmp_path, "proxy", {("127.0.0.1", server): True, ("localhost", server): False}) as running:
        request = (
            f"GET http://127.0.0.1:{server}/a?b HTTP/1.1\r\nHost: 127.0.0.1\r\nProxy-Connection: keep-alive\r\n\r\n"
        )
        assert ask(tmp_path, request.encode()).endswith(b"/a?b 127.0.0.1 close")
        tunnel = f"CONNECT 127.0.0.1:{server} HTTP/1.1\r\n\r\nGET /c HTTP/1.0\r\nHost: x\r\n\r\n"
        # The client sends its own request at once: the proxy does not lose what follows the head.
        answer = ask(tmp_path, tunnel.encode())
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.endswith(b"/c x None")
        # The name is allowed, but only with a public address.
        assert ask(tmp_path, f"CONNECT localhost:{server} HTTP/1.1\r\n\r\n".encode()).startswith(b"HTTP/1.1 502 ")
        refused = [
            "CONNECT 127.0.0.1:22",
            "CONNECT 169.254.169.254:80",
            f"CONNECT [::1]:{server}",
            f"CONNECT 127.1:{server}",
            f"GET http://user@0.0.0.0:{server}/",
            f"GET http://127.0.0.1@evil.example:{server}/",
            "GET http://evil.example/",
        ]
        for line in refused:
            assert ask(tmp_path, f"{line} HTTP/1.1\r\n\r\n".encode()).startswith(b"HTTP/1.1 403 "), line
        assert "169.254.169.254:80" in running.refused_hosts
        for line in ("GET /etc/passwd", "GET file:///etc/passwd", "nonsense", "CONNECT 127.0.0.1:x"):
            assert b"HTTP/1.1 200" not in ask(tmp_path, f"{line} HTTP/1.1\r\n\r\n".encode()), line
        assert ask(tmp_path, b"GET " + b"a" * 100_000) == b"", "a head without an end"
    assert not (tmp_path / "proxy").exists()


def test_a_connection_that_uv_aborts_ends_at_the_proxy_too(tmp_path):
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(tmp_path / "proxy"))
        listener.listen()
        port = install.serve_proxy(str(tmp_path / "proxy"))
        with contextlib.closing(socket.create_connection(("127.0.0.1", port))) as client:
            upstream, _address = listener.accept()
            # A reset in place of an orderly end, as when the kernel ends uv with data unread.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with upstream:
            upstream.settimeout(20)
            assert upstream.recv(1) == b""


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1", True),
        *((address, False) for address in ("127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254")),
        *((address, False) for address in ("100.64.0.1", "0.0.0.0", "224.0.0.1", "::1", "fd00::1", "fe80::1%eth0")),
        # Addresses that contain an IPv4 address (the last is Teredo), and site-local ones, public for Python.
        ("64:ff9b::8.8.8.8", True),
        *((address, False) for address in ("64:ff9b::a00:1", "2002:a00:1::", "64:ff9b:1::1", "::7f00:1", "fec0::1")),
        *((address, False) for address in ("::ffff:10.0.0.1", "2001:0:7f00:1::1")),
    ],
)
def test_only_addresses_of_the_internet_are_public(address, expected):
    assert proxy.is_public(address) is expected


def test_indexes_come_from_the_settings_or_else_from_pypi_and_the_environment(monkeypatch, tmp_path):
    # True: the host may have a private address. That holds for hosts that the operator has chosen.
    chosen = indexes.load_indexes(["http://pypi.internal:8080/simple", "/srv/index/simple"], ["files.internal"], {})
    assert chosen.hosts == {("pypi.internal", 8080): True, ("files.internal", 443): True}
    for environment in ({}, {"UV_DEFAULT_INDEX": ""}):  # an empty variable chooses nothing
        assert indexes.load_indexes([], [], environment).hosts == {
            ("pypi.org", 443): False,
            ("files.pythonhosted.org", 443): False,
        }
    pip_configuration = {
        "UV_INDEX": "file:///opt/simple more=https://more.example/simple",  # uv allows a name before an address
        "UV_FIND_LINKS": "/opt/wheels",
    }
    from_pip = indexes.load_indexes([], [], pip_configuration)
    assert from_pip.addresses == ("https://pypi.org/simple", "file:///opt/simple", "https://more.example/simple")
    assert from_pip.find_links == ("/opt/wheels",)
    for address in (
        "https://user:word@pypi.internal/simple", "ftp://pypi.internal/simple", "https:///simple", "http://a:b/simple",
        "http://[x/simple", "ftp://user:word@pypi.internal/simple", "http://user:word@[x/simple",
    ):  # fmt: skip
        with pytest.raises(InvalidIndexes) as refusal:
            indexes.load_indexes([address], [], {})
        assert "word" not in str(refusal.value)  # messages show no credentials
    for file_host in ("files.internal:b", "user:word@files.internal:b"):
        with pytest.raises(InvalidIndexes) as refusal:
            indexes.load_indexes([], [file_host], {})
        assert "word" not in str(refusal.value)
    (tmp_path / "pip.conf").write_text("index-url = https://user:word@pypi.internal/simple\n")  # without a section
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    with pytest.raises(InvalidIndexes, match="pip config list") as refusal:
        indexes.load_indexes([], [])
    assert "word" not in str(refusal.value)
