"""Live views: from the printing of a line to its arrival in a browser, beside 500 open streams of one web process.

make bench NAME=streams (QUICK=1 for fewer lines)

The console runs as `manage.py up` serves it, with one web process. A run prints the time of day, five times a second.
One client follows its output as the page of a job does, beside `tail -F` of the same file. In the first part nobody
else is connected. In the second part, 500 other streams are open. FOLLOWERS of them follow the same job, its output or
its state; all others follow the states of waiting jobs. All times are of this machine's clock.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench import cpu_use, rounds
from bench.environment import free_console_port, images_root, temporary_installation
from bench.pages import START_SECONDS, create_customer, serve_console

STREAMS = 500
FOLLOWERS = 10
"""Streams of the measured job: half of them of its output, half of its state. All others are of jobs that wait."""
WAITING_JOBS = 25
"""Jobs that wait. Each has several of the streams."""
SECONDS = 15.0 if rounds.is_quick() else 60.0
"""How long each part is measured."""
SETTLE_SECONDS = 20.0
"""Time between the last stream's first bytes and the measurement: streams begin with a burst of reads."""
LINES_PER_SECOND = 5
OPENING_AT_ONCE = 20
"""Streams that are being opened at the same time."""
GOAL_MS = 300
"""Longest median from printing to arrival."""
SCRIPT = "bench_lines.py"
"""The run's script, by whose name `cpu_use` finds the run's process."""
STOP_FILE = "stop"
"""A file in the workspace that ends the run. Runs outlive their console."""
# The run outlives both parts and the opening of the streams. It writes a line and its end at once: unbuffered, `print`
# would write the end of the line separately.
PRINTING = f"""import os, time
ends_at = time.monotonic() + {2 * SECONDS + 1200}
while time.monotonic() < ends_at and not os.path.exists("{STOP_FILE}"):
    print(f"line {{time.time()}}\\n", end="", flush=True)
    time.sleep(1 / {LINES_PER_SECOND})  # the pace of the output
"""
EVENT_STREAM_LIMITS = {"MAX_CONNECTIONS_PER_ADDRESS": "1000", "MAX_STREAMS_PER_ORGANIZATION": "1000"}
"""Raised limits: here all clients have one address and one organization, unlike the users of an installation."""


@dataclass
class Arrivals:
    """The seconds from the printing of each line to its arrival, while `is_measured`."""

    seconds: list[float] = field(default_factory=list)
    is_measured: bool = False

    def add(self, text: str) -> None:
        """Record the lines in a piece of output."""
        arrived_at = time.time()
        for line in text.splitlines(keepends=True):
            # Whole lines only: the end of a piece may cut one.
            if self.is_measured and line.startswith("line ") and line.endswith("\n"):
                self.seconds.append(arrived_at - float(line.split()[1]))


def main() -> None:
    """Measure, then print the table and the JSON object."""
    url = f"http://127.0.0.1:{free_console_port()}"
    with temporary_installation(
        TRAINYARD_URL=url, TRAINYARD_IMAGES_ROOT=str(images_root()), WEB_PROCESSES="1", **EVENT_STREAM_LIMITS
    ) as settings:
        from django.test import Client  # noqa: PLC0415 - Django must be set up first

        customer = create_customer(Path(os.environ["TRAINYARD_VAR"]))
        # One running node: beside the measured run every other job waits, however many cores the machine has.
        customer.quota(max_open_jobs=WAITING_JOBS + 1, max_running_nodes=1)
        client = Client(headers={"host": url.removeprefix("http://")})
        client.force_login(customer.membership.user)
        cookie = client.cookies[settings.SESSION_COOKIE_NAME].OutputString(attrs=[])
        with serve_console(url) as server:
            job, waiting_jobs = start_jobs(customer)
            port = int(settings.WEB_BIND.rpartition(":")[2])
            try:
                figures = asyncio.run(
                    measure(
                        server=server, settings=settings, port=port, cookie=cookie, job=job, waiting_jobs=waiting_jobs
                    )
                )
            finally:
                customer.write(STOP_FILE, "")
    rounds.print_table(f"{STREAMS} streams, one process", figures)
    for name in ("line_ms_alone", f"line_ms_{STREAMS}_streams"):
        print(f"{name}: median {figures[name]['median']} ms (goal: below {GOAL_MS})")
    ratios = {
        "line_vs_tail": rounds.ratio(figures, "line_ms_alone", "tail_ms_alone"),
        f"line_vs_tail_{STREAMS}_streams": rounds.ratio(
            figures, f"line_ms_{STREAMS}_streams", f"tail_ms_{STREAMS}_streams"
        ),
    }
    rounds.print_result("streams", figures, ratios)


def start_jobs(customer: Any) -> tuple[Any, list[Any]]:
    """Order the run that prints, wait until it runs, and order jobs that wait for its end."""
    customer.write(SCRIPT, PRINTING)
    job = customer.job(code_path=SCRIPT, node_spec="nano", nodes=1)
    give_up_at = time.monotonic() + START_SECONDS
    while job.state != "running":
        if job.is_ended or time.monotonic() > give_up_at:
            raise SystemExit(f"The run does not print: {job.state} {job.detail}")
        time.sleep(0.2)  # another process starts the run
        job.refresh_from_db()
    return job, [customer.job(node_spec="nano", nodes=1) for _job in range(WAITING_JOBS)]


