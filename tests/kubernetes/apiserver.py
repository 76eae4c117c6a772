"""The fake API server over HTTP, for the official client and ours, with watches and injected faults.

`api.py` decides; this module only translates requests and responses.
"""

from __future__ import annotations

import contextlib
import copy
import http.server
import json
import socket
import ssl
import sys
import threading
import time
import urllib.parse
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from tests.kubernetes import portforward
from tests.kubernetes.api import VERSION, Api, Query
from tests.kubernetes.certificates import Certificates
from tests.kubernetes.faults import AFTER, BEFORE, REFUSALS, TIMEOUTS, Fault, Faults
from tests.kubernetes.rbac import Access
from tests.kubernetes.resources import ApiError, Object, Resource
from tests.kubernetes.store import Change, Store

_VERBS = {"POST": "create", "PATCH": "patch", "DELETE": "delete", "GET": "get"}
_TICK_SECONDS = 0.25  # how long a watch waits for a change before it looks whether it must end


def write_kubeconfig(path: Path, cluster: Object, user: Object) -> Path:
    """Write a kubeconfig with one context."""
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "test", "user": user}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": "default"}}],
    }
    path.write_text(json.dumps(content))
    return path


class ApiServer:
    """Serves one cluster on a free port of loopback until `close`. If `secure`, with TLS and client certificates.

    A watch without events sends a bookmark every `bookmark_seconds`.
    """

    def __init__(self, bookmark_seconds: float = 1.0, *, secure: bool = False) -> None:
        self.store = Store()
        self.access = Access(self.store)
        self.api = Api(self.store, self.access)
        self.faults = Faults()
        self.bookmark_seconds = bookmark_seconds
        self.closing = threading.Event()
        self.forwards: list[str] = []
        """The Pods to which ports are forwarded now, one entry for each connection."""
        self.certificates = Certificates() if secure else None
        self.tls = self.certificates.context() if self.certificates else None
        self._http = _Listener(("127.0.0.1", 0), type("Handler", (_Handler,), {"owner": self}))
        self.url = f"{'https' if secure else 'http'}://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self.closing.set()
        self.faults.disarm()
        self._http.shutdown()
        self._http.server_close()
        with self.store.changed:
            self.store.changed.notify_all()

    def kubeconfig(self, path: Path, token: str = "") -> Path:
        """Write the kubeconfig of the administrator, or of the owner of a token."""
        if self.certificates is None:
            return write_kubeconfig(path, {"server": self.url}, {"token": token or self.access.admin_token})
        cluster = {"server": self.url, "certificate-authority-data": self.certificates.authority}
        return write_kubeconfig(path, cluster, {"token": token} if token else self.certificates.admin)


