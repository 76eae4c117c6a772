"""The key-value server that Horovod's Gloo controller meets at: GET, PUT and DELETE on `/scope/key`.

The one rule: it listens before any rank starts (Horovod tries three times and then aborts). Values live in memory.
"""

from __future__ import annotations

import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Dict

_LARGEST_VALUE = 1 << 20
_MOST_KEYS = 100_000


class RendezvousServer(ThreadingHTTPServer):
    """Bound on construction, so that its port is known; `serve` answers from a thread of its own."""

    daemon_threads = True

    def __init__(self, host: str) -> None:
        super().__init__((host, 0), _Handler)
        self.values: Dict[str, bytes] = {}

    @property
    def port(self) -> int:
        """Where the server listens."""
        return int(self.server_address[1])

    def serve(self) -> None:
        """Answer from now on, in the background."""
        threading.Thread(target=self.serve_forever, name="rendezvous", daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: RendezvousServer

    def do_GET(self) -> None:
        value = self.server.values.get(self.path)
        if value is None:
            self._answer(HTTPStatus.NOT_FOUND)
        else:
            self._answer(HTTPStatus.OK, value)

    def do_PUT(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        if length > _LARGEST_VALUE or len(self.server.values) >= _MOST_KEYS:
            self._answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return
        self.server.values[self.path] = self.rfile.read(length)
        self._answer(HTTPStatus.OK)

    def do_DELETE(self) -> None:
        self.server.values.pop(self.path, None)
        self._answer(HTTPStatus.OK)

    def _answer(self, status: HTTPStatus, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is http.server's
        """Keep requests out of the node's own log."""
