"""Ask a registry for the digest of an image, or whether it accepts credentials, by the OCI distribution API.

Customers choose the host, so this client does not trust it. It connects only to public addresses, unless
REGISTRY_PRIVATE_ADDRESSES allows others, and only to the address that it has checked. It sends the credentials only to
the host that the customer named, and to the token service that this host names. Each check has a time limit, and reads
a limited number of bytes.
"""

from __future__ import annotations

import base64
import contextlib
import enum
import hashlib
import http.client
import ipaddress
import json
import re
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import quote, urlencode, urljoin, urlsplit

from django.conf import settings

from console.core import connections
from runtime.packages.proxy import effective_ip, is_public

TOTAL_SECONDS = 12.0
"""How long one check may take with all its requests, besides resolving host names, which the system's resolver limits.
The customer's form waits for the check, so the limit must be short, although slow registries need some seconds."""
CONNECT_SECONDS = 5.0
"""How long a connection to one address, its TLS handshake, and each read may wait. So an address that does not respond
leaves time for the host's next address."""
MAX_MANIFEST_BYTES = 4 * 1024**2
"""The largest manifest. The OCI distribution specification asks registries to accept at least this size."""
MAX_TOKEN_BYTES = 64 * 1024
"""The largest response of a token service, or of a registry to a check of the login. Tokens have a few KiB; registries
send less."""
MAX_REDIRECTS = 3
"""How many redirects are followed. Registries send manifests themselves, or redirect once to a storage service."""
HTTPS_PORT = 443
FIRST_UNPRIVILEGED_PORT = 1024
"""Lower ports, except HTTPS_PORT, are refused, so that customers cannot reach other services, such as SSH or SMTP."""
MEDIA_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
"""The media types of manifests that this client accepts. A registry responds with 404 for any other type."""
DOCKER_HUB_HOSTS = frozenset({"docker.io", "index.docker.io", "registry-1.docker.io"})
DOCKER_HUB = "registry-1.docker.io"
"""The host that serves Docker Hub's API. References use all names in DOCKER_HUB_HOSTS for it."""
_MAX_CHALLENGE_LENGTH = 2000
"""How many characters of a WWW-Authenticate header are parsed, since the host may send anything. Real headers have a
few hundred."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")
_CHALLENGE = re.compile(r'([a-z_]+)="([^"]*)"', re.IGNORECASE)
"""A parameter in a header WWW-Authenticate, such as `realm="https://auth.docker.io/token"`."""


class Problem(enum.StrEnum):
    """Why a check failed."""

    UNREACHABLE = "unreachable"
    FORBIDDEN_ADDRESS = "forbidden_address"
    """The host's address is not public, or its port is not allowed."""
    UNAUTHORIZED = "unauthorized"
    NO_IMAGE = "no_image"
    INVALID_ANSWER = "invalid_answer"
    """The host's response does not follow the distribution API."""


class RegistryError(Exception):
    """A check of an image or of credentials failed, for the reason `problem`."""

    def __init__(self, problem: Problem, detail: str = "") -> None:
        super().__init__(f"{problem}: {detail}")
        self.problem = problem


class Reference(NamedTuple):
    """The parts of an image reference `host/repository:tag` or `host/repository@digest`; missing ones are empty."""

    host: str
    repository: str
    tag: str
    digest: str


@dataclass(frozen=True)
class Credentials:
    """The user name and password at one registry."""

    username: str
    password: str

    @property
    def header(self) -> str:
        """Return the value of the header Authorization."""
        return "Basic " + base64.b64encode(f"{self.username}:{self.password}".encode()).decode()


class _Response(NamedTuple):
    """A response. `body` is empty if it was not read."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes


def parse_reference(reference: str) -> Reference:
    """Return the parts of a reference that matches `images.REFERENCE`. Without tag and digest, the tag is `latest`."""
    name, _, digest = reference.partition("@")
    host, _, path = name.partition("/")
    repository, _, tag = path.partition(":")
    return Reference(host, repository, tag or ("" if digest else "latest"), digest)


def digest_of(reference: str, credentials: Credentials | None = None, *, seconds: float = TOTAL_SECONDS) -> str:
    """Return the digest of an image's manifest or index, as `sha256:<hex>`. Raises RegistryError."""
    parts = parse_reference(reference)
    host, repository = parts.host, parts.repository
    if host in DOCKER_HUB_HOSTS:
        host = DOCKER_HUB
        # A name without a slash, such as `python`, names one of Docker's official images.
        repository = repository if "/" in repository else f"library/{repository}"
    client = _Client(credentials, seconds)
    url = f"{_origin(host)}/v2/{quote(repository)}/manifests/{quote(parts.digest or parts.tag, safe=':')}"
    response = client.request("HEAD", url)
    if response.status in {401, 403}:
        client.authorize(response, repository)
        response = client.request("HEAD", url)
    digest = response.headers.get("Docker-Content-Digest", "")
    if response.status == 200 and not _DIGEST.match(digest):  # some registries do not send this header
        response = client.request("GET", url, limit_bytes=MAX_MANIFEST_BYTES)
        digest = "sha256:" + hashlib.sha256(response.body).hexdigest()
    if response.status in {401, 403}:
        raise RegistryError(Problem.UNAUTHORIZED)
    if response.status == 404:
        raise RegistryError(Problem.NO_IMAGE)
    if response.status != 200:
        raise RegistryError(Problem.INVALID_ANSWER, f"status {response.status}")
    if parts.digest and digest != parts.digest:
        raise RegistryError(Problem.INVALID_ANSWER, "another digest")
    return digest