class _Listener(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an exception, unless it is a broken connection: clients give up and are killed."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _ConnectionDropped(Exception):
    """The connection is to break without a response."""


class _Handler(http.server.BaseHTTPRequestHandler):
    """One connection of a client."""

    owner: ApiServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_arguments: object) -> None:
        """Log nothing."""

    def setup(self) -> None:
        """Shake hands on this connection's own thread."""
        if self.owner.tls is not None:
            self.request = self.owner.tls.wrap_socket(self.request, server_side=True)
        super().setup()

    def finish(self) -> None:
        """Close the TLS connection; the server closes only the socket below it."""
        super().finish()
        self.connection.close()

    def _handle(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        try:
            certificate = self.connection.getpeercert() if isinstance(self.connection, ssl.SSLSocket) else None
            user = self.owner.access.user(self.headers.get("Authorization", ""), has_certificate=bool(certificate))
            self._respond(user, url.path, query, _decode(raw))
        except ApiError as error:
            self._send(error.code, error.status())
        except _ConnectionDropped:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_GET = do_POST = do_PATCH = do_DELETE = _handle  # noqa: N815 - the base class names them so

    def _respond(self, user: str, path: str, query: Query, body: Any) -> None:
        if path in {"/version", "/readyz"}:
            self._fault_of(f"get {path}")
            self._send(200, VERSION)
            return
        asked = _parse(self.owner.api, self.command, path, query, body)
        fault = self._fault_of(f"{asked.verb} {asked.what}")
        if asked.resource.kind != "SelfSubjectAccessReview":  # any user may ask for its own permissions
            self.owner.access.demand(
                user, verb=asked.verb, group=asked.resource.group, what=asked.what, namespace=asked.namespace,
                name=asked.name,
            )  # fmt: skip
        if asked.verb == "watch":
            self._watch(asked)
            return
        if asked.subresource == "portforward":
            self._forward_port(user, asked)
            return
        if asked.subresource == "log":
            with_times = asked.query.get("timestamps") == "true"
            self._send_bytes(200, "text/plain", self.owner.api.log_of(asked.namespace, asked.name, with_times))
            return
        past = self.owner.store.as_of(self.owner.faults.stale_version) if fault is Fault.STALE else None
        response = self._carry_out(user, asked, past)
        if fault in AFTER:
            self._drop_connection(fault)
        self._send(201 if asked.verb == "create" else 200, response)

    def _forward_port(self, user: str, asked: _Request) -> None:
        # Since 1.35 a websocket, which is a GET, needs the permission to create too.
        self.owner.access.demand(
            user, verb="create", group="", what=asked.what, namespace=asked.namespace, name=asked.name
        )
        dial = self.owner.api.dial_of(asked.namespace, asked.name)
        self.connection.sendall(portforward.handshake(self.headers))
        self.close_connection = True
        self.owner.forwards.append(asked.name)
        try:
            port = int(asked.query["ports"].split(",")[0])
            portforward.serve(self.connection, port, dial, self.owner.closing)
        finally:
            self.owner.forwards.remove(asked.name)

    def _fault_of(self, call: str) -> Fault | None:
        """Count the request, and inject a fault that comes before it is carried out."""
        fault = self.owner.faults.next_fault(call)
        if fault in REFUSALS:
            raise ApiError(*REFUSALS[fault])
        if fault in BEFORE:
            self._drop_connection(fault)
        return fault

    def _drop_connection(self, fault: Fault | None) -> None:
        if fault in TIMEOUTS:
            self.owner.faults.released.wait(self.owner.faults.hold_seconds)
        raise _ConnectionDropped

    def _carry_out(self, user: str, asked: _Request, past: Store | None) -> Object:
        api, resource, namespace, name, body = self.owner.api, asked.resource, asked.namespace, asked.name, asked.body
        match asked.verb:
            case "get":
                return (past or api.store).get(resource.plural, namespace, name)
            case "list":
                return api.list(resource, namespace, asked.query, past)
            case "patch":
                return api.patch(
                    resource, namespace, name, body, self.headers.get("Content-Type", "").partition(";")[0]
                )
            case "delete":
                options = dict(body or {})
                for option in asked.query.keys() & {"propagationPolicy", "gracePeriodSeconds"}:
                    options[option] = asked.query[option]
                if resource.plural == "jobs" and options.get("propagationPolicy") != "Background":
                    raise ApiError(400, "BadRequest", "the fake cluster deletes Jobs in the background only")
                return api.store.delete(resource.plural, namespace, name, options)
        return self._create(user, asked)

    def _create(self, user: str, asked: _Request) -> Object:
        api, resource, namespace, name, body = self.owner.api, asked.resource, asked.namespace, asked.name, asked.body
        if resource.kind == "SelfSubjectAccessReview":
            return api.review(user, body)
        if asked.subresource == "eviction":
            return api.evict(namespace, name, body)
        if asked.subresource == "token":
            token = self.owner.access.token_for(namespace, name)
            return {**body, "status": {"token": token, "expirationTimestamp": "2999-01-01T00:00:00Z"}}
        return api.create(resource, namespace, body)

    # Watches

    def _watch(self, asked: _Request) -> None:
        store, faults, query = self.owner.store, self.owner.faults, asked.query
        matches = self.owner.api.matching(asked.resource, asked.namespace, query)
        ends_at = time.monotonic() + float(query.get("timeoutSeconds") or 1800)
        bookmark_at = time.monotonic() + self.owner.bookmark_seconds
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        sent = 0
        version = int(query.get("resourceVersion") or store.version)
        while time.monotonic() < ends_at and not self.owner.closing.is_set() and not faults.down:
            try:
                with store.changed:
                    if not store.since(version):
                        store.changed.wait(_TICK_SECONDS)
                    changes, version = store.since(version), store.version
            except ApiError as error:
                self._send_events([{"type": "ERROR", "object": error.status()}])
                break
            self.owner.closing.wait(faults.watch_lag_seconds)
            events = [event for change in changes if (event := _event(change, asked.resource, matches))]
            if faults.watch_repeats:
                events = [event for event in events for _twice in range(2)]
            if faults.watch_drops_after is not None and sent + len(events) > faults.watch_drops_after:
                self._send_events(events[: max(0, faults.watch_drops_after - sent)])
                raise _ConnectionDropped
            if not events and time.monotonic() >= bookmark_at and "allowWatchBookmarks" in query:
                bookmark_at = time.monotonic() + self.owner.bookmark_seconds
                metadata = {"resourceVersion": str(version)}
                mark = {"kind": asked.resource.kind, "apiVersion": asked.resource.api_version, "metadata": metadata}
                events = [{"type": "BOOKMARK", "object": mark}]
            sent += len(events)
            self._send_events(events)
        self.wfile.write(b"0\r\n\r\n")

    def _send_events(self, events: list[Object]) -> None:
        text = b"".join(json.dumps(event).encode() + b"\n" for event in events)
        if text:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text))

    # Responses, each in one write

    def _send(self, code: int, response: Object) -> None:
        self._send_bytes(code, "application/json", json.dumps(response).encode())

    def _send_bytes(self, code: int, kind: str, content: bytes) -> None:
        head = f"HTTP/1.1 {code} {HTTPStatus(code).phrase}\r\nContent-Type: {kind}\r\n"
        if code == HTTPStatus.TOO_MANY_REQUESTS:
            head += f"Retry-After: {self.owner.faults.retry_after_seconds}\r\n"
        self.wfile.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)


