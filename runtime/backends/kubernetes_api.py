"""The one room that speaks to an API server. It hides the client, its credentials, time-outs and second tries.

The one rule: objects are plain dicts as the server has them, and what comes back otherwise is either `Refused`, which
the server said, or BackendUnavailable, which it did not get to say. Every call may be made twice: what is created has a
name, so a second try that finds it there (409) has found its own or an older one's, and the caller adopts either.
"""

from __future__ import annotations

import json
import os
import random
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import kubernetes.client
import kubernetes.config
import urllib3

from runtime.backends.kubernetes_config import ClusterConfig
from runtime.errors import BackendUnavailable

Object = dict[str, Any]

FIELD_MANAGER = "trainyard"
MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"
_JSON = "application/json"
_TRIES = 4
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 2.0
_CONNECT_SECONDS = 3.0
_PAGE = 500
_DOWN_SECONDS = 3.0
"""After a server did not answer at all, so long nobody else waits for it."""
_PLURALS = {"Endpoints": "endpoints", "NetworkPolicy": "networkpolicies"}


class Refused(Exception):
    """The server's answer was no. `status` is HTTP's; `reason` and `message` are the server's own words."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{message} ({status} {reason})" if message else f"{status} {reason}")
        self.status = status
        self.reason = reason
        self.message = message


class Gone(Exception):
    """The watch's place in history is no longer kept: list again."""


def path_of(api_version: str, plural: str, namespace: str = "", name: str = "", subresource: str = "") -> str:
    """An address at the API server."""
    parts = ["api" if "/" not in api_version else "apis", api_version]
    parts += ["namespaces", namespace] if namespace else []
    parts += [part for part in (plural, name, subresource) if part]
    return "/" + "/".join(parts)


def home_of(manifest: Object) -> str:
    """The address of the collection that an object belongs to."""
    kind = manifest["kind"]
    plural = _PLURALS.get(kind, f"{kind.lower()}s")
    return path_of(manifest["apiVersion"], plural, manifest["metadata"].get("namespace", ""))


