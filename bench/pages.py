"""Cost of pages: CPU milliseconds for a page of 25 rows, and response times of 200 clients while a run trains.

make bench NAME=pages (QUICK=1 for fewer rounds and a shorter load)

A page's CPU time is what this process uses for one request through all middleware; PostgreSQL's is not in it. The ratio
`job_list_vs_bare_view` compares the list of jobs with a view that writes the same rows as plain text
(`bench.bare_job_list`). It is the quotient of their rates, in requests per second of CPU time. The requests of the two
views alternate.

For the loads, the console runs as `manage.py up` serves it. Each client requests the list of jobs and a job's page
alternately. In the first and the last of the four loads, the next request follows the response at once. In the second
load, a client sends a request every three seconds, as the pages refresh themselves; in the third, every two seconds.
Clients, console, PostgreSQL and the run share the machine's cores. The figures `cores_…` show how many cores each of
them used.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench import cpu_use, http_load, rounds
from bench.environment import ROOT, free_console_port, images_root, temporary_installation

ROWS = 25
"""Rows of each list, as many as a page shows."""
REQUESTS = 5 if rounds.is_quick() else 20
"""Requests of each page whose CPU time is measured."""
WARM_UP_REQUESTS = 2
"""Requests of each page before the measured ones; they load templates and fill caches."""
CLIENTS = 200
LOAD_SECONDS = 15.0 if rounds.is_quick() else 60.0
"""How long each of the loads lasts."""
REFRESH_SECONDS = 3.0
"""The interval at which the pages refresh themselves."""
LOADS = (("at_once", 0.0), ("every_3_s", REFRESH_SECONDS), ("every_2_s", 2.0), ("at_once_again", 0.0))
"""Name of each load, in the order of the measurement, and the seconds between two requests of a client."""
START_SECONDS = 120.0
"""How long the console, and then the run, may take to start."""
PAGES = (
    "overview", "job_list", "job_detail", "dataset_list", "workspace_list", "receipt_list", "wallet", "training_new",
)  # fmt: skip
"""Names of the URLs of the measured pages."""
BARE_VIEW = "bare_job_list"
"""Name of the URL of the view that the list of jobs is compared with."""
GOAL = 0.5
"""Per second of CPU time, the list of jobs should answer at least this share of the requests that the bare view can."""
SCRIPT = "bench_busy.py"
"""The run's script, by whose name `cpu_use` finds the run's process."""
# The run outlives the loads and their preparation.
TRAINING = f"""import time
ends_at = time.monotonic() + {len(LOADS) * LOAD_SECONDS + 60}
while time.monotonic() < ends_at:
    sum(range(100_000))
"""


def main() -> None:
    """Measure, then print the table and the JSON object."""
    url = f"http://127.0.0.1:{free_console_port()}"
    with temporary_installation(TRAINYARD_URL=url, TRAINYARD_IMAGES_ROOT=str(images_root())) as settings:
        figures, ratios = measure(settings, url)
    rounds.print_table(f"{ROWS} rows, {CLIENTS} clients", figures)
    print(f"job_list_vs_bare_view {ratios['job_list_vs_bare_view']:.2f} (goal: at least {GOAL:.2f})")
    rounds.print_result("pages", figures, ratios)


def measure(settings: Any, url: str) -> tuple[dict[str, rounds.Figure], dict[str, float]]:
    """Return the figures, and the ratios: the list of jobs to the bare view, and memory before and after loads."""
    from django.core.management import call_command  # noqa: PLC0415 - Django must be set up first
    from django.test import Client  # noqa: PLC0415 - as above
    from django.urls import reverse  # noqa: PLC0415 - as above

    call_command("collectstatic", interactive=False, verbosity=0)
    settings.ROOT_URLCONF = "bench.bare_job_list"  # of this process, not of the console that is served below
    customer = create_customer(Path(os.environ["TRAINYARD_VAR"]))
    client = Client(headers={"host": url.removeprefix("http://")})
    client.force_login(customer.membership.user)
    paths = page_paths(customer)
    figures = {f"cpu_ms_{page}": cpu_milliseconds(client, path)[0] for page, path in paths.items()}
    list_figure, bare_figure = cpu_milliseconds(client, paths["job_list"], reverse(BARE_VIEW))
    figures |= {f"cpu_ms_{BARE_VIEW}": bare_figure}
    cookie = client.cookies[settings.SESSION_COOKIE_NAME].OutputString(attrs=[])
    with serve_console(url) as server:
        start_training(customer)
        memory_mib = [cpu_use.web_memory_mib(server)]
        for load, interval in LOADS:
            figures |= measure_load(
                load,
                settings=settings,
                server=server,
                paths=[paths["job_list"], paths["job_detail"]],
                cookie=cookie,
                interval_seconds=interval,
            )
            memory_mib.append(cpu_use.web_memory_mib(server))
    figures |= {f"web_mib_{loads}_loads": rounds.summary([mib]) for loads, mib in enumerate(memory_mib)}
    return figures, {
        "job_list_vs_bare_view": round(bare_figure["median"] / list_figure["median"], 3),
        "web_memory_1_load_vs_before": round(memory_mib[1] / memory_mib[0], 3),
        "web_memory_4_loads_vs_1": round(memory_mib[4] / memory_mib[1], 3),
    }


def create_customer(folder: Path) -> Any:
    """Create an organization with `ROWS` rows in each list. Its runs took place on a simulated cluster."""
    from jobs import clusters  # noqa: PLC0415 - Django must be set up first
    from runtime.specs import Outcome  # noqa: PLC0415 - as above
    from tests.factories.jobs import Customer  # noqa: PLC0415 - as above
    from tests.factories.storage import DatasetVersionFactory, WorkspaceFactory  # noqa: PLC0415 - as above
    from tests.fakes import FakeBackend  # noqa: PLC0415 - as above

    backend = FakeBackend(root=folder / "fake-runs")
    real_create = clusters.create
    clusters.create = lambda _kind, **_options: backend  # type: ignore[assignment,return-value]
    clusters.cluster.cache_clear()
    customer = Customer(backend)
    for _row in range(ROWS):
        started_at = time.time() - 600
        customer.end(customer.started(at=started_at), Outcome.COMPLETED, at=started_at + 300)
        DatasetVersionFactory(dataset__organization=customer.organization)
        WorkspaceFactory(organization=customer.organization)
    clusters.create = real_create  # type: ignore[assignment]
    clusters.cluster.cache_clear()
    return customer


def page_paths(customer: Any) -> dict[str, str]:
    """Return the path of each page in PAGES."""
    from django.urls import reverse  # noqa: PLC0415 - Django must be set up first

    job = customer.organization.jobs.latest("pk")
    return {page: reverse(page, args=[job.pk] if page == "job_detail" else []) for page in PAGES}


def cpu_milliseconds(client: Any, *paths: str) -> list[rounds.Figure]:
    """Return this process's CPU time for a request of each path. The paths are requested in turn."""
    milliseconds: list[list[float]] = [[] for _path in paths]
    for _request in range(WARM_UP_REQUESTS + REQUESTS):
        for path, path_milliseconds in zip(paths, milliseconds, strict=True):
            started_at = time.process_time()
            response = client.get(path)
            path_milliseconds.append((time.process_time() - started_at) * 1000)
            if response.status_code != httpx.codes.OK:
                raise SystemExit(f"{path} answered {response.status_code}")
    return [rounds.summary(path_milliseconds[WARM_UP_REQUESTS:]) for path_milliseconds in milliseconds]


