"""The real web server, with real sockets: streams, uploads, and clients that are slow or hold too much.

The server is tried alone, and behind Debian's nginx with the settings of the ingress in `deploy/`.
"""

import asyncio
import json
import os
import re
import selectors
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from django.db import connection
from django.http import StreamingHttpResponse

from console.serving import streams
from console.serving.exchange import IncomingBody
from console.serving.refusals import Refused
from tests.console.processes import free_port, wait_for

ROOT = Path(__file__).resolve().parents[2]
MIB = 1024 * 1024
STREAM = "GET {} HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/event-stream\r\n\r\n"
FILES = "/api/v1/workspaces/code/files"
# The beginnings of requests: their clients send the rest slowly, or never.
UPLOAD = f"PUT {FILES}/slow HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000000\r\n\r\n"
GET = "GET /page HTTP/1.1\r\nX-Slow: "
FORM = "POST /form HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n"


class Listener:
    """A web server on `self.port`."""

    port: int
    http = httpx.Client(headers={"Connection": "close"})  # shared, since each `httpx.get` would read certificates

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def is_ready(self):
        try:
            return self.http.get(f"{self.url}/page").status_code == 200
        except httpx.TransportError:
            return False

    def connect(self, sent="", *, address="127.0.0.1"):
        client = socket.create_connection(("127.0.0.1", self.port), timeout=30, source_address=(address, 0))
        client.sendall(sent.encode())
        return client


class Server(Listener):
    """A web process of the console, on a free port."""

    def __init__(self, **environment):
        for _attempt in range(5):  # another process may take the port before the server binds it
            self._start(environment)
            wait_for(lambda: self.process.poll() is not None or self.is_ready(), 90)
            if self.process.poll() is None:
                return
        pytest.fail("The server ended instead of starting.")

    def _start(self, environment):
        self.port = free_port()
        bind = {"DJANGO_SETTINGS_MODULE": "tests.console.serving_settings", "WEB_BIND": f"127.0.0.1:{self.port}"}
        command = [sys.executable, "-m", "console.serving.server"]
        self.process = subprocess.Popen(command, cwd=ROOT, env=os.environ | bind | environment)

    def census(self):
        """Return the number of open streams, and the names of all threads of the server."""
        return self.http.get(f"{self.url}/census").json()

    def stop(self):
        """Stop the server, and wait until an open stream has ended with it."""
        with self.connect(STREAM.format("/stream")) as client:
            read_until(client, b"event: hello")
            self.process.terminate()
            while client.recv(65536):
                pass
        self.process.wait(30)


NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
INGRESS = ROOT / "deploy/kubernetes/overlays/production/console/ingress.yaml"
NGINX_CONFIGURATION = """
daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://127.0.0.1:{server_port};
      proxy_http_version 1.1; proxy_set_header Host $http_host; proxy_set_header X-Forwarded-For $remote_addr;
      {of_the_ingress}
    }}
  }}
}}
"""


class Nginx(Listener):
    """nginx in front of a server, with the directives that ingress-nginx makes of our annotations."""

    def __init__(self, server, folder):
        annotations = yaml.safe_load(INGRESS.read_text())["metadata"]["annotations"]
        values = {name.rpartition("/")[2].replace("-", "_"): value for name, value in annotations.items()}
        del values["ssl_redirect"]  # this nginx has no TLS
        values["client_max_body_size"] = values.pop("proxy_body_size")
        self.port = free_port()
        configuration = NGINX_CONFIGURATION.format(
            folder=folder,
            port=self.port,
            server_port=server.port,
            of_the_ingress="".join(f"{name} {value}; " for name, value in values.items()),
        )
        (folder / "nginx.conf").write_text(configuration)
        self.process = subprocess.Popen([NGINX, "-c", folder / "nginx.conf"])
        wait_for(self.is_ready)

    def stop(self):
        self.process.terminate()
        self.process.wait(30)


@pytest.fixture
def behind_nginx(tmp_path):
    """A function that starts nginx in front of a server, and returns it."""
    if NGINX is None:
        pytest.skip("needs nginx")
    with ExitStack() as started:

        def start(server):
            nginx = Nginx(server, tmp_path)
            started.callback(nginx.stop)
            return nginx

        yield start


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server that cannot reach its database until the database's socket is linked into `database_folder`."""
    folder = tmp_path_factory.mktemp("database")
    created = Server(TEST_DATABASE_FOLDER=str(folder))
    created.database_folder = folder
    yield created
    created.stop()


