"""The key-value server that Horovod's Gloo controller meets at: GET, PUT and DELETE on `/scope/key`.

For an elastic run it is also what `horovodrun`'s driver would be to the workers: one that has lost a peer asks for
`/rank_and_size/<host>:<local rank>`, and is answered when every worker of the new round has asked. Of the addresses
that workers leave at `/worker_addresses` to be told of changes nothing is needed: nodes only ever go, and a worker
learns that from its collectives. The one rule: the server listens before any rank starts (Horovod tries three times and
then aborts), and never unpickles what a worker sent.
"""

from __future__ import annotations

import socket
import socketserver
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Dict, Optional, Set

_LARGEST_VALUE = 1 << 20
_MOST_KEYS = 100_000
_RANK_AND_SIZE = "/rank_and_size/"
_REMOVED = "-1,-1,-1,-1,-1,-1"
"""What Horovod's driver tells a worker that is no part of the run any more."""


class RendezvousServer(ThreadingHTTPServer):
    """Bound on construction, so that its port is known; `serve` answers from a thread of its own."""

    daemon_threads = True

    def __init__(self, host: str) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, 0), _Handler)
        self.values: Dict[str, bytes] = {}
        self._serving = False
        self._changed = threading.Condition()
        self._slots: Dict[str, str] = {}
        self._asking: Set[str] = set()
        self._meetings = 0
        self._met = False

    def server_bind(self) -> None:
        """As in `http.server`, but without asking the network for this address's name, which may take long."""
        socketserver.TCPServer.server_bind(self)
        self.server_name = str(self.server_address[0])
        self.server_port = self.port

    @property
    def port(self) -> int:
        """Where the server listens."""
        return int(self.server_address[1])

    def serve(self) -> None:
        """Answer from now on, in the background."""
        if not self._serving:
            self._serving = True
            threading.Thread(target=self.serve_forever, name="rendezvous", daemon=True).start()

    def assign(self, slots: Dict[str, str], *, anew: bool = False) -> None:
        """Who is to meet here from now on, and what each is told then; `anew`: they are other processes than before."""
        with self._changed:
            self._slots = dict(slots)
            self._asking = set() if anew else self._asking & set(slots)
            self._met = False
            self._meet()
            self._changed.notify_all()
            if anew:
                self.values.clear()

    @property
    def settled(self) -> bool:
        """Whether all have met since the last `assign`."""
        return self._met

    def place(self, worker: str) -> str:
        """The worker's place, once all have asked. Also where nobody is lost: then a collective failed on its own."""
        with self._changed:
            meeting = self._meetings
            self._asking.add(worker)
            self._meet()
            while self._meetings == meeting and worker in self._slots:
                self._changed.wait()
            return self._slots.get(worker, _REMOVED)

    def _meet(self) -> None:
        if self._slots and self._asking >= set(self._slots):
            self._meetings += 1
            self._asking = set()
            self._met = True
            # What they left here when they met last would lead them astray.
            self.values.clear()
            self._changed.notify_all()


class _Handler(BaseHTTPRequestHandler):
    server: RendezvousServer

    def do_GET(self) -> None:
        if self.path.startswith(_RANK_AND_SIZE):
            value: Optional[bytes] = self.server.place(self.path[len(_RANK_AND_SIZE) :]).encode()
        else:
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
