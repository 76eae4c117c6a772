"""The fake API server's socket: real HTTP for the official client, watches included.

The one rule: what is decided is decided in `api.py`; here is the way in and out, and what can go wrong on it.
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

from tests.kubernetes.access import Access
from tests.kubernetes.api import Api, Query
from tests.kubernetes.certificates import certificates
from tests.kubernetes.discovery import discovery
from tests.kubernetes.faults import ANSWERS, DONE, HELD, Call, Fault, Faults
from tests.kubernetes.resources import ApiError, Object, Resource
from tests.kubernetes.store import Change, Store

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete", "GET": "get"}
_TICK_SECONDS = 0.25


class ApiServer:
    """Serves one cluster on a free port of loopback until `close`; with `secure`, as a real one is reached."""

    def __init__(self, bookmark_seconds: float = 1.0, *, secure: bool = False) -> None:
        self.store = Store()
        self.access = Access(self.store)
        self.api = Api(self.store, self.access)
        self.faults = Faults()
        self.bookmark_seconds = bookmark_seconds
        self.closing = threading.Event()
        server = self

        class Handler(_Handler):
            """Bound to this server."""

            owner = server

        self.tls = certificates().context() if secure else None
        self._http = _Listener(("127.0.0.1", 0), Handler)
        self.url = f"{'https' if secure else 'http'}://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def close(self) -> None:
        """Answer nobody any more."""
        self.closing.set()
        self.faults.disarm()
        self._http.shutdown()
        self._http.server_close()
        with self.store.changed:
            self.store.changed.notify_all()

    def kubeconfig(self, path: Path, token: str = "", namespace: str = "default") -> Path:
        """Write a kubeconfig with one context, `fake`: the administrator's, or that of whoever has the token."""
        user: Object = {"token": token or self.access.admin_token}
        cluster: Object = {"server": self.url}
        if self.tls is not None:
            cluster["certificate-authority-data"] = certificates().authority
            user = user if token else certificates().admin
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": cluster}],
            "users": [{"name": "fake", "user": user}],
            "contexts": [
                {"name": "fake", "context": {"cluster": "fake", "user": "fake", "namespace": namespace}},
            ],
        }
        path.write_text(json.dumps(content))
        return path


