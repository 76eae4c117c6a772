"""Speed of a job's files: the first page of a folder of 100,000 files, and a download compared with a static file.

make bench NAME=job_files (QUICK=1 for fewer rounds and a smaller file)

The console runs as `manage.py up` serves it. The same server sends the static file, which has the same size. The server
reads the static file into memory as a whole, but a download in chunks. The client reads from a socket, since an HTTP
library would be the slowest part. The memory measured is the sum over all web processes (PSS).
"""

from __future__ import annotations

import os
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench import cpu_use, rounds
from bench.environment import free_console_port, images_root, temporary_installation
from bench.pages import create_customer, serve_console

FILES = 100_000
"""Files in the listed folder."""
DOWNLOAD_MIB = 256 if rounds.is_quick() else 1024
"""Size of the downloaded file."""
ROUNDS = 3 if rounds.is_quick() else 7
STATIC_NAME = "bench-download.bin"
BUFFER_BYTES = 1 << 20
"""How much the client reads from the socket at once."""


def main() -> None:
    """Measure, then print the table and the JSON object."""
    url = f"http://127.0.0.1:{free_console_port()}"
    with temporary_installation(TRAINYARD_URL=url, TRAINYARD_IMAGES_ROOT=str(images_root())) as settings:
        figures = measure(settings, url)
    rounds.print_table(f"{FILES} files, {DOWNLOAD_MIB} MiB", figures)
    ratios = {"download_vs_static": rounds.ratio(figures, "download_mib_a_second", "static_mib_a_second")}
    rounds.print_result("job_files", figures, ratios)


def measure(settings: Any, url: str) -> dict[str, rounds.Figure]:
    """Return milliseconds for a listing, MiB per second for transfers, and MiB of memory."""
    from django.core.management import call_command  # noqa: PLC0415 - Django must be set up first
    from django.test import Client  # noqa: PLC0415 - as above

    from jobs import results  # noqa: PLC0415 - as above

    call_command("collectstatic", interactive=False, verbosity=0)
    customer = create_customer(Path(os.environ["TRAINYARD_VAR"]))
    job = customer.organization.jobs.latest("pk")
    client = Client(headers={"host": url.removeprefix("http://")})
    client.force_login(customer.membership.user)
    cookie = client.cookies[settings.SESSION_COOKIE_NAME].OutputString(attrs=[])
    # The local backend keeps a job's outputs below `.outputs`, in a folder named by `results.checkpoint_key`, which all
    # attempts of a job share.
    outputs = settings.TRAINYARD_RUNS_ROOT / ".outputs" / results.checkpoint_key(job.pk)
    write_files(outputs)
    (settings.STATIC_ROOT / STATIC_NAME).hardlink_to(outputs / "model.pt")
    api, size = f"/api/v1/jobs/{job.pk}", DOWNLOAD_MIB << 20
    with serve_console(url) as server:
        addresses = {
            "first_page_ms": f"{api}/files/?path=outputs/many",
            "first_page_html_ms": f"/jobs/{job.pk}/folder/outputs/many",
        }
        pages = rounds.measure(
            [rounds.Variant(name, partial(milliseconds, url, path, cookie)) for name, path in addresses.items()],
            ROUNDS,
            "ms",
        )
        memory_before = cpu_use.web_memory_mib(server)
        downloads = {
            "download_mib_a_second": f"{api}/files/outputs/model.pt",
            "archive_mib_a_second": f"{api}/archive/?path=outputs/model.pt",
        }
        values = rounds.measure(
            [transfer(name, url, path, cookie, size) for name, path in downloads.items()], ROUNDS, "MiB/s"
        )
        memory_after = cpu_use.web_memory_mib(server)
        # The static file comes last: the server reads it into memory, which would change `memory_after`. The download
        # is measured again in the same rounds as the static file; the new figures replace its first ones.
        static = f"{settings.STATIC_URL}{STATIC_NAME}"
        compared = rounds.measure(
            [
                transfer("download_mib_a_second", url, downloads["download_mib_a_second"], cookie, size),
                transfer("static_mib_a_second", url, static, cookie, size),
            ],
            ROUNDS, "MiB/s",
        )  # fmt: skip
    figures = rounds.summaries({**pages, **values, **compared})
    return figures | {
        "web_mib_before_downloads": rounds.summary([memory_before]),
        "web_mib_after_downloads": rounds.summary([memory_after]),
    }


def write_files(outputs: Path) -> None:
    """Write a folder of FILES small files, and one large file that does not compress."""
    (outputs / "many").mkdir(parents=True)
    for number in range(FILES):
        (outputs / "many" / f"sample-{number:06}.txt").write_bytes(b"x")
    with (outputs / "model.pt").open("wb") as file:
        for _mebibyte in range(DOWNLOAD_MIB):
            file.write(os.urandom(1 << 20))


def transfer(name: str, url: str, path: str, cookie: str, size: int) -> rounds.Variant:
    """Return a variant that receives a file of at least `size` bytes, in MiB per second."""

    def measure_once() -> float:
        seconds, received = fetch(url, path, cookie)
        if received < size:
            raise SystemExit(f"{path} answered {received} bytes of {size}")
        return received / 2**20 / seconds

    return rounds.Variant(name, measure_once)


def milliseconds(url: str, path: str, cookie: str) -> float:
    """Return how long a GET took."""
    return fetch(url, path, cookie)[0] * 1000


def fetch(url: str, path: str, cookie: str) -> tuple[float, int]:
    """Return the seconds that a GET took, and the number of bytes received, with headers."""
    address = urlsplit(url)
    request = f"GET {path} HTTP/1.1\r\nHost: {address.netloc}\r\nCookie: {cookie}\r\nConnection: close\r\n\r\n"
    buffer = bytearray(BUFFER_BYTES)
    started_at, received, status = time.perf_counter(), 0, b""
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(request.encode())
        while count := connection.recv_into(buffer):
            status = status or bytes(buffer[:12])
            received += count
    if status != b"HTTP/1.1 200":
        raise SystemExit(f"{path} answered {status.decode()}")
    return time.perf_counter() - started_at, received


if __name__ == "__main__":
    main()
