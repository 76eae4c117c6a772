"""Real gunicorn, real live process, real sockets."""

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.console.processes import free_port, wait_for

ROOT = Path(__file__).resolve().parents[2]
REQUEST = "GET {} HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/event-stream\r\n\r\n"


class Console:
    """The two processes, on a port that was free."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "live.sock"
        self.port = free_port()
        self.environment = os.environ | {
            "DJANGO_SETTINGS_MODULE": "tests.console.live_settings",
            "TEST_LIVE_SOCKET": str(self.socket),
        }
        self.processes = []
        self.live = None

    def start_both(self) -> None:
        self.live = self.start_live()
        arguments = ["--workers", "1", "--threads", "2", "--bind", f"127.0.0.1:{self.port}", "--no-control-socket"]
        worker = ["-k", "console.live.StreamPassingWorker"]
        self.start("-m", "gunicorn", "console.wsgi", *worker, *arguments)
        wait_for(self.answers)

    def start(self, *arguments: str) -> subprocess.Popen:
        process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=self.environment)
        self.processes.append(process)
        return process

    def start_live(self) -> subprocess.Popen:
        self.socket.unlink(missing_ok=True)
        process = self.start("manage.py", "live")
        wait_for(self.socket.exists)
        return process

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/page").status_code == 200
        except httpx.TransportError:
            return False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def open_stream(self, path: str = "/stream") -> socket.socket:
        client = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        client.sendall(REQUEST.format(path).encode())
        return client

    def census(self) -> dict:
        text = httpx.get(f"{self.url}/census", headers={"Accept": "text/event-stream"}).text
        return json.loads(text.split("data: ")[1].split("\n")[0])

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait(20)


@pytest.fixture(scope="module")
def console(tmp_path_factory):
    made = Console(tmp_path_factory.mktemp("live"))
    try:
        made.start_both()
        yield made
    finally:
        made.stop()


def read_until(client, mark):
    received = b""
    while mark not in received:
        part = client.recv(65536)
        assert part, f"the connection ended after {received!r}"
        received += part
    return received.decode()


def test_a_stream_is_served_by_the_live_process_on_the_web_port(console):
    with console.open_stream("/stream?rank=1") as client:
        text = read_until(client, b"event: tick\ndata: two\ndata: lines\n\n")
    head, _, body = text.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200")
    assert "text/event-stream" in head
    assert "Cache-Control: no-cache" in head
    assert "event: hello\nid: 1\n" in body
    hello = json.loads(body.split("data: ")[1].split("\n")[0])
    assert hello == {"pid": console.live.pid, "path": "/stream?rank=1"}
    assert ": still here\n\n" in body


def test_two_hundred_streams_on_two_threads_leave_pages_fast(console):
    clients = [console.open_stream() for _ in range(200)]
    try:
        waiting = selectors.DefaultSelector()
        for client in clients:
            read_until(client, b"event: hello")
            waiting.register(client, selectors.EVENT_READ)
        with httpx.Client(base_url=console.url) as browser:  # one kept-alive connection
            started = time.monotonic()
            assert all(browser.get("/page").status_code == 200 for _ in range(20))
            assert time.monotonic() - started < 5
        census = console.census()
        assert census["open"] == 200
        assert census["threads"] < census["lanes"] + 12
        assert not [client for client in clients if client.fileno() == -1]
    finally:
        for client in clients:
            client.close()
    wait_for(lambda: console.census()["open"] == 0)


def test_keep_alive_works_beside_streams(console):
    with httpx.Client(base_url=console.url) as browser, console.open_stream() as client:
        read_until(client, b"event: hello")
        assert {browser.get("/page").text for _ in range(3)}
        read_until(client, b"event: tick")


def test_an_error_asked_for_as_a_stream_ends_as_a_plain_answer(console):
    answer = httpx.get(f"{console.url}/error", headers={"Accept": "text/event-stream"})
    assert (answer.status_code, answer.json()) == (404, {"code": "nothing"})
    assert answer.headers["connection"] == "close"


def test_bytes_sent_behind_the_request_are_not_lost(console):
    with socket.create_connection(("127.0.0.1", console.port), timeout=10) as client:
        client.sendall(
            b"GET /error HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/event-stream\r\nContent-Length: 3\r\n\r\nabc"
        )
        assert "404" in read_until(client, b"nothing").splitlines()[0]


def test_without_the_live_process_streams_are_told_to_come_back(console):
    console.live.send_signal(signal.SIGKILL)
    console.live.wait()
    answer = httpx.get(f"{console.url}/stream", headers={"Accept": "text/event-stream"})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "2"
    assert answer.json()["code"] == "live_unavailable"
    assert console.answers()
    console.live = console.start_live()
    with console.open_stream() as client:
        read_until(client, b"event: hello")