class _Listener(http.server.ThreadingHTTPServer):
    """Accepts connections; one that breaks is nobody's fault."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients give up and are killed; anything else is told."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    """One connection of a client."""

    owner: ApiServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_arguments: object) -> None:
        """Quiet."""

    def setup(self) -> None:
        """Greet the client, on this connection's own thread: it may take its time."""
        if self.owner.tls is not None:
            self.request = self.owner.tls.wrap_socket(self.request, server_side=True)
        super().setup()

    def finish(self) -> None:
        """The server closes what it accepted, and knows nothing of what was wrapped around it."""
        super().finish()
        self.connection.close()

    def _handle(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(length)
        parsed = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(parsed.query, keep_blank_values=True))
        try:
            told = self.connection.getpeercert() if isinstance(self.connection, ssl.SSLSocket) else None
            user = self.owner.access.user(self.headers.get("Authorization", ""), certified=bool(told))
            body = _decoded(raw, self.headers.get("Content-Type", ""))
            self._answer(user, parsed.path, query, body)
        except ApiError as error:
            self._send(error.code, error.status())
        except _HungUpError:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _handle  # noqa: N815 - the base class names them so

    def _answer(self, user: str, path: str, query: Query, body: Any) -> None:
        found = discovery(self.owner.api, path)
        if found is not None:
            self._meet(Call("get", path))
            self._send(200, found)
            return
        asked = _asked(self.owner.api, self.command, path, query, body)
        resource, namespace, name = asked.resource, asked.namespace, asked.name
        fault = self._meet(Call(asked.verb, asked.what, name))
        if resource.kind != "SelfSubjectAccessReview":
            self.owner.access.demand(
                user, verb=asked.verb, group=resource.group, what=asked.what, namespace=namespace, name=name
            )
        if asked.verb == "watch":
            self._watch(resource, namespace, query)
            return
        past = self.owner.store.as_of(self.owner.faults.stale_version) if fault is Fault.STALE else None
        if asked.sub == "log":
            self._send_text(self.owner.api.log_of(namespace, name, query))
            return
        if asked.verb in {"get", "list"}:
            code, answer = 200, self._read(asked, past)
        elif asked.verb == "create":
            code, answer = 201, self._create(user, asked)
        else:
            code, answer = 200, self._change(asked)
        if fault in DONE:
            self._vanish(fault)
        self._send(code, answer)

    def _meet(self, call: Call) -> Fault | None:
        """Count the call; what has to happen before it, happens."""
        fault = self.owner.faults.meet(call)
        if fault in ANSWERS:
            raise ApiError(*ANSWERS[fault])
        if fault in {Fault.TIMEOUT_BEFORE, Fault.BROKEN_BEFORE}:
            self._vanish(fault)
        return fault

    def _vanish(self, fault: Fault | None) -> None:
        """Break the connection, late where the client is to lose its patience."""
        if fault in HELD:
            self.owner.faults.released.wait(self.owner.faults.hold_seconds)
        raise _HungUpError

    def _read(self, asked: _Asked, past: Store | None) -> Object:
        api = self.owner.api
        if asked.verb == "get":
            return api.get(asked.resource, asked.namespace, asked.name, past)
        return api.list(asked.resource, asked.namespace, asked.query, past)

    def _create(self, user: str, asked: _Asked) -> Object:
        api = self.owner.api
        if asked.resource.kind == "SelfSubjectAccessReview":
            return api.review(user, asked.body)
        if asked.sub == "eviction":
            return api.evict(asked.namespace, asked.name, asked.body)
        if asked.sub == "token":
            token = self.owner.access.token_for(asked.namespace, asked.name)
            return {**asked.body, "status": {"token": token, "expirationTimestamp": "2999-01-01T00:00:00Z"}}
        return api.create(asked.resource, asked.namespace, asked.body, dry=asked.query.get("dryRun") == "All")

    def _change(self, asked: _Asked) -> Object:
        api, resource, namespace, name = self.owner.api, asked.resource, asked.namespace, asked.name
        options = _options(asked.query, asked.body) if asked.verb.startswith("delete") else {}
        match asked.verb:
            case "update":
                return api.replace(resource, namespace, name, asked.body, sub=asked.sub)
            case "patch":
                kind = self.headers.get("Content-Type", "").partition(";")[0]
                return api.patch(resource, namespace, name, asked.body, query=asked.query, kind=kind, sub=asked.sub)
            case "delete":
                return api.store.delete(resource.plural, namespace, name, options)
        with api.store.changed:
            for found in api.store.find(resource.plural, namespace, api.matching(resource, namespace, asked.query)):
                api.store.delete(resource.plural, namespace, found["metadata"]["name"], options)
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}

    # Watching

    def _watch(self, resource: Resource, namespace: str, query: Query) -> None:
        store, faults = self.owner.store, self.owner.faults
        matches = self.owner.api.matching(resource, namespace, query)
        end = time.monotonic() + float(query.get("timeoutSeconds") or 1800)
        self._begin_stream()
        sent = 0
        asked = query.get("resourceVersion") or "0"
        with store.changed:
            version = int(asked)
            if version == 0:
                version = store.version
                first = [_event("ADDED", found) for found in store.find(resource.plural, namespace, matches)]
            else:
                first = []
        if first:
            self._send_events(first)
        bookmark_at = time.monotonic() + self.owner.bookmark_seconds
        while time.monotonic() < end and not self.owner.closing.is_set() and not faults.down:
            try:
                with store.changed:
                    changes = store.since(version)
                    if not changes:
                        store.changed.wait(_TICK_SECONDS)
                        changes = store.since(version)
                    reached = store.version
            except ApiError as error:
                self._send_events([{"type": "ERROR", "object": error.status()}])
                break
            if faults.watch_lag_seconds:
                time.sleep(faults.watch_lag_seconds)
            events = [event for change in changes if (event := _seen(change, resource, matches))]
            version = reached
            if faults.watch_repeats:
                events = [event for event in events for _twice in range(2)]
            if faults.watch_drops_after is not None and sent + len(events) > faults.watch_drops_after:
                self._send_events(events[: max(0, faults.watch_drops_after - sent)])
                raise _HungUpError
            sent += len(events)
            if events:
                self._send_events(events)
            elif query.get("allowWatchBookmarks") in {"true", "True", "1"} and time.monotonic() >= bookmark_at:
                bookmark_at = time.monotonic() + self.owner.bookmark_seconds
                mark = {"kind": resource.kind, "apiVersion": resource.api_version}
                self._send_events(
                    [{"type": "BOOKMARK", "object": {**mark, "metadata": {"resourceVersion": str(version)}}}]
                )
        self._end_stream()

    def _begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _send_events(self, events: list[Object]) -> None:
        text = b"".join(json.dumps(event).encode() + b"\n" for event in events)
        if text:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text))

    def _end_stream(self) -> None:
        self.wfile.write(b"0\r\n\r\n")

    # Answering, in one write: a second one would wait for the first to be acknowledged

    def _send(self, code: int, answer: Object) -> None:
        self._send_bytes(code, "application/json", json.dumps(answer).encode())

    def _send_text(self, text: bytes) -> None:
        self._send_bytes(200, "text/plain", text)

    def _send_bytes(self, code: int, kind: str, content: bytes) -> None:
        retry = (
            f"Retry-After: {self.owner.faults.retry_after_seconds}\r\n" if code == HTTPStatus.TOO_MANY_REQUESTS else ""
        )
        head = f"HTTP/1.1 {code} {HTTPStatus(code).phrase}\r\nContent-Type: {kind}\r\n{retry}"
        self.wfile.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)