@pytest.fixture(scope="module")
def patient_server():
    """A server with a long deadline for slow clients, and few connections for one address."""
    created = Server(TEST_DEADLINE_SECONDS="60", TEST_CONNECTIONS="120", TRUSTED_PROXIES="127.0.0.1")
    yield created
    created.stop()


def read_until(client, mark):
    received = b""
    while mark not in received:
        part = client.recv(65536)
        assert part, f"the connection ended after {received!r}"
        received += part
    return received.decode()


def refusal(client):
    """Return the status and the code of a refusal. It must say when to retry, and the connection must end."""
    received = b""
    while part := client.recv(65536):
        received += part
    head, _, body = received.decode().partition("\r\n\r\n")
    assert re.search(r"(?im)^retry-after: [1-9]", head)
    return int(head.split()[1]), json.loads(body)["code"]


def is_served(server, address):
    with server.connect("GET /page HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", address=address) as client:
        return client.recv(12) == b"HTTP/1.1 200"


# Streams


def test_a_stream_has_its_format_and_comments_while_it_is_quiet_and_an_error_is_an_ordinary_response(server):
    with server.connect(STREAM.format("/stream?rank=1")) as client:
        head, _, body = read_until(client, b": still here\n\n").partition("\r\n\r\n")
    for part in (
        "http/1.1 200", "text/event-stream", "cache-control: no-cache", "x-accel-buffering: no", "x-request-id: ",
    ):  # fmt: skip
        assert part in head.lower()
    assert "event: hello\nid: 1\n" in body
    data = json.loads(body.split("data: ")[1].split("\n")[0])
    assert data == {"pid": server.process.pid, "path": "/stream?rank=1"}
    assert "event: tick\ndata: stream-" in body
    answer = server.http.get(f"{server.url}/error", headers={"Accept": "text/event-stream"})
    assert (answer.status_code, answer.json()) == (404, {"code": "nothing"})


def test_two_hundred_streams_hold_no_thread(server):
    before = len(server.census()["threads"])
    with ExitStack() as clients:
        streams = [clients.enter_context(server.connect(STREAM.format("/stream"))) for _ in range(200)]
        for stream in streams:
            read_until(stream, b"event: tick")
        census = server.census()
    assert census["open"] == 200
    assert len(census["threads"]) <= before + 8  # four that all streams share, and four of the views
    wait_for(lambda: server.census()["open"] == 0)


def test_streams_of_an_organization_are_limited(server):
    def stream(organization):
        return server.connect(STREAM.format(f"/stream?organization={organization}"))

    with ExitStack() as clients:
        for organization in (1, 1, 1, 2):  # each may have three: see `serving_settings`
            read_until(clients.enter_context(stream(organization)), b"event: hello")
        with stream(1) as one_more:
            text = read_until(one_more, b"}")
        assert "429" in text.splitlines()[0]
        assert "too_many_streams" in text
        assert re.search(r"(?im)^retry-after: [1-9]", text)
    wait_for(lambda: server.census()["open"] == 0)
    with stream(1) as client:
        read_until(client, b"event: hello")


def test_a_download_is_complete_and_ends_with_its_client(server):
    assert server.http.get(f"{server.url}/download").content == b"x" * 4 * MIB
    with server.connect("GET /download HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n") as client:
        client.recv(1000)
    wait_for(lambda: not any(name.startswith("download") for name in server.census()["threads"]))


def test_an_organization_has_half_of_the_downloads(monkeypatch):
    monkeypatch.setattr(streams, "MAX_DOWNLOADS", 2)

    async def download_twice(open_streams, first, second):
        """Let two organizations download, the first to a client that reads nothing. Count the second one's messages."""
        is_sending, forever = asyncio.Event(), asyncio.Event()

        async def send(_message):
            is_sending.set()
            await forever.wait()

        async def send_at_once(message):
            sent.append(message)

        def response():
            return StreamingHttpResponse([b"x"])

        sent = []
        slow = asyncio.create_task(open_streams.send(response(), {}, first, forever.wait, send))
        await is_sending.wait()
        try:
            await open_streams.send(response(), {}, second, forever.wait, send_at_once)
        finally:
            slow.cancel()
        return len(sent)

    assert asyncio.run(download_twice(streams.Streams(), 1, 2)) == 3  # the start, the chunk and the end
    with pytest.raises(Refused):
        asyncio.run(download_twice(streams.Streams(), 1, 1))


