"""Speed and memory of uploads and downloads, compared with a bare ASGI application on the same web server.

make bench NAME=upload (QUICK=1 for a file of 128 MiB and fewer rounds)

A resumable upload is sent as a client sends it, POST and then PATCH. It is hashed and stored in a workspace. The bare
server writes the same bytes to a file. The client sends with `sendfile`, so that it uses little CPU time.

A folder of 10,000 files is sent as the console's page sends it: as one tar that is unpacked into a workspace. This is
compared with the same archive as a version of a dataset. Both times include the unpacking, because the console answers
the last request when the files are in place.
"""

from __future__ import annotations

import io
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, BinaryIO

from bench import rounds
from bench.environment import ROOT, free_port, temporary_installation

MIB = 1024**2
SIZE_BYTES = (128 if rounds.is_quick() else 1024) * MIB
ROUNDS = 3 if rounds.is_quick() else 5
SMALL_FILES, SMALL_FILE_BYTES = 10_000, 4096
"""Number and size of the files in the archive."""
START_SECONDS = 60.0
"""How long a server may take to start."""
ARCHIVE_ROUNDS = 2 if rounds.is_quick() else 3
"""Rounds with the archive of small files. ROUNDS are those with a single large file."""


@dataclass
class Server:
    """A web server of one process."""

    port: int
    process: subprocess.Popen[bytes]
    headers: str = ""

    def is_ready(self) -> bool:
        """Return whether the process accepts connections."""
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def send(self, method: str, path: str, status: int, *, headers: str = "", body: BinaryIO | None = None) -> str:
        """Send a request, and return the response's headers; its body is discarded. Fails unless it has this status."""
        size = os.fstat(body.fileno()).st_size if body else 0
        request = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {size}\r\n"
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(f"{request}{self.headers}{headers}\r\n".encode())
            if body:
                connection.sendfile(body)
            received, buffer = b"", bytearray(MIB)
            while b"\r\n\r\n" not in received:
                chunk = connection.recv(65536)
                if not chunk:
                    raise SystemExit(f"{method} {path}: the server closed the connection before the headers' end")
                received += chunk
            head, _, received = received.partition(b"\r\n\r\n")
            body_bytes = len(received)
            while count := connection.recv_into(buffer):
                body_bytes += count
        answer = head.decode()
        if int(answer.split()[1]) != status:
            raise SystemExit(f"{method} {path}: {answer} {received.decode(errors='replace')}")
        announced_bytes = answer.lower().partition("\r\ncontent-length:")[2].partition("\r\n")[0]
        if announced_bytes and int(announced_bytes) != body_bytes:
            raise SystemExit(f"{method} {path}: received {body_bytes} of {announced_bytes} bytes")
        return answer

    def peak_memory_mib(self) -> float:
        """Return the largest resident memory that the process has had."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024


def main() -> None:
    """Measure, then print the table and the JSON object."""
    # Plain HTTP, even if the environment has an https address. `serving` chooses the ports.
    with temporary_installation(TRAINYARD_URL="http://127.0.0.1:8000") as settings:
        figures, ratios = measure(Path(settings.VAR_DIR))
    rounds.print_table(f"{SIZE_BYTES // MIB} MiB, seconds", figures)
    rounds.print_result("upload", figures, ratios)


def measure(folder: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the figures in seconds, and the ratios: of speeds for single files, of times for many files."""
    from console.accounts import services  # noqa: PLC0415 - Django must be set up first
    from console.accounts.models import User  # noqa: PLC0415 - as above
    from storage import catalog, selectors  # noqa: PLC0415 - as above

    user = User.objects.create_user("bench@example.com", "none")
    membership = services.create_organization(user=user, name="Bench")
    workspace = catalog.create_workspace(organization=membership.organization, user=user, name="bench")
    catalog.create_dataset(organization=membership.organization, user=user, name="bench")
    token = services.create_token(membership=membership, name="bench")[1]
    workspace_folder = selectors.workspace_folder(workspace)
    bare_folder = folder / "storage" / "bare"
    bare_folder.mkdir()
    source, archive = folder / "source.bin", folder / "archive.tar"
    with source.open("wb") as file:
        for _ in range(SIZE_BYTES // MIB):
            file.write(os.urandom(MIB))
    write_tar(archive, SMALL_FILES, SMALL_FILE_BYTES)
    with (
        serving("console.asgi:application") as console_server,
        serving("bench.bare_upload:application", BENCH_FOLDER=str(bare_folder)) as bare_server,
    ):
        console_server.headers = f"Authorization: Token {token}\r\nTus-Resumable: 1.0.0\r\n"

        def upload() -> float:
            (workspace_folder / "file.bin").unlink(missing_ok=True)
            return upload_seconds(console_server, source, path="file.bin")

        def bare_put() -> float:
            (bare_folder / "file.bin").unlink(missing_ok=True)
            started_at = perf_counter()
            with source.open("rb") as body:
                bare_server.send("PUT", "/file.bin", 201, body=body)
            return perf_counter() - started_at

        def download() -> float:
            started_at = perf_counter()
            console_server.send("GET", "/api/v1/workspaces/bench/files/file.bin", 200)
            return perf_counter() - started_at

        def bare_get() -> float:
            started_at = perf_counter()
            bare_server.send("GET", "/file.bin", 200)
            return perf_counter() - started_at

        def folder_of_files() -> float:
            shutil.rmtree(workspace_folder / "unpacked", ignore_errors=True)
            return upload_seconds(console_server, archive, path="unpacked", unpack="")  # the key alone asks to unpack

        def archive_of_files() -> float:
            return upload_seconds(console_server, archive, purpose="dataset")

        file_variants = [
            rounds.Variant("upload", upload), rounds.Variant("bare_put", bare_put),
            rounds.Variant("download", download), rounds.Variant("bare_get", bare_get),
        ]  # fmt: skip
        upload(), bare_put()  # so that the first downloads find their files
        values = rounds.measure(file_variants, ROUNDS, "s")
        memory = console_server.peak_memory_mib()
        archive_variants = [rounds.Variant("files", folder_of_files), rounds.Variant("archive", archive_of_files)]
        values |= rounds.measure(archive_variants, ARCHIVE_ROUNDS, "s")
    figures = rounds.summaries(values)
    ratios = {
        "upload_vs_bare_put": rounds.ratio(figures, "bare_put", "upload"),
        "download_vs_bare_get": rounds.ratio(figures, "bare_get", "download"),
        "files_vs_archive": rounds.ratio(figures, "files", "archive"),
    }
    return {**figures, "memory_mib": rounds.summary([memory])}, ratios


def upload_seconds(server: Server, file: Path, **metadata: str) -> float:
    """Upload a file as a tus client does; return the seconds.

    The file goes into the workspace, unless `metadata` names another `purpose`.
    """
    started_at = perf_counter()
    metadata = {"purpose": "workspace", "name": "bench"} | metadata
    encoded_metadata = ",".join(f"{name} {b64encode(value.encode()).decode()}" for name, value in metadata.items())
    response_headers = server.send(
        "POST", "/api/v1/uploads/", 201,
        headers=f"Upload-Length: {file.stat().st_size}\r\nUpload-Metadata: {encoded_metadata}\r\n",
    )  # fmt: skip
    path = response_headers.lower().split("location: ")[1].split()[0]
    with file.open("rb") as body:
        server.send(
            "PATCH", path, 204,
            headers="Upload-Offset: 0\r\nContent-Type: application/offset+octet-stream\r\n", body=body,
        )  # fmt: skip
    return perf_counter() - started_at


def write_tar(path: Path, count: int, size: int) -> None:
    """Write a tar of `count` files of `size` bytes."""
    content = os.urandom(size)
    with tarfile.open(path, "w") as archive:
        for number in range(count):
            entry = tarfile.TarInfo(f"folder-{number // 1000}/file-{number}.bin")
            entry.size = size
            archive.addfile(entry, io.BytesIO(content))


@contextmanager
def serving(application: str, **environment: str) -> Iterator[Server]:
    """Serve an ASGI application with the console's server, in one process."""
    port = free_port()
    command = [sys.executable, "-m", "bench.serve_one_process", application, str(port)]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | environment)
    server = Server(port, process)
    try:
        deadline = perf_counter() + START_SECONDS
        while not server.is_ready():
            if process.poll() is not None or perf_counter() > deadline:
                raise SystemExit(f"{application} did not start")
            time.sleep(0.1)  # nothing announces that another process is ready
        yield server
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
