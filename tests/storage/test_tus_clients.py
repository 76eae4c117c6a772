"""Unmodified clients of tus against the real server, over a line that is cut, while processes are killed."""

import hashlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest
from django.db import connection
from tusclient.client import TusClient

from console.accounts import services
from storage import selectors
from storage.models import Upload
from tests.console.processes import free_port, wait_for
from tests.factories.storage import WorkspaceFactory

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.slow,
    pytest.mark.rerun_if_late("clients wait between two attempts, and a server starts"),
]
ROOT = Path(__file__).resolve().parents[2]
DRIVER = Path(__file__).parent / "tus_upload.cjs"
MIB = 1024**2
SIZE = 64 * MIB + 12345  # the last piece is shorter than all others
CUTS = 25
PAUSE_SECONDS = 0.002
"""The line's pause after 64 KiB: 30 MB/s. At full speed a busy server would be far behind the line."""
SEND_BUFFER = 64 * 1024
"""Bytes that wait in the line while the server is slow. Megabytes that never left it would count as sent."""
SENT_TWICE = 5 * MIB // 2
"""Bytes that may be sent to the server beyond the file's: the headers of all requests, and what the killed process had
received but not written. A cut adds none, since the server keeps what reached it. No part grows with the file."""
METADATA = {"purpose": "workspace", "name": "code", "path": "received.bin", "filename": "source.bin"}


class Line:
    """A TCP line to the server that is cut after given numbers of bytes, counted over all its connections."""

    def __init__(self, port, cuts):
        self._target, self._cuts = port, sorted(cuts)
        self._lock = threading.Lock()
        self._open = threading.Lock()  # held while bytes pass, and by a test that stops them
        self.sent = 0
        """Bytes that were passed to the server. The client may have sent more, which the line lost when it was cut."""
        self.cut = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with suppress(OSError):
            while True:
                client, _address = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
                for run in (self._send, self._answer):
                    threading.Thread(target=run, args=(client, server), daemon=True).start()

    def _send(self, client, server):
        with suppress(OSError):
            while data := client.recv(65536):
                with self._open:
                    server.sendall(data)
                time.sleep(PAUSE_SECONDS)
                with self._lock:
                    self.sent += len(data)
                    is_cut = len(self._cuts) > self.cut and self.sent >= self._cuts[self.cut]
                    self.cut += is_cut
                if is_cut:
                    break
        self._end(client, server)

    def _answer(self, client, server):
        with suppress(OSError):
            while data := server.recv(65536):
                client.sendall(data)
        self._end(client, server)

    @staticmethod
    def _end(*ends):
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def stopped(self):
        """Let nothing through for a block: the kernel would accept bytes for a process that is just being killed."""
        return self._open

    def close(self):
        self._listener.close()


@pytest.fixture
def server(settings):
    """The port of a web server of two processes, and the process above them."""
    port = free_port()
    environment = os.environ | {
        "DJANGO_SETTINGS_MODULE": "tests.storage.serving_settings",
        "TEST_DATABASE": connection.settings_dict["NAME"],
        "TRAINYARD_STORAGE_ROOT": str(settings.TRAINYARD_STORAGE_ROOT),
        "WEB_BIND": f"127.0.0.1:{port}",
        "WEB_PROCESSES": "2",
    }
    process = subprocess.Popen([sys.executable, "-m", "console.serving.server"], cwd=ROOT, env=environment)

    def is_ready():
        with suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{port}/healthz").status_code == 200

    try:
        wait_for(is_ready, 90)
        yield port, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(120)  # it heeds the signal only after it has replaced the killed process


@pytest.fixture
def token(member):
    WorkspaceFactory(organization=member.organization, name="code")
    return services.create_token(membership=member, name="tus")[1]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source.bin"
    random_bytes = random.Random(7)
    with path.open("wb") as file:
        for start in range(0, SIZE, MIB):
            file.write(random_bytes.randbytes(min(MIB, SIZE - start)))
    return path


def send_with_tuspy(port, token, source, chunk_size=32 * MIB, **options):
    client = TusClient(f"http://127.0.0.1:{port}/api/v1/uploads/", headers={"Authorization": f"Token {token}"})
    with source.open("rb") as stream:
        client.uploader(file_stream=stream, metadata=METADATA, chunk_size=chunk_size, **options).upload()


def send_with_tus_js(port, token, source, parallel=1):
    node = shutil.which("node")
    if node is None:
        pytest.skip("There is no Node.js: apt-get install nodejs")
    values = {
        "endpoint": f"http://127.0.0.1:{port}/api/v1/uploads/", "token": token, "path": str(source),
        "metadata": METADATA, "parallelUploads": parallel, "retryDelays": [0, 200, 500, 1000, 3000, 5000, 9000],
    }  # fmt: skip
    done = subprocess.run([node, DRIVER, json.dumps(values)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def digest_of(path):
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def received_digest(organization):
    workspace = selectors.workspace_named(organization, "code")
    return digest_of(selectors.workspace_folder(workspace) / "received.bin")


def send_through_cuts(send, server, token, source):
    """Send with a client while its line is cut CUTS times and the process that receives is killed."""
    port, parent = server
    line = Line(port, random.Random(11).sample(range(MIB, SIZE, MIB // 4), CUTS))
    killed = []

    def kill_the_receiver():
        """Kill the process that has the upload's file open, halfway."""
        wait_for(lambda: line.sent > SIZE // 2, 200)
        process = wait_for(lambda: next(filter(_receives, parent.children(recursive=True)), None))
        with line.stopped():
            # What a process has not read when it is killed is lost, and on a busy machine that is much.
            wait_for(lambda: _unread_bytes(port) == 0)
            process.kill()
            wait_for(lambda: _has_ended(process))
        killed.append(process.pid)

    killer = threading.Thread(target=kill_the_receiver)
    killer.start()
    try:
        send(line.port, token, source)
    finally:
        killer.join()
        line.close()
    assert line.cut == CUTS
    assert killed
    assert line.sent - SIZE <= SENT_TWICE


def _unread_bytes(port):
    """Return how many bytes the kernel holds for the server's processes, by the receive queues of its connections."""
    connections = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ours = [fields for fields in connections if int(fields[1].rpartition(":")[2], 16) == port]
    return sum(int(fields[4].rpartition(":")[2], 16) for fields in ours)


def _receives(process):
    with suppress(psutil.Error):
        return any("/uploads/" in file.path for file in process.open_files())
    return False


def _has_ended(process):
    """Return whether a process has ended, although its parent may not have noticed yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_clients_survive_cuts_and_a_kill_and_may_send_checksums_and_parallel_parts(server, token, source, member):
    expected = digest_of(source)
    for count, send in enumerate((partial(send_with_tuspy, retries=60, retry_delay=0.2), send_with_tus_js), 1):
        send_through_cuts(send, server, token, source)
        upload = Upload.objects.latest("pk")
        assert (upload.state, upload.sha256, received_digest(member.organization)) == ("complete", expected, expected)
        assert Upload.objects.count() == count
    for size, send in (
        (8 * MIB, partial(send_with_tuspy, upload_checksum=True, chunk_size=3 * MIB)),
        (7 * MIB, partial(send_with_tus_js, parallel=3)),
    ):
        os.truncate(source, size)
        send(server[0], token, source)
        assert received_digest(member.organization) == digest_of(source)
