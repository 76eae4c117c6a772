"""Measure the cores that each part of a running console used, and the memory of its web processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import psutil

PARTS = {
    "console.serving": "web",
    "multiprocessing": "web",  # uvicorn's worker processes
    "celery": "worker and beat",
    "watch_runs": "watcher",
    "payments_sandbox": "payments sandbox",
}
"""A text in the command line of a process of `manage.py up`, and the part that the process belongs to."""


def cpu_seconds_by_part(server: psutil.Process, services: list[psutil.Process], script: str = "") -> dict[str, float]:
    """Return the CPU seconds used so far by each part. The clients run in this process.

    `server` is `manage.py up`, `services` are its PostgreSQL and Redis. The run's process is not a child of these, but
    has `script` in its command line. Without a `script` there is no run.
    """
    # Ended children of this process are not clients, but servers and set-up.
    seconds = Counter({"clients": _cpu_seconds(psutil.Process(), with_ended_children=False)})
    for process in server.children(recursive=True):
        seconds[_part(process)] += _cpu_seconds(process)
    for service in services:
        processes = (service, *service.children(recursive=True))
        seconds[service.name()] += sum(_cpu_seconds(process) for process in processes)
    for process in psutil.process_iter(["cmdline"]) if script else ():
        if script in " ".join(process.info["cmdline"] or ()):
            seconds["run"] += _cpu_seconds(process)
    return dict(seconds)


def average_cores(before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Return how many cores each part used on average between two readings, the busiest first."""
    cores = {part: (after[part] - before.get(part, 0.0)) / seconds for part in after}
    return dict(sorted(cores.items(), key=lambda item: -item[1]))


def web_memory_mib(server: psutil.Process) -> float:
    """Return the memory of the web processes; memory that several share counts in equal parts (PSS)."""
    web = [process for process in server.children(recursive=True) if _part(process) == "web"]
    return sum(process.memory_full_info().pss for process in web) / 2**20


def _part(process: psutil.Process) -> str:
    command_line = " ".join(process.cmdline())
    return next((part for text, part in PARTS.items() if text in command_line), "other")


def _cpu_seconds(process: psutil.Process, *, with_ended_children: bool = True) -> float:
    times = process.cpu_times()
    children = times.children_user + times.children_system if with_ended_children else 0.0
    return float(times.user + times.system + children)