async def measure(
    *, server: psutil.Process, settings: Any, port: int, cookie: str, job: Any, waiting_jobs: list[Any]
) -> dict[str, rounds.Figure]:
    """Return the times of both parts, the memory of the web process, and the cores that each process used."""
    log = Path(os.environ["TRAINYARD_VAR"], "runs", f"job-{job.pk}-1", "logs", "rank-0.log")
    output_path = f"/api/v1/jobs/{job.pk}/logs/?rank=0&tail=1"
    streamed, tail = Arrivals(), Arrivals()
    services = settings.EMBEDDED.processes()
    figures: dict[str, rounds.Figure] = {"web_mib_alone": rounds.summary([cpu_use.web_memory_mib(server)])}

    async def measure_part(name: str) -> None:
        for arrivals in (streamed, tail):
            arrivals.seconds, arrivals.is_measured = [], True
        cpu_before, started_at = cpu_use.cpu_seconds_by_part(server, services, SCRIPT), time.monotonic()
        await asyncio.sleep(SECONDS)
        seconds = time.monotonic() - started_at
        cores = cpu_use.average_cores(cpu_before, cpu_use.cpu_seconds_by_part(server, services, SCRIPT), seconds)
        for source, arrivals in (("line", streamed), ("tail", tail)):
            arrivals.is_measured = False
            if len(arrivals.seconds) < 2:
                raise SystemExit(f"{source}, {name}: {len(arrivals.seconds)} lines arrived")
            milliseconds = [delay * 1000 for delay in arrivals.seconds]
            p95 = round(statistics.quantiles(milliseconds, n=20)[-1], 3)
            figures[f"{source}_ms_{name}"] = rounds.summary(milliseconds) | {"p95": p95}
            print(f"{source}, {name}: {len(milliseconds)} lines, {figures[f'{source}_ms_{name}']} ms", flush=True)
        print(f"cores, {name}: {cores}", flush=True)
        figures.update({f"cores_{name} {part}": rounds.summary([share]) for part, share in cores.items()})

    async with AsyncExitStack() as connections:
        await connections.enter_async_context(follow_file(log, tail))
        events = await connections.enter_async_context(open_stream(port, output_path, cookie))
        reading = asyncio.create_task(follow(events, streamed))
        await asyncio.sleep(SETTLE_SECONDS)
        await measure_part("alone")
        state_path = "/api/v1/jobs/{}/stream/"
        paths = [output_path, state_path.format(job.pk)] * (FOLLOWERS // 2)
        paths += [state_path.format(waiting_jobs[number % WAITING_JOBS].pk) for number in range(STREAMS - len(paths))]
        slots = asyncio.Semaphore(OPENING_AT_ONCE)

        async def open_one(path: str) -> asyncio.Task[None]:
            async with slots:
                stream = await connections.enter_async_context(open_stream(port, path, cookie))
                return asyncio.create_task(follow(stream))

        readers = await asyncio.gather(*(open_one(path) for path in paths))
        await asyncio.sleep(SETTLE_SECONDS)
        await measure_part(f"{STREAMS}_streams")
        figures[f"web_mib_{STREAMS}_streams"] = rounds.summary([cpu_use.web_memory_mib(server)])
        if reading.done() or any(reader.done() for reader in readers):
            raise SystemExit("A stream ended early.")
        for reader in (reading, *readers):
            reader.cancel()
    return figures


@asynccontextmanager
async def open_stream(port: int, path: str, cookie: str) -> AsyncIterator[asyncio.StreamReader]:
    """Open an event stream as a browser does; yield what it sends after the response's headers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        headers = f"Host: 127.0.0.1:{port}\r\nCookie: {cookie}\r\nAccept: text/event-stream\r\n\r\n"
        writer.write(f"GET {path} HTTP/1.1\r\n{headers}".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.partition(b"\r\n")[0]:
            raise SystemExit(f"{path} answered {head!r}")
        yield reader
    finally:
        writer.close()


async def follow(events: asyncio.StreamReader, arrivals: Arrivals | None = None) -> None:
    """Read an event stream until it ends, and record the lines of output in it."""
    while line := await events.readline():
        if arrivals is not None and line.startswith(b"data: {"):
            arrivals.add(json.loads(line.removeprefix(b"data: "))["text"])


@asynccontextmanager
async def follow_file(path: Path, arrivals: Arrivals) -> AsyncIterator[None]:
    """Follow a file with `tail -F`, and record its lines."""
    process = await asyncio.create_subprocess_exec("tail", "-n", "0", "-F", str(path), stdout=asyncio.subprocess.PIPE)

    async def read() -> None:
        while process.stdout and (line := await process.stdout.readline()):
            arrivals.add(line.decode())

    reading = asyncio.create_task(read())
    try:
        yield
    finally:
        process.terminate()
        await process.wait()
        reading.cancel()


if __name__ == "__main__":
    main()
