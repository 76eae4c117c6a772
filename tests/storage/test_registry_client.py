"""The client of registries: what it accepts, where it connects, and to whom it sends a password."""

import base64
import contextlib
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from storage import registry_client
from storage.registry_client import Credentials, Problem, RegistryError, check_login, digest_of, is_allowed
from tests.console.processes import free_port
from tests.http_server import serving
from tests.registry import PASSWORD, USER

ME = Credentials(USER, PASSWORD)
DIGEST = "sha256:" + "a" * 64


@pytest.fixture(autouse=True)
def _loopback(settings):
    """Let the client connect to the servers of these tests, on 127.0.0.1."""
    settings.REGISTRY_PRIVATE_ADDRESSES = True


class Fake:
    """A web server. `asked` has path and authorization of each request.

    `answers` has status, headers and body by path, or a function that returns them for the headers of a request.
    """

    def __init__(self):
        fake, self.asked, self.answers = self, [], {}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                fake.asked.append((self.path, self.headers.get("Authorization", "")))
                answer = fake.answers[self.path.partition("?")[0]]
                status, headers, body = answer(self.headers) if callable(answer) else answer
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET  # noqa: N815 - the name that the base class calls

            def log_message(self, *_words):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.server.server_port}"


@pytest.fixture
def fake():
    """`fake()` starts another Fake, which ends with the test."""
    with contextlib.ExitStack() as stack:

        def make():
            made = Fake()
            stack.enter_context(serving(made.server))
            return made

        yield make


def problem(call):
    with pytest.raises(RegistryError) as caught:
        call()
    return caught.value.problem


def test_a_token_is_fetched_as_docker_hub_wants_it(fake):
    registry, tokens = fake(), fake()
    challenge = f'Bearer realm="http://{tokens.host}/token",service="the registry",scope="repository:team/train:pull"'

    def manifest(headers):
        if headers.get("Authorization") == "Bearer t0ken":
            return 200, {"Docker-Content-Digest": DIGEST}, b""
        return 401, {"WWW-Authenticate": challenge}, b""

    registry.answers["/v2/team/train/manifests/1.2"] = manifest
    tokens.answers["/token"] = (200, {}, json.dumps({"token": "t0ken"}).encode())
    assert digest_of(f"{registry.host}/team/train:1.2", ME) == DIGEST
    assert [authorization for _path, authorization in registry.asked] == ["", "Bearer t0ken"]
    assert tokens.asked == [("/token?scope=repository%3Ateam%2Ftrain%3Apull&service=the+registry", ME.header)]
    tokens.answers["/token"] = (401, {}, b"")
    assert problem(lambda: digest_of(f"{registry.host}/team/train:1.2", ME)) is Problem.UNAUTHORIZED


def test_a_redirect_to_another_host_gets_no_password(fake):
    registry, elsewhere = fake(), fake()

    def manifest(headers):
        if headers.get("Authorization") == ME.header:
            return 307, {"Location": f"http://{elsewhere.host}/blob"}, b""
        return 401, {"WWW-Authenticate": 'Basic realm="x"'}, b""

    registry.answers["/v2/train/manifests/latest"] = manifest
    elsewhere.answers["/blob"] = (200, {"Docker-Content-Digest": DIGEST}, b"")
    assert digest_of(f"{registry.host}/train", ME) == DIGEST
    assert elsewhere.asked == [("/blob", "")]
    registry.answers["/v2/train/manifests/latest"] = (307, {"Location": "/v2/train/manifests/latest"}, b"")
    assert problem(lambda: digest_of(f"{registry.host}/train")) is Problem.INVALID_ANSWER


def test_a_token_service_elsewhere_than_at_https_gets_nothing(fake):
    registry = fake()
    for address in ("http://169.254.169.254/token", "http://192.0.2.7:5000/token", "file:///etc/passwd", "gopher://x"):
        registry.answers["/v2/train/manifests/1"] = (401, {"WWW-Authenticate": f'Bearer realm="{address}"'}, b"")
        assert problem(lambda: digest_of(f"{registry.host}/train:1", ME)) is Problem.FORBIDDEN_ADDRESS, address


def test_a_name_is_asked_only_if_all_its_addresses_are_public(settings, fake, monkeypatch):
    registry = fake()
    registry.answers["/v2/train/manifests/1"] = (200, {"Docker-Content-Digest": DIGEST}, b"")
    settings.REGISTRY_PRIVATE_ADDRESSES = False
    assert (is_allowed("1.1.1.1"), is_allowed("10.0.0.1")) == (True, False)
    for host in (registry.host, f"localhost:{registry.server.server_port}"):
        assert problem(lambda host=host: digest_of(f"{host}/train:1")) is Problem.FORBIDDEN_ADDRESS
    assert registry.asked == []
    found = [(0, 0, 0, "", (address, 443)) for address in ("1.1.1.1", "10.0.0.1")]
    with monkeypatch.context() as patch:
        patch.setattr(registry_client.socket, "getaddrinfo", lambda *_arguments, **_options: found)
        assert problem(lambda: digest_of("registry.example.com/train:1")) is Problem.FORBIDDEN_ADDRESS, "one is private"
    settings.REGISTRY_PRIVATE_ADDRESSES = True
    assert is_allowed("10.0.0.1")
    # The second and third are the first, the metadata service of a cloud, as IPv6 addresses.
    never = ("169.254.169.254", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "fe80::1", "224.0.0.1", "0.0.0.0")
    assert [address for address in never if is_allowed(address)] == []
    # A port below 1024 may belong to another service, such as SSH.
    assert problem(lambda: digest_of("127.0.0.1:22/train:1")) is Problem.FORBIDDEN_ADDRESS