# Uploads


def test_an_upload_is_read_as_it_arrives(server):
    peak = server.http.put(f"{server.url}{FILES}/a", content=b"small").json()["peak_kib"]
    for headers in ({"Content-Length": str(60 * MIB)}, {}):  # without a length, the client sends chunks
        pieces = (b"x" * MIB for _ in range(60))
        answer = server.http.put(f"{server.url}{FILES}/a", content=pieces, headers=headers, timeout=60).json()
        assert answer["size"] == 60 * MIB
        assert answer["peak_kib"] < peak + 20 * 1024  # far less than the upload, which is not held in memory


def test_a_refused_upload_is_answered_before_it_is_sent(server):
    with server.connect(UPLOAD.replace("/slow", "/refused")) as client:
        assert "401" in read_until(client, b"not_authenticated").splitlines()[0]


def test_an_organization_has_half_of_the_uploads_from_all_its_addresses(patient_server):
    def put(organization):
        return patient_server.http.put(
            f"{patient_server.url}{FILES}/a?organization={organization}", content=b"small"
        ).status_code

    with ExitStack() as clients:
        for number in range(2):  # of four upload threads
            upload = UPLOAD.replace("/slow", "/slow?organization=1")
            clients.enter_context(patient_server.connect(upload, address=f"127.0.0.{number + 2}"))
        wait_for(lambda: put(1) == 429)
        assert put(2) == 200
    wait_for(lambda: put(1) == 200)


def test_an_interrupted_upload_is_an_error_in_its_view_and_a_silent_connection_is_closed(server):
    with server.connect(UPLOAD) as client:
        client.sendall(b"some of it")
    assert server.http.get(f"{server.url}/broken", timeout=30).json() == {"broken": True}
    with server.connect() as client:
        assert client.recv(1) == b""


def test_an_upload_can_be_read_again_after_a_time_out():
    async def read_twice():
        messages = asyncio.Queue()
        body = IncomingBody(messages.get, lambda: None)
        body.read_timeout_seconds = 0.01
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(body.read, 10)
        messages.put_nowait({"type": "http.request", "body": b"late", "more_body": False})
        return await asyncio.to_thread(body.read, 10)

    assert asyncio.run(read_twice()) == b"late"


def test_the_size_of_a_form_is_limited(server):
    assert server.http.post(f"{server.url}/form", content=b"x" * MIB).json() == {"size": MIB}
    for content in (b"x" * 6 * MIB, (b"x" * MIB for _ in range(6))):  # the limit is 5 MiB; the second is sent in chunks
        answer = server.http.post(f"{server.url}/form", content=content)
        assert (answer.status_code, answer.json()["code"]) == (413, "too_large")


# Slow clients


@contextmanager
def trickling(clients):
    """Send a byte now and then on each open connection. Yield a function that counts the open ones.

    Open ones only: a byte to a connection that the server has closed would reset it, and the response would be lost.
    """
    over = threading.Event()

    def open_clients():
        with selectors.DefaultSelector() as poll:
            for client in clients:
                poll.register(client, selectors.EVENT_READ)
            # Those that have nothing to read: the server has sent no refusal, and has not closed the connection.
            return set(clients) - {key.fileobj for key, _event in poll.select(0)}

    def trickle():
        while not over.wait(0.3):
            for client in open_clients():
                with suppress(OSError):
                    client.send(b"x")

    def count_open():
        return len(open_clients())

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        yield count_open
    finally:
        over.set()
        thread.join()
        for client in clients:
            client.close()


