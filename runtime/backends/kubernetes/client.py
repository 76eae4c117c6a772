"""The only module that calls an API server: requests, credentials, timeouts, retries.

Objects are plain dicts as the server returns them. A call raises ApiError when the server refuses the request, and
BackendUnavailable when it does not answer. Requests that write are retried too, and an attempt may have succeeded
although its answer was lost. So a caller must expect that the object exists already (`create` returns None).
"""

from __future__ import annotations

import json
import os
import ssl
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import kubernetes.client
import kubernetes.config
import urllib3
import yaml

from runtime.backends.kubernetes.config import ClusterConfig
from runtime.errors import BackendUnavailable

Object = dict[str, Any]
"""An API object as decoded from JSON, which callers may change. `objects.Object` is the same, but read-only."""

FIELD_MANAGER = "trainyard"
"""The name by which the API server knows which fields of an object the console has set."""
# Content types of the two kinds of PATCH that the client sends: a merge, and server-side apply.
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
_JSON = "application/json"
_RETRY_AFTER_MAX_SECONDS = 2
"""The longest Retry-After that is honored. A longer one is cut, because a web request may be waiting."""
_RETRY = urllib3.Retry(
    total=3,
    redirect=0,
    allowed_methods=None,  # all methods: by default urllib3 retries no POST and no PATCH
    status_forcelist=(429, *range(500, 600)),
    backoff_factor=0.25,
    backoff_jitter=0.25,
    backoff_max=2.0,
    raise_on_status=False,
    raise_on_redirect=False,
    retry_after_max=_RETRY_AFTER_MAX_SECONDS,
)
"""Three retries within about 2 s. In that time, a load balancer stops sending requests to an API server that restarts.
Jitter keeps clients from returning all at once."""
_CONNECT_SECONDS = 3.0
"""How long connecting may take. Even a server in another region needs well below 1 s."""
_READY_SECONDS = 1.0
"""How long connecting and answering may each take in `is_ready`, which promises an answer within two seconds."""
_PAGE_SIZE = 500
"""Objects per page of a list, which is kubectl's default too. Larger pages need more of the server's memory at once."""
_CHUNK_BYTES = 1 << 16
"""Bytes of a streamed response that are read at a time, since logs can be far longer."""
_BROKEN_CONFIGURATION = (
    kubernetes.config.ConfigException,
    OSError,
    # What the kubernetes package raises for a kubeconfig that has another form or is only partly written.
    yaml.YAMLError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
)
"""Errors while credentials are read from files."""
_DOWN_SECONDS = 3.0
"""After a request that got no answer in all its tries, all requests fail immediately for this long. Otherwise every
caller would wait for a server that is down. A server that answers with 429 or 5xx does not count as down, although that
request fails too. 3 s are about as long as one failing request takes, so that the server's return is noticed soon."""
_IRREGULAR_PLURALS = {"Endpoints": "endpoints", "NetworkPolicy": "networkpolicies"}
"""Plurals, as in URL paths, of kinds whose plural does not just add an "s"."""


class ApiError(Exception):
    """The server refused a request. `status` is the HTTP status; `reason` and `message` come from its Status object."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{message} ({status} {reason})" if message else f"{status} {reason}")
        self.status = status
        self.reason = reason
        self.message = message


@dataclass(frozen=True)
class WebsocketTarget:
    """What a client needs to open a websocket to the API server. `headers` hold its credentials."""

    url: str
    headers: Mapping[str, str]
    ssl: ssl.SSLContext | None
    server_hostname: str | None
    """The name that the server's certificate must have; None: the host of `url`."""
    proxy: str | None


@dataclass(frozen=True)
class _Request:
    """One HTTP request. `read_seconds` limits the wait for the answer; 0: the cluster's `request_seconds` does."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None
    content_type: str = _JSON
    """The format of `body`."""
    stream: bool = False
    """Whether the caller reads the response's body in chunks."""
    read_seconds: float = 0.0


class ResourceVersionExpired(Exception):
    """The server no longer keeps the history that a watch needs (HTTP 410); list again."""


def resource_path(api_version: str, plural: str, namespace: str = "", name: str = "", subresource: str = "") -> str:
    """Return the URL path of a collection, or of an object in it."""
    parts = ["api" if "/" not in api_version else "apis", api_version]
    parts += ["namespaces", namespace] if namespace else []
    parts += [part for part in (plural, name, subresource) if part]
    return "/" + "/".join(parts)