def _event(change: Change, resource: Resource, matches: Any) -> Object | None:
    """Return what a watch sends: an object that starts to match its selector is ADDED, one that stops is DELETED."""
    if change.key[0] != resource.plural:
        return None
    matches_now = change.kind != "DELETED" and matches(change.after)
    matched_before = change.before is not None and matches(change.before)
    if matches_now:
        return {"type": "MODIFIED" if matched_before else "ADDED", "object": change.after}
    if not matched_before:
        return None
    last = copy.deepcopy(change.after if change.kind == "DELETED" else change.before) or {}
    last["metadata"]["resourceVersion"] = str(change.version)
    return {"type": "DELETED", "object": last}


def _decode(raw: bytes) -> Any:
    """Return the body of a request. Raises ApiError 400."""
    try:
        return json.loads(raw) if raw else None
    except ValueError as error:
        raise ApiError(400, "BadRequest", f"the object provided is unrecognized: {error}") from error


@dataclass(frozen=True)
class _Request:
    """A request: the verb as RBAC names it, and the object."""

    verb: str
    resource: Resource
    namespace: str
    name: str
    subresource: str
    query: Query
    body: Any

    @property
    def what(self) -> str:
        """The resource, with its subresource."""
        return self.resource.plural + (f"/{self.subresource}" if self.subresource else "")


def _parse(api: Api, method: str, path: str, query: Query, body: Any) -> _Request:
    """Return the request of a URL. Raises ApiError 404."""
    not_found = ApiError(404, "NotFound", "the server could not find the requested resource")
    parts = [urllib.parse.unquote(part) for part in path.strip("/").split("/")]
    group = ""
    if parts[0] == "apis" and len(parts) > 3:
        group, parts = parts[1], parts[2:]
    elif parts[0] == "api" and len(parts) > 2:
        parts = parts[1:]
    else:
        raise not_found
    version, rest = parts[0], parts[1:]
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    resource = api.resource(group, version, rest[0])
    name, subresource = [*rest, "", ""][1:3]
    if subresource and subresource not in resource.subresources:
        raise not_found
    verb = _VERBS[method]
    if verb == "get" and not name:
        verb = "watch" if query.get("watch") in {"1", "true", "True"} else "list"
    return _Request(verb, resource, namespace, name, subresource, query, body)