@contextmanager
def serve_console(url: str, *command: str) -> Iterator[psutil.Process]:
    """Run `manage.py up`, or another command; yield its process once it is ready."""
    environment = os.environ | {"LOG_LEVEL": "INFO"}  # as in production, with the access log
    with Path(os.environ["TRAINYARD_VAR"], "bench.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "manage.py"), *(command or ["up"])], stdout=log, stderr=log, env=environment
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("The console did not start.")
            time.sleep(0.2)  # there is no event for another process's readiness
        yield psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def is_ready(url: str) -> bool:
    """Return whether the console answers its readiness check."""
    try:
        return httpx.get(f"{url}/readyz", timeout=5).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def start_training(customer: Any) -> None:
    """Order a run that keeps its node busy, and wait until it runs."""
    customer.write(SCRIPT, TRAINING)
    job = customer.job(code_path=SCRIPT, nodes=1)
    deadline = time.monotonic() + START_SECONDS
    while job.state != "running":
        if job.is_ended or time.monotonic() > deadline:
            raise SystemExit(f"The run does not train: {job.state} {job.detail}")
        time.sleep(0.2)  # another process starts the run
        job.refresh_from_db()


def measure_load(
    load: str, *, settings: Any, server: psutil.Process, paths: list[str], cookie: str, interval_seconds: float
) -> dict[str, rounds.Figure]:
    """Return response times (median and 95th percentile), responses per second, and the cores that each part used."""
    services = settings.EMBEDDED.processes()
    cpu_before, started_at = cpu_use.cpu_seconds_by_part(server, services, SCRIPT), time.monotonic()
    responses = http_load.run(
        port=int(settings.WEB_BIND.rpartition(":")[2]),
        paths=paths,
        cookie=cookie,
        clients=CLIENTS,
        seconds=LOAD_SECONDS,
        interval_seconds=interval_seconds,
    )
    seconds = time.monotonic() - started_at
    cores = cpu_use.average_cores(cpu_before, cpu_use.cpu_seconds_by_part(server, services, SCRIPT), seconds)
    if responses.failed:
        raise SystemExit(f"{responses.failed} requests were not answered with 200")
    count = len(responses.seconds)
    values = {
        f"p50_s_{load}": statistics.median(responses.seconds),
        f"p95_s_{load}": statistics.quantiles(responses.seconds, n=20)[-1],
        f"answers_a_second_{load}": count / seconds,
        f"web_cpu_ms_an_answer_{load}": cores["web"] * seconds / count * 1000,
        f"kib_an_answer_{load}": responses.body_bytes / count / 1024,
        **{f"cores_{load} {part}": share for part, share in cores.items()},
    }
    return {name: rounds.summary([value]) for name, value in values.items()}


if __name__ == "__main__":
    main()