def collection_path(manifest: Mapping[str, Any]) -> str:
    """Return the URL path of the collection that an object belongs to."""
    kind = manifest["kind"]
    plural = _IRREGULAR_PLURALS.get(kind, f"{kind.lower()}s")
    return resource_path(manifest["apiVersion"], plural, manifest["metadata"].get("namespace", ""))


class ApiClient:
    """A client of one cluster's API server. Thread-safe; reconnects in a forked process."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._client: Any = None  # kubernetes.client.ApiClient; `Any` because it has no type information
        self._client_pid = 0
        self._down_until = 0.0  # monotonic; see _DOWN_SECONDS

    # Requests

    def get(self, path: str, **query: str) -> Object:
        """Return one object. Raises ApiError (404 if it does not exist), BackendUnavailable."""
        return self._request_json(_Request("GET", path, query))

    def find(self, path: str, **query: str) -> Object | None:
        """Return one object, or None if it does not exist. Raises ApiError, BackendUnavailable."""
        try:
            return self.get(path, **query)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def list(self, path: str, **query: str) -> Object:
        """Return a whole collection: its `items`, and the `metadata` to start a watch from.

        Raises ApiError, BackendUnavailable.
        """
        while True:
            try:
                return self._list_pages(path, query)
            except ApiError as error:
                if error.status != 410:
                    raise
                # 410: the server dropped the snapshot between two pages, so the list starts over.

    def create(self, manifest: Mapping[str, Any]) -> Object | None:
        """Create an object; return None if one of its name exists. Raises ApiError, BackendUnavailable."""
        try:
            query = {"fieldManager": FIELD_MANAGER}
            return self._request_json(_Request("POST", collection_path(manifest), query, manifest))
        except ApiError as error:
            if error.status == 409 and error.reason == "AlreadyExists":
                return None
            raise

    def apply(self, manifest: Mapping[str, Any]) -> Object:
        """Create or update an object by server-side apply. Raises ApiError, BackendUnavailable."""
        path = f"{collection_path(manifest)}/{manifest['metadata']['name']}"
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}  # force: take over fields that another manager has set
        return self._request_json(_Request("PATCH", path, query, manifest, APPLY_PATCH))

    def patch(self, path: str, change: Object) -> Object:
        """Merge a change into an object. Raises ApiError, BackendUnavailable.

        If the change has `metadata.uid` or `metadata.resourceVersion`, and the object has another value, raises
        ApiError 409.
        """
        try:
            return self._request_json(_Request("PATCH", path, {"fieldManager": FIELD_MANAGER}, change, MERGE_PATCH))
        except ApiError as error:
            if error.status == 422 and "metadata.uid:" in error.message:
                # For a wrong UID, the server answers a patch with 422 and all other requests with 409.
                raise ApiError(409, "Conflict", error.message) from error
            raise

    def delete(self, path: str, *, grace_seconds: int | None = None, uid: str = "", version: str = "") -> None:
        """Delete an object; the server then deletes the objects that it owns, in the background.

        Does nothing if the object does not exist, or if its UID or resourceVersion is not the given one. Raises
        ApiError, BackendUnavailable.
        """
        options: Object = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        preconditions = {name: value for name, value in (("uid", uid), ("resourceVersion", version)) if value}
        if preconditions:
            options["preconditions"] = preconditions
        try:
            self._request_json(_Request("DELETE", path, body=options))
        except ApiError as error:
            if error.status not in ({404, 409} if preconditions else {404}):
                raise

    def is_allowed(self, attributes: Object) -> bool:
        """Return whether the client has the permission that these resourceAttributes describe.

        Raises ApiError, BackendUnavailable.
        """
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "metadata": {},
            "spec": {"resourceAttributes": attributes},
        }
        reviewed = self._request_json(_Request("POST", collection_path(review), body=review))
        return bool(reviewed.get("status", {}).get("allowed"))

    def stream(self, path: str, **query: str) -> Iterator[bytes]:
        """Yield a response that is not JSON, such as a Pod's log, in chunks. Raises ApiError, BackendUnavailable."""
        response = self._request(_Request("GET", path, query, stream=True))
        try:
            yield from response.stream(_CHUNK_BYTES)
        except urllib3.exceptions.HTTPError as error:
            raise self._unavailable(error) from error
        finally:
            response.close()

    def watch(self, path: str, version: str, seconds: int, **query: str) -> Iterator[Object]:
        """Yield the changes of a collection after resourceVersion `version`, with bookmarks, for at most `seconds`.

        Ends without an error if the connection breaks; continue from the last version seen. Raises
        ResourceVersionExpired, ApiError, BackendUnavailable.
        """
        watch_query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(seconds),
        }
        try:
            # The server ends the watch itself after `seconds`. 5 s more cover a slow network.
            request = _Request("GET", path, {**query, **watch_query}, stream=True, read_seconds=seconds + 5.0)
            response = self._request(request)
        except ApiError as error:
            if error.status == 410:
                raise ResourceVersionExpired from error
            raise
        try:
            yield from _watch_events(response)
        except urllib3.exceptions.HTTPError:
            return
        finally:
            response.close()

    def websocket_target(self, path: str, **query: str) -> WebsocketTarget:
        """Return what a websocket to this path needs. May block, to renew credentials. Raises BackendUnavailable."""
        client = self._connection()
        configuration = client.configuration
        context = None
        try:
            headers = self._credentials(configuration)
            if configuration.host.startswith("https:"):
                context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
                context.check_hostname = bool(configuration.verify_ssl and configuration.assert_hostname is not False)
                context.verify_mode = ssl.CERT_REQUIRED if configuration.verify_ssl else ssl.CERT_NONE
                if configuration.cert_file:
                    context.load_cert_chain(configuration.cert_file, configuration.key_file)
        except OSError as error:
            raise self._unavailable(error) from error
        proxy = getattr(client.rest_client.pool_manager, "proxy", None)
        return WebsocketTarget(
            # http: becomes ws:, and https: becomes wss:.
            url=f"ws{configuration.host.removeprefix('http').rstrip('/')}{path}?{urllib.parse.urlencode(query)}",
            headers=headers,
            ssl=context,
            server_hostname=configuration.tls_server_name or None,
            proxy=str(proxy) if proxy else None,
        )

    def is_ready(self) -> bool:
        """Return whether the server answers one short request. If it does, the pause of _DOWN_SECONDS ends."""
        try:
            response = self._send(_Request("GET", "/readyz", read_seconds=_READY_SECONDS), retries=urllib3.Retry(0))
        except (urllib3.exceptions.HTTPError, OSError, BackendUnavailable):
            return False
        # 401 and 403 count as ready: this client may lack the permission to read the server's health.
        if response.status >= 500 or response.status == 429:
            return False
        self._down_until = 0.0
        return True

    # Sending

    def _list_pages(self, path: str, query: Mapping[str, str]) -> Object:
        """Return a whole collection, page by page. Raises ApiError 410 if its snapshot expires between two pages."""
        items: list[Object] = []
        page_query = {**query, "limit": str(_PAGE_SIZE)}
        while True:
            page = self._request_json(_Request("GET", path, page_query))
            items += page.get("items") or []
            if not page["metadata"].get("continue"):
                return {"items": items, "metadata": page["metadata"]}
            page_query["continue"] = page["metadata"]["continue"]

    def _request_json(self, request: _Request) -> Object:
        """Return the JSON object in the response. Raises ApiError, BackendUnavailable."""
        response = self._request(request)
        try:
            document = json.loads(response.data)
        except (ValueError, urllib3.exceptions.HTTPError) as error:
            raise self._unavailable(error) from error
        if not isinstance(document, dict):
            raise self._unavailable(ValueError("the response is not a JSON object"))
        return document

    def _request(self, request: _Request) -> urllib3.BaseHTTPResponse:
        """Return the successful response, after retries. Raises ApiError, BackendUnavailable."""
        if time.monotonic() < self._down_until:
            raise BackendUnavailable(f"The cluster '{self._config.name}' did not answer a moment ago.")
        try:
            response = self._send(request, retries=_RETRY)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            self._down_until = time.monotonic() + _DOWN_SECONDS
            raise self._unavailable(error) from error
        if response.status < 300:
            self._down_until = 0.0
            return response
        refusal = _api_error(response)
        if refusal.status == 429 or refusal.status >= 500:
            raise self._unavailable(refusal) from refusal
        raise refusal

    def _send(self, request: _Request, *, retries: urllib3.Retry) -> urllib3.BaseHTTPResponse:
        """Send one request. Raises urllib3's HTTPError, OSError, BackendUnavailable (for broken settings)."""
        client = self._connection()
        url = client.configuration.host.rstrip("/") + request.path
        if request.query:
            url += "?" + urllib.parse.urlencode(request.query)
        # */* is for responses that are not objects, such as logs.
        headers = {
            "Accept": "application/json, */*",
            "User-Agent": FIELD_MANAGER,
            **self._credentials(client.configuration),
        }
        if request.body is not None:
            headers["Content-Type"] = request.content_type
        read_seconds = request.read_seconds or self._config.request_seconds
        response: urllib3.BaseHTTPResponse = client.rest_client.pool_manager.request(
            request.method,
            url,
            body=None if request.body is None else json.dumps(request.body).encode(),
            headers=headers,
            preload_content=not request.stream,
            timeout=urllib3.Timeout(connect=min(_CONNECT_SECONDS, read_seconds), read=read_seconds),
            retries=retries,
            redirect=False,  # the credentials are for the API server only
        )
        return response

    def _connection(self) -> Any:
        """Return the kubernetes package's client, which reads credentials and holds the connection pool.

        A forked process creates its own, since it must not share its parent's connections.
        """
        if self._client is None or self._client_pid != os.getpid():
            configuration = kubernetes.client.Configuration()
            try:
                if self._config.in_cluster:
                    kubernetes.config.load_incluster_config(client_configuration=configuration)
                else:
                    kubernetes.config.load_kube_config(
                        config_file=self._config.kubeconfig or None,
                        context=self._config.context or None,
                        client_configuration=configuration,
                    )
            except _BROKEN_CONFIGURATION as error:
                raise self._misconfigured(error) from error
            self._client = kubernetes.client.ApiClient(configuration)
            self._client_pid = os.getpid()
        return self._client

    def _credentials(self, configuration: Any) -> dict[str, str]:
        """Return the credential headers of a kubernetes.client.Configuration, which renews expired credentials.

        Raises BackendUnavailable.
        """
        try:
            settings = configuration.auth_settings().values()
        except _BROKEN_CONFIGURATION as error:
            raise self._misconfigured(error) from error
        return {entry["key"]: entry["value"] for entry in settings if entry["in"] == "header" and entry["value"]}

    def _misconfigured(self, error: Exception) -> BackendUnavailable:
        """Return the error for credentials that cannot be read."""
        return BackendUnavailable(
            f"The cluster '{self._config.name}' cannot be reached: {error}. Check its 'kubeconfig', 'context' or "
            "'in_cluster'."
        )

    def _unavailable(self, error: Exception) -> BackendUnavailable:
        """Return the error for a request without an answer. `error` says why there is none."""
        # 300 characters are enough: urllib3 nests its errors, and people read the message on one or two lines.
        reason = f"{type(error).__name__}: {getattr(error, 'reason', None) or error}"[:300]
        return BackendUnavailable(f"The cluster '{self._config.name}' did not answer: {reason}.")


def _api_error(response: urllib3.BaseHTTPResponse) -> ApiError:
    """Read the server's Status object. A proxy's error page has none, so only the HTTP status remains."""
    try:
        status = json.loads(response.data or response.read())
    except (ValueError, urllib3.exceptions.HTTPError):
        status = {}
    finally:
        response.release_conn()
    if not isinstance(status, dict):
        status = {}
    return ApiError(response.status, str(status.get("reason") or response.reason), str(status.get("message") or ""))


def _watch_events(response: urllib3.BaseHTTPResponse) -> Iterator[Object]:
    """Yield the events of a watch, one JSON object per line, until the stream ends. Raises ResourceVersionExpired."""
    buffer = b""
    for chunk in response.stream(_CHUNK_BYTES):
        *lines, buffer = (buffer + chunk).split(b"\n")
        for line in filter(None, lines):
            try:
                event = json.loads(line)
            except ValueError:  # the stream is damaged; the caller watches again from the last version
                return
            if event.get("type") == "ERROR":
                if event.get("object", {}).get("code") == 410:
                    raise ResourceVersionExpired
                return
            yield event