def check_login(host: str, credentials: Credentials) -> None:
    """Check that a registry accepts these credentials. Raises RegistryError."""
    client = _Client(credentials, TOTAL_SECONDS)
    url = f"{_origin(DOCKER_HUB if host in DOCKER_HUB_HOSTS else host)}/v2/"
    response = client.request("GET", url, limit_bytes=MAX_TOKEN_BYTES)
    if response.status in {401, 403}:
        client.authorize(response, repository="")
        response = client.request("GET", url, limit_bytes=MAX_TOKEN_BYTES)
    if response.status in {401, 403}:
        raise RegistryError(Problem.UNAUTHORIZED)
    if response.status != 200:
        raise RegistryError(Problem.INVALID_ANSWER, f"status {response.status}")


class _Client:
    """The requests of one check at one registry."""

    def __init__(self, credentials: Credentials | None, seconds: float) -> None:
        self._credentials = credentials
        self._authorization = ""
        self._deadline = time.monotonic() + seconds

    def request(self, method: str, url: str, *, limit_bytes: int = 0) -> _Response:
        """Send a request, follow up to MAX_REDIRECTS redirects, and return the last response. Raises RegistryError.

        Only the origin of `url` gets the authorization. With `limit_bytes` 0 the body is not read.
        """
        origin = urlsplit(url)[:2]
        for _redirect in range(MAX_REDIRECTS + 1):
            headers = {"Accept": ", ".join(MEDIA_TYPES)}
            if self._authorization and urlsplit(url)[:2] == origin:
                headers["Authorization"] = self._authorization
            response = self._send(method, url, headers, limit_bytes)
            location = response.headers.get("Location", "")
            if response.status not in {301, 302, 303, 307, 308} or not location:
                return response
            try:
                url = urljoin(url, location)
            except ValueError:
                raise RegistryError(Problem.INVALID_ANSWER, "an invalid redirect") from None
        raise RegistryError(Problem.INVALID_ANSWER, "too many redirects")

    def authorize(self, refusal: _Response, repository: str) -> None:
        """Authorize the following requests as the response `refusal` asks: by the password (Basic) or a token (Bearer).

        The token is for pulling from `repository`; if that is empty, only for the login. Raises RegistryError.
        """
        for challenge in refusal.headers.get_all("WWW-Authenticate", []):
            scheme, _, parameters = challenge.partition(" ")
            if scheme.lower() == "basic" and self._credentials is not None:
                self._authorization = self._credentials.header
                return
            if scheme.lower() == "bearer":
                self._authorization = f"Bearer {self._fetch_token(_parse_parameters(parameters), repository)}"
                return
        raise RegistryError(Problem.UNAUTHORIZED)

    def _fetch_token(self, challenge: Mapping[str, str], repository: str) -> str:
        """Return a token from the token service that the registry's challenge names (`realm`). Raises RegistryError."""
        scope = challenge.get("scope") or (f"repository:{repository}:pull" if repository else "")
        query = {name: value for name, value in (("scope", scope), ("service", challenge.get("service"))) if value}
        realm = challenge.get("realm", "")
        url = f"{realm}{'&' if '?' in realm else '?'}{urlencode(query)}"
        headers = {"Authorization": self._credentials.header} if self._credentials is not None else {}
        # No redirects are followed, so that the password goes only to this service.
        response = self._send("GET", url, headers, MAX_TOKEN_BYTES)
        # RFC 6749 (OAuth 2.0, section 5.2) lets a token service refuse credentials with 400.
        if response.status in {400, 401, 403}:
            raise RegistryError(Problem.UNAUTHORIZED)
        try:
            data = json.loads(response.body)
            token = data.get("token") or data.get("access_token")
        except (ValueError, AttributeError, RecursionError):
            token = None
        # A header can contain only printable ASCII, and a token no spaces.
        if response.status != 200 or not isinstance(token, str) or not re.fullmatch(r"[\x21-\x7e]+", token):
            raise RegistryError(Problem.INVALID_ANSWER, "no token")
        return token

    def _send(self, method: str, url: str, headers: Mapping[str, str], limit_bytes: int) -> _Response:
        """Send one request and return its response; redirects are not followed.

        Reads no body if `limit_bytes` is 0. Raises RegistryError, also for a longer body.
        """
        try:
            connection = _connect(url, self._deadline)
            # A socket's timeout begins again with each byte, so it does not limit the whole request.
            with (
                contextlib.closing(connection),
                connections.time_limit(connection, _remaining_seconds(self._deadline)),
            ):
                parts = urlsplit(url)
                target = parts._replace(scheme="", netloc="", fragment="").geturl() or "/"
                connection.request(method, target, headers={**headers, "User-Agent": "trainyard"})
                response = connection.getresponse()
                body = response.read(limit_bytes + 1) if limit_bytes else b""
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError for a malformed URL or header
            raise RegistryError(Problem.UNREACHABLE, type(error).__name__) from error
        if len(body) > limit_bytes:
            raise RegistryError(Problem.INVALID_ANSWER, "too long")
        return _Response(response.status, response.headers, body)