@pytest.mark.parametrize("is_behind_nginx", [False, True])
def test_pages_answer_while_two_hundred_clients_are_slow(patient_server, request, is_behind_nginx):
    listener = request.getfixturevalue("behind_nginx")(patient_server) if is_behind_nginx else patient_server
    heads = [GET, FORM, UPLOAD.replace(f"{FILES}/slow", "/form")]  # a slow head, a small form and a large one
    # From several addresses, since one may have only 120 connections.
    clients = [listener.connect(heads[each % 3], address=f"127.0.0.{each % 4 + 2}") for each in range(200)]
    # As many uploads as the server has threads for them.
    clients += [listener.connect(UPLOAD, address=f"127.0.0.{each + 2}") for each in range(4)]
    with trickling(clients) as count_open:
        for _ in range(10):
            assert listener.http.get(f"{listener.url}/page").status_code == 200
            assert listener.http.get(f"{listener.url}/healthz").json() == {"status": "ok"}
        assert listener.http.post(f"{listener.url}/form", content=b"form").json() == {"size": 4}
        with listener.connect(STREAM.format("/stream"), address="127.0.0.8") as client:
            read_until(client, b"event: hello")
        assert count_open() == len(clients)  # all slow clients were still connected


RESETS = pytest.mark.rerun_if_late(
    "a byte that is sent while the server closes resets the connection, and the refusal is lost"
)


@RESETS
def test_a_slow_request_is_refused(server, behind_nginx):
    nginx = behind_nginx(server)
    sent = [(server, GET), (server, FORM), (server, UPLOAD), (nginx, FORM), (nginx, UPLOAD)]
    clients = [listener.connect(head) for listener, head in sent]
    with trickling(clients) as count_open:
        wait_for(lambda: not count_open())
        assert [refusal(client) for client in clients] == [(408, "request_timeout")] * len(clients)


def test_a_client_that_reads_nothing_of_its_last_response_is_cut_off(server):
    with server.connect("GET /large HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n") as client:
        client.recv(1)
        connections, (_host, port) = psutil.Process(server.process.pid).net_connections, client.getsockname()
        wait_for(lambda: not any(each.raddr and each.raddr.port == port for each in connections("tcp")))


def test_connections_of_an_address_are_limited(patient_server):
    with ExitStack() as clients:
        for _ in range(120):
            clients.enter_context(patient_server.connect(address="127.0.0.9"))
        with patient_server.connect(address="127.0.0.9") as one_more:
            assert refusal(one_more) == (429, "too_many_connections")
        assert patient_server.http.get(f"{patient_server.url}/page").status_code == 200
    wait_for(lambda: is_served(patient_server, "127.0.0.9"))


# Processes


@pytest.mark.django_db
def test_requests_work_again_as_soon_as_the_database_does(server):
    real = Path(connection.settings_dict["HOST"]) / ".s.PGSQL.5432"
    link = server.database_folder / real.name
    with socket.socket(socket.AF_UNIX) as frozen:  # a database that accepts connections and never answers
        frozen.bind(str(link))
        frozen.listen()
        frozen.settimeout(30)
        with server.connect(STREAM.format("/readyz")), frozen.accept()[0]:
            assert server.http.get(f"{server.url}/healthz", timeout=10).status_code == 200
    link.unlink()
    for _ in range(2):
        api, page = (server.http.get(f"{server.url}{path}") for path in ("/api/v1/database", "/database"))
        assert (api.status_code, api.json()["code"], page.status_code) == (503, "database_unavailable", 503)
        assert min(int(answer.headers["retry-after"]) for answer in (api, page)) > 0
        assert "temporarily unavailable" in page.text
        assert server.http.get(f"{server.url}/healthz").status_code == 200
        link.symlink_to(real)
        assert server.http.get(f"{server.url}/database").text == "connected"
        link.unlink()
        with connection.cursor() as cursor:  # the server's connections end, as when PostgreSQL is killed
            cursor.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'postgres'")


def test_streams_and_workers_end_with_a_killed_server():
    server = Server(TEST_PROCESSES="2")
    workers = psutil.Process(server.process.pid).children(recursive=True)
    assert len(workers) >= 2
    with server.connect(STREAM.format("/stream")) as client:
        read_until(client, b"event: hello")
        server.process.kill()
        while client.recv(65536):
            pass
    server.process.wait(30)
    assert psutil.wait_procs(workers, timeout=30)[1] == []
