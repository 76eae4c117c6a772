"""The key-value server where the ranks of Horovod's Gloo controller meet: GET, PUT and DELETE on `/scope/key`.

For an elastic run the server also replaces `horovodrun`'s driver. A worker that has lost a peer asks for
`/rank_and_size/<host>:<local rank>`. The server answers once every worker of the new round has asked. Workers store
addresses at `/worker_addresses`, in order to be notified of added hosts. These addresses are not used, since nodes are
never added.

The server listens before any rank starts, because Horovod aborts after three failed requests. Unlike horovodrun's
driver, it never unpickles workers' data, since that would let customer code run inside the launcher.
"""

from __future__ import annotations

import socket
import socketserver
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Dict, Optional, Set

_MAX_VALUE_BYTES = 1 << 20
"""Maximum size of a value; Horovod's are addresses of some hundred bytes."""
_MAX_KEYS = 100_000
"""Maximum number of keys; Horovod stores a few for each pair of ranks."""
_PLACE_PATH = "/rank_and_size/"
"""The beginning of the paths at which Horovod's elastic workers ask for their place: rank, size, local rank, local
size, cross rank (the node's number) and cross size (the number of nodes), separated by commas."""
_REMOVED_WORKER_PLACE = "-1,-1,-1,-1,-1,-1"
"""The answer to a worker that is no longer part of the run, in the form of a place (`elastic.horovod_places`)."""


class RendezvousServer(ThreadingHTTPServer):
    """The server. It listens once it is created, so that its port is known; `serve` starts a thread that answers.

    The workers of an elastic run *meet*: each asks for its place, and all get their answers once the last has asked.
    """

    daemon_threads = True

    def __init__(self, host: str) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, 0), _Handler)
        self.values: Dict[str, bytes] = {}  # by path: `/scope/key`
        self._is_serving = False
        self._changed = threading.Condition()
        self._places: Dict[str, str] = {}  # the place of each worker of the round
        self._waiting_workers: Set[str] = set()  # the workers that wait for their place
        self._meeting_count = 0  # how often all workers have asked for their places
        self._have_all_met = False  # whether all workers have asked since the last `assign`

    def server_bind(self) -> None:
        """As in `http.server`, but without the reverse lookup of the address, which may take long."""
        socketserver.TCPServer.server_bind(self)
        self.server_name = str(self.server_address[0])
        self.server_port = self.port

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self.server_address[1])

    def serve(self) -> None:
        """Answer requests from now on, in the background."""
        if not self._is_serving:
            self._is_serving = True
            threading.Thread(target=self.serve_forever, name="rendezvous", daemon=True).start()

    def assign(self, places: Dict[str, str], *, new_workers: bool = False) -> None:
        """Set the workers of the next round and each one's place. `new_workers`: they are new processes."""
        with self._changed:
            self._places = dict(places)
            self._waiting_workers = set() if new_workers else self._waiting_workers & set(places)
            self._have_all_met = False
            self._end_meeting_if_complete()
            self._changed.notify_all()  # a worker that waits, but has no place any more, gets its answer now
            if new_workers:
                self.values.clear()  # as in `_end_meeting_if_complete`

    @property
    def have_all_met(self) -> bool:
        """Whether all workers have met since the last `assign`."""
        return self._have_all_met

    def wait_for_place(self, worker: str) -> str:
        """Return the worker's place once all workers have asked for theirs.

        Workers may ask although no node was lost, if a collective failed by itself. Each then gets its old place.
        """
        with self._changed:
            previous_count = self._meeting_count
            self._waiting_workers.add(worker)
            self._end_meeting_if_complete()
            while self._meeting_count == previous_count and worker in self._places:
                self._changed.wait()
            return self._places.get(worker, _REMOVED_WORKER_PLACE)

    def _end_meeting_if_complete(self) -> None:
        """If all workers of the round wait for their places, let `wait_for_place` answer them."""
        if self._places and self._waiting_workers >= set(self._places):
            self._meeting_count += 1
            self._waiting_workers = set()
            self._have_all_met = True
            # The keys of the last round would connect workers to old addresses.
            self.values.clear()
            self._changed.notify_all()


class _Handler(BaseHTTPRequestHandler):
    server: RendezvousServer

    def do_GET(self) -> None:
        if self.path.startswith(_PLACE_PATH):
            value: Optional[bytes] = self.server.wait_for_place(self.path[len(_PLACE_PATH) :]).encode()
        else:
            value = self.server.values.get(self.path)
        if value is None:
            self._answer(HTTPStatus.NOT_FOUND)  # no rank has stored it yet: Horovod asks again
        else:
            self._answer(HTTPStatus.OK, value)

    def do_PUT(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        if not 0 <= length <= _MAX_VALUE_BYTES or len(self.server.values) >= _MAX_KEYS:
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
        """Keep requests out of the node's log."""