class _HungUpError(Exception):
    """The connection is to break without an answer."""


def _seen(change: Change, resource: Resource, matches: Any) -> Object | None:
    """What a watcher sees of a change: an object that comes into its selector is ADDED, one that leaves it DELETED."""
    if change.key[0] != resource.plural:
        return None
    is_in = change.kind != "DELETED" and matches(change.after)
    was_in = change.before is not None and matches(change.before)
    if not is_in and not was_in:
        return None
    if is_in:
        return _event("MODIFIED" if was_in else "ADDED", change.after)
    last = copy.deepcopy(change.after if change.kind == "DELETED" else change.before) or {}
    last["metadata"]["resourceVersion"] = str(change.version)
    return _event("DELETED", last)


def _event(kind: str, found: Object) -> Object:
    return {"type": kind, "object": found}


def _options(query: Query, body: Any) -> Object:
    """Options of a deletion, from the body and the query."""
    options = dict(body or {})
    if "propagationPolicy" in query:
        options["propagationPolicy"] = query["propagationPolicy"]
    if "gracePeriodSeconds" in query:
        options["gracePeriodSeconds"] = int(query["gracePeriodSeconds"])
    return options


def _decoded(raw: bytes, kind: str) -> Any:
    """The body. Raises ApiError 400, 415."""
    if not raw:
        return None
    if "json" not in kind and "yaml" not in kind:
        raise ApiError(415, "UnsupportedMediaType", f"the body of the request was in an unknown format: {kind}")
    try:
        return json.loads(raw)
    except ValueError as error:
        raise ApiError(400, "BadRequest", f"the object provided is unrecognized: {error}") from error


@dataclass(frozen=True)
class _Asked:
    """A request: the verb as access control knows it, on what."""

    verb: str
    resource: Resource
    namespace: str
    name: str
    sub: str
    query: Query
    body: Any

    @property
    def what(self) -> str:
        """The resource, with its subresource."""
        return self.resource.plural + (f"/{self.sub}" if self.sub else "")


def _asked(api: Api, method: str, path: str, query: Query, body: Any) -> _Asked:
    """The request. Raises ApiError 404."""
    parts = [urllib.parse.unquote(part) for part in path.strip("/").split("/")]
    group = ""
    if parts[:1] == ["apis"] and len(parts) > 3:
        group, parts = parts[1], parts[2:]
    elif parts[:1] == ["api"] and len(parts) > 2:
        parts = parts[1:]
    else:
        raise ApiError(404, "NotFound", "the server could not find the requested resource")
    version, rest = parts[0], parts[1:]
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2 and rest[2] not in {"status", "finalize"}:
        namespace, rest = rest[1], rest[2:]
    resource = api.resource(group, version, rest[0])
    name, sub = [*rest, "", ""][1:3]
    if sub and sub not in resource.subresources:
        raise ApiError(404, "NotFound", "the server could not find the requested resource")
    verb = _VERBS[method]
    if not name:
        listing = "watch" if query.get("watch") in {"1", "true", "True"} else "list"
        verb = {"get": listing, "delete": "deletecollection"}.get(verb, verb)
    return _Asked(verb, resource, namespace, name, sub, query, body)