def test_the_next_address_of_a_name_is_tried_if_one_refuses_the_connection(fake, monkeypatch):
    registry = fake()
    registry.answers["/v2/train/manifests/1"] = (200, {"Docker-Content-Digest": DIGEST}, b"")
    resolve = socket.getaddrinfo

    def resolve_to_two(host, *arguments, **options):
        hosts = ("127.0.0.2", "127.0.0.1") if host == "localhost" else (host,)
        return [entry for each in hosts for entry in resolve(each, *arguments, **options)]

    monkeypatch.setattr(registry_client.socket, "getaddrinfo", resolve_to_two)
    assert digest_of(f"localhost:{registry.server.server_port}/train:1") == DIGEST
    assert problem(lambda: digest_of(f"localhost:{free_port()}/train:1")) is Problem.UNREACHABLE


def test_a_slow_answer_ends_at_the_time_limit():
    """A byte now and then would keep a socket's timeout from ever expiring."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ended = threading.Event()

        def drip():
            connection, _address = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\n")
                while not ended.wait(0.02):
                    connection.sendall(b"X")

        thread = threading.Thread(target=drip)
        thread.start()
        reference = f"127.0.0.1:{server.getsockname()[1]}/train:1"
        assert problem(lambda: digest_of(reference, seconds=0.3)) is Problem.UNREACHABLE
        ended.set()
        thread.join()


def test_the_time_to_connect_counts_against_the_time_limit(fake, monkeypatch):
    registry = fake()
    registry.answers["/v2/train/manifests/1"] = (200, {"Docker-Content-Digest": DIGEST}, b"")
    now = [100.0]
    limits = []
    connect = socket.create_connection

    def connect_slowly(*arguments, **options):
        now[0] += 4
        return connect(*arguments, **options)

    def record_limit(_connection, seconds):
        limits.append(seconds)
        return contextlib.nullcontext()

    monkeypatch.setattr(registry_client, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(registry_client.socket, "create_connection", connect_slowly)
    monkeypatch.setattr(registry_client.connections, "time_limit", record_limit)
    assert digest_of(f"{registry.host}/train:1", seconds=10) == DIGEST
    assert limits == [6]  # of ten seconds, four were needed to connect
    assert problem(lambda: digest_of(f"{registry.host}/train:1", seconds=3)) is Problem.UNREACHABLE


def test_an_odd_answer_is_a_problem_with_a_name(fake):
    registry = fake()
    for answer, expected in (
        ((404, {}, b""), Problem.NO_IMAGE),
        ((500, {}, b""), Problem.INVALID_ANSWER),
        ((200, {}, b"x" * (registry_client.MAX_MANIFEST_BYTES + 1)), Problem.INVALID_ANSWER),
        # It names no address of a token service.
        ((401, {"WWW-Authenticate": "Bearer " + "a" * 60_000}, b""), Problem.FORBIDDEN_ADDRESS),
        ((401, {}, b""), Problem.UNAUTHORIZED),
        ((302, {"Location": "http://[::bad"}, b""), Problem.INVALID_ANSWER),
    ):
        registry.answers["/v2/train/manifests/1"] = answer
        assert problem(lambda: digest_of(f"{registry.host}/train:1")) is expected


# --- A real registry --------------------------------------------------------------------------------------------------


def test_digests_and_logins_of_a_real_registry_are_checked(registry):
    host = registry.host
    digest = registry.push("team/train", "1", [])
    assert digest_of(f"{host}/team/train:1", ME) == digest
    assert digest_of(f"{host}/team/train@{digest}", ME) == digest
    assert problem(lambda: digest_of(f"{host}/team/train:2", ME)) is Problem.NO_IMAGE
    assert problem(lambda: digest_of(f"{host}/team/train:1")) is Problem.UNAUTHORIZED
    wrong = Credentials("me", "wrong")
    assert problem(lambda: digest_of(f"{host}/team/train:1", wrong)) is Problem.UNAUTHORIZED
    check_login(host, ME)
    assert problem(lambda: check_login(host, wrong)) is Problem.UNAUTHORIZED


@pytest.mark.django_db
def test_an_image_and_its_password_are_checked_when_they_are_saved(api, owner, registry, settings):
    settings.REGISTRY_CHECKS = True
    host = registry.host
    registry.push("team/train", "1", [])
    client = api(owner)
    image = {"name": "own", "title": "Own", "reference": f"{host}/team/train:1", "frameworks": ["pytorch"]}

    def answer(method, path, **body):
        response = getattr(client, method)(f"/api/v1/{path}", body, format="json")
        assert "hunter2" not in response.content.decode()
        return response.status_code, sorted(response.data.get("fields", ()))

    assert answer("post", "images/", **image) == (400, ["reference"])
    assert answer("put", f"registries/{host}/", username="me", password="wrong") == (400, ["password"])
    assert answer("put", f"registries/{host}/", username="me", password="hunter2") == (200, [])
    assert answer("put", f"registries/{host}/", username="me") == (200, []), "the password stays"
    assert answer("post", "images/", **image | {"reference": f"{host}/team/train:2"}) == (400, ["reference"])
    assert answer("post", "images/", **image) == (201, [])
    gone = image | {"name": "gone", "reference": f"127.0.0.1:{free_port()}/train:1"}
    response = client.post("/api/v1/images/", gone, format="json")
    assert response.status_code == 201, "the cluster may reach what the console does not"
    assert "could not reach" in response.data["warning"]
    listed = client.get("/api/v1/registries/").data["results"]
    assert [set(row) for row in listed] == [{"host", "username", "created_at"}]
    assert base64.b64encode(b"me:hunter2").decode() not in str(listed)