class Api:
    """One cluster's API server. Safe between threads, and made anew in a process that was forked."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._client: Any = None
        self._made_in = 0
        self._down_until = 0.0

    # What one may ask

    def get(self, path: str, **query: str) -> Object:
        """One object. Raises Refused (404 where there is none), BackendUnavailable."""
        return self._json("GET", path, query)

    def find(self, path: str, **query: str) -> Object | None:
        """One object, or None where there is none. Raises Refused, BackendUnavailable."""
        try:
            return self.get(path, **query)
        except Refused as refused:
            if refused.status == 404:
                return None
            raise

    def list(self, path: str, **query: str) -> Object:
        """A whole collection: `items`, and the `metadata` that a watch may go on from. Raises as `get`."""
        while True:
            try:
                return self._pages(path, query)
            except Refused as refused:
                if refused.status != 410:
                    raise
                # Its pages grew too old while we read them: once more, whole.
                query.pop("continue", None)

    def create(self, manifest: Object) -> Object | None:
        """Make this object; None where one of its name is there. Raises Refused, BackendUnavailable."""
        try:
            return self._json("POST", home_of(manifest), {"fieldManager": FIELD_MANAGER}, manifest, _JSON)
        except Refused as refused:
            if refused.status == 409 and refused.reason == "AlreadyExists":
                return None
            raise

    def apply(self, manifest: Object) -> Object:
        """Make this object, or make the one there be so. Raises Refused, BackendUnavailable."""
        path = f"{home_of(manifest)}/{manifest['metadata']['name']}"
        return self._json("PATCH", path, {"fieldManager": FIELD_MANAGER, "force": "true"}, manifest, APPLY)

    def patch(self, path: str, change: Object) -> Object:
        """Merge a change into an object; with `metadata.uid` or `resourceVersion` only into that (or Refused, 409)."""
        try:
            return self._json("PATCH", path, {"fieldManager": FIELD_MANAGER}, change, MERGE)
        except Refused as refused:
            if refused.status == 422 and "metadata.uid:" in refused.message:
                # Other calls name another object of this name a conflict; a patch calls it invalid.
                raise Refused(409, "Conflict", refused.message) from refused
            raise

    def delete(self, path: str, *, grace_seconds: int | None = None, uid: str = "", version: str = "") -> None:
        """Delete an object, then what it owns; nothing where it is gone, or not this one (`uid`, `version`)."""
        options: Object = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        wanted = {"uid": uid, "resourceVersion": version}
        if uid or version:
            options["preconditions"] = {name: value for name, value in wanted.items() if value}
        try:
            self._json("DELETE", path, {}, options, _JSON)
        except Refused as refused:
            if refused.status not in ({404, 409} if uid or version else {404}):
                raise

    def review(self, attributes: Object) -> bool:
        """Whether we may do this, by its resourceAttributes. Raises Refused, BackendUnavailable."""
        manifest = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "metadata": {},
            "spec": {"resourceAttributes": attributes},
        }
        answer = self._json("POST", home_of(manifest), {}, manifest, _JSON)
        return bool(answer.get("status", {}).get("allowed"))

    def text(self, path: str, **query: str) -> Iterator[bytes]:
        """What is no object, such as a pod's log, in pieces. Raises Refused, BackendUnavailable."""
        response = self._answer("GET", path, query, stream=True)
        try:
            yield from response.stream(1 << 16)
        except urllib3.exceptions.HTTPError as error:
            raise self._silence(error) from error
        finally:
            response.close()

    def watch(self, path: str, version: str, seconds: int, **query: str) -> Iterator[Object]:
        """Changes of a collection after `version`, bookmarks among them, for `seconds` at most.

        Ends without an error where the connection is lost: go on from the last version seen. Raises Gone where that is
        too old, Refused, BackendUnavailable.
        """
        told = {"watch": "1", "allowWatchBookmarks": "true", "resourceVersion": version, "timeoutSeconds": str(seconds)}
        try:
            response = self._answer("GET", path, {**query, **told}, stream=True, read_seconds=seconds + 5.0)
        except Refused as refused:
            if refused.status == 410:
                raise Gone from refused
            raise
        try:
            yield from _events(response)
        except urllib3.exceptions.HTTPError:
            return
        finally:
            response.close()

    # How it is asked

    def _pages(self, path: str, query: Mapping[str, str]) -> Object:
        page = self._json("GET", path, {**query, "limit": str(_PAGE)})
        items = list_items = page.get("items") or []
        while page["metadata"].get("continue"):
            more = {**query, "limit": str(_PAGE), "continue": page["metadata"]["continue"]}
            page = self._json("GET", path, more)
            items = [*items, *(page.get("items") or [])]
        return {"items": items if items else list_items, "metadata": page["metadata"]}

    def _json(
        self, method: str, path: str, query: Mapping[str, str], body: Object | None = None, content_type: str = ""
    ) -> Object:
        response = self._answer(method, path, query, body, content_type)
        try:
            answer = json.loads(response.data)
        except (ValueError, urllib3.exceptions.HTTPError) as error:
            raise self._silence(error) from error
        if not isinstance(answer, dict):
            raise self._silence(ValueError("no JSON object"))
        return answer

    def _answer(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Object | None = None,
        content_type: str = "",
        *,
        stream: bool = False,
        read_seconds: float = 0.0,
    ) -> Any:
        """The answer to a request that was tried a few times: one that is good. Raises Refused, BackendUnavailable."""
        if time.monotonic() < self._down_until:
            raise BackendUnavailable(f"The cluster '{self._config.name}' did not answer just now.")
        send = self._sender(method, path, query, body, content_type, stream=stream, read_seconds=read_seconds)
        pause = _FIRST_PAUSE_SECONDS
        for tries_left in reversed(range(_TRIES)):
            wait = pause * random.uniform(0.5, 1.5)  # noqa: S311 - so that clients do not come back all at once
            pause *= 4
            try:
                response = send()
            except (urllib3.exceptions.HTTPError, OSError) as error:
                if tries_left:
                    time.sleep(wait)  # a server is let be for as long
                    continue
                self._down_until = time.monotonic() + _DOWN_SECONDS
                raise self._silence(error) from error
            if response.status < 300:
                self._down_until = 0.0
                return response
            refused = _refusal(response)
            if refused.status != 429 and refused.status < 500:
                raise refused
            if not tries_left:
                raise self._silence(refused) from refused
            told = response.headers.get("Retry-After", "")
            wait = max(wait, float(told) if told.isdecimal() else 0.0)
            time.sleep(min(wait, _LONGEST_PAUSE_SECONDS))  # as long as it asks to be let be
        raise AssertionError("The last try returns or raises.")

    def _sender(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Object | None,
        content_type: str,
        *,
        stream: bool,
        read_seconds: float,
    ) -> Callable[[], Any]:
        client = self._connection()
        url = client.configuration.host.rstrip("/") + path
        if query:
            url += "?" + urllib.parse.urlencode(query)
        read = read_seconds or self._config.request_seconds

        def send() -> Any:
            # The second is for what is no object: a pod's log.
            headers = {"Accept": "application/json, */*", "User-Agent": FIELD_MANAGER}
            if content_type:
                headers["Content-Type"] = content_type
            for one in client.configuration.auth_settings().values():
                if one["in"] == "header" and one["value"]:
                    headers[one["key"]] = one["value"]
            return client.rest_client.pool_manager.request(
                method,
                url,
                body=None if body is None else json.dumps(body).encode(),
                headers=headers,
                preload_content=not stream,
                timeout=urllib3.Timeout(connect=_CONNECT_SECONDS, read=read),
                retries=False,
            )

        return send

    def _connection(self) -> Any:
        if self._client is None or self._made_in != os.getpid():
            told = kubernetes.client.Configuration()
            try:
                if self._config.in_cluster:
                    kubernetes.config.load_incluster_config(client_configuration=told)
                else:
                    kubernetes.config.load_kube_config(
                        config_file=self._config.kubeconfig or None,
                        context=self._config.context or None,
                        client_configuration=told,
                    )
            except (kubernetes.config.ConfigException, OSError) as error:
                raise BackendUnavailable(
                    f"There is no way to the cluster '{self._config.name}': {error}. Check its 'kubeconfig', 'context' "
                    "or 'in_cluster'."
                ) from error
            self._client = kubernetes.client.ApiClient(told)
            self._made_in = os.getpid()
        return self._client

    def _silence(self, error: Exception) -> BackendUnavailable:
        return BackendUnavailable(f"The cluster '{self._config.name}' did not answer: {_short(error)}.")


def _short(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    return f"{type(error).__name__}: {reason or error}"[:300]


def _refusal(response: Any) -> Refused:
    """What the server's Status says, or a proxy's page in its place."""
    try:
        body = response.data if response.data else response.read()
        told = json.loads(body)
    except (ValueError, urllib3.exceptions.HTTPError):
        told = {}
    finally:
        response.release_conn()
    if not isinstance(told, dict):
        told = {}
    return Refused(response.status, str(told.get("reason") or response.reason), str(told.get("message") or ""))


def _events(response: Any) -> Iterator[Object]:
    buffer = b""
    for piece in response.stream(1 << 16):
        *lines, buffer = (buffer + piece).split(b"\n")
        for line in filter(None, lines):
            try:
                event = json.loads(line)
            except ValueError:
                return
            if event.get("type") == "ERROR":
                if event.get("object", {}).get("code") == 410:
                    raise Gone
                return
            yield event