def _parse_parameters(parameters: str) -> dict[str, str]:
    """Return the parameters of a header WWW-Authenticate by lower-case name."""
    return {name.lower(): value for name, value in _CHALLENGE.findall(parameters[:_MAX_CHALLENGE_LENGTH])}


def _origin(host: str) -> str:
    """Return the origin of a registry.

    If private addresses are allowed, a registry on the console's machine is reached by plain HTTP, as by container
    runtimes.
    """
    name = urlsplit(f"//{host}").hostname or ""
    return f"{'http' if settings.REGISTRY_PRIVATE_ADDRESSES and _is_loopback(name) else 'https'}://{host}"


def _is_loopback(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _remaining_seconds(deadline: float) -> float:
    """Return the seconds until a deadline (`time.monotonic`). Raises RegistryError after it."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise RegistryError(Problem.UNREACHABLE, "too slow")
    return seconds


def _connect(url: str, deadline: float) -> http.client.HTTPConnection:
    """Return an open connection to a URL's host, at an allowed address. Raises OSError, ValueError, RegistryError."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (HTTPS_PORT if parts.scheme == "https" else 80)
    is_unencrypted = parts.scheme == "http" and settings.REGISTRY_PRIVATE_ADDRESSES and _is_loopback(host)
    if not host or (parts.scheme != "https" and not is_unencrypted):
        raise RegistryError(Problem.FORBIDDEN_ADDRESS, "no https")
    if port != HTTPS_PORT and port < FIRST_UNPRIVILEGED_PORT:
        raise RegistryError(Problem.FORBIDDEN_ADDRESS, f"port {port}")
    _remaining_seconds(deadline)  # no name is resolved after the deadline
    addresses = [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    # Unlike in `connections.connection_to`, all addresses must be allowed: no real registry has both public and private
    # ones.
    if not addresses or not all(is_allowed(address) for address in addresses):
        raise RegistryError(Problem.FORBIDDEN_ADDRESS, host)
    connection = http.client.HTTPConnection(host, port)  # not HTTPSConnection: the socket set below already does TLS
    tcp = _connect_to_one(addresses, port, deadline)
    try:
        tcp.settimeout(min(CONNECT_SECONDS, _remaining_seconds(deadline)))
        context = ssl.create_default_context()
        connection.sock = tcp if is_unencrypted else context.wrap_socket(tcp, server_hostname=host)
    except BaseException:
        tcp.close()
        raise
    return connection


def _connect_to_one(addresses: Sequence[str], port: int, deadline: float) -> socket.socket:
    """Return a connection to the first address that accepts one. Raises OSError, RegistryError.

    The addresses are those that were checked, and not the name, for which a DNS server may return others the second
    time (DNS rebinding).
    """
    for address in addresses[:-1]:
        # For example, the machine may have no working route to the host's IPv6 address.
        with contextlib.suppress(OSError):
            return socket.create_connection((address, port), min(CONNECT_SECONDS, _remaining_seconds(deadline)))
    return socket.create_connection((addresses[-1], port), min(CONNECT_SECONDS, _remaining_seconds(deadline)))


def is_allowed(address: str) -> bool:
    """Return whether this client may connect to an IP address."""
    ip = effective_ip(address)
    # Clouds serve machines' credentials at link-local addresses (169.254.169.254), so no setting allows these.
    if ip.is_link_local or ip.is_multicast or ip.is_unspecified:
        return False
    return is_public(address) or settings.REGISTRY_PRIVATE_ADDRESSES
