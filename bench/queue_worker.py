"""The worker process of `bench.control_plane`: a console with many waiting and ended jobs, and a simulated cluster.

The product's own code runs on a real database; only the cluster is simulated, in memory.
"""

from __future__ import annotations

import os
import queue
import resource
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import django

from runtime.specs import (
    Capacity,
    Controller,
    Image,
    LogChunk,
    NodeCapacity,
    NodeStatus,
    Outcome,
    Resources,
    RunPhase,
    RunSpec,
    RunStatus,
    Span,
)

ORGANIZATIONS = 50
"""Organizations whose jobs wait in the queue."""
SHAPES = (("nano", 1), ("nano", 2), ("small", 1), ("small", 4))
"""The purchases (node spec, nodes), in turn."""
START_SECONDS = 60.0
"""How long the start of a run may take after another has ended."""
QUIET_SECONDS = 0.5
"""If no cores are free and no run has started for this time, no run will start. A scheduling pass is much shorter."""
NODES, NODE_CORES = 64, 64.0
"""The machines of the simulated cluster, and the cores of each. That is 4,096 cores, as many as `bench.purchase_copies`
uses while it buys the originals of its copies."""


class MemoryCluster:
    """A backend in memory with `cores` cores. Runs start at once and end on command."""

    parallel_submissions = 1
    """See `Backend`."""

    def __init__(self) -> None:
        self.cores = 0.0
        self.submissions: queue.Queue[tuple[str, float]] = queue.Queue()
        """The name of each submitted run, and when it was submitted."""
        self._runs: dict[str, tuple[RunSpec, RunStatus]] = {}
        self._used_cores = 0.0
        self._changes: queue.Queue[str] = queue.Queue()
        self._lock = threading.Lock()

    def submit(self, spec: RunSpec) -> None:
        """See `Backend`. Every node runs at once."""
        now = time.time()
        nodes = tuple(NodeStatus(node, RunPhase.RUNNING, started_at=now) for node in range(spec.nodes))
        status = RunStatus(spec.name, RunPhase.RUNNING, nodes, now, now, spans=(Span(spec.nodes, now),))
        with self._lock:
            self._runs[spec.name] = spec, status
            self._used_cores += spec.resources.cpus * spec.nodes
        self.submissions.put((spec.name, time.perf_counter()))

    def end(self, name: str) -> None:
        """Complete a run, and notify the watcher."""
        now = time.time()
        with self._lock:
            spec, status = self._runs[name]
            spans = (replace(status.spans[0], finished_at=now),)
            status = replace(status, phase=RunPhase.ENDED, finished_at=now, outcome=Outcome.COMPLETED, spans=spans)
            self._runs[name] = spec, status
            self._used_cores -= spec.resources.cpus * spec.nodes
        self._changes.put(name)

    def running(self) -> list[str]:
        """Return the names of the running runs."""
        with self._lock:
            return [name for name, (_spec, status) in self._runs.items() if status.phase is RunPhase.RUNNING]

    def describe(self, name: str) -> RunStatus:
        """See `Backend`."""
        return self._runs[name][1]

    def names(self, *, live: bool = False) -> list[str]:
        """See `Backend`."""
        return self.running() if live else list(self._runs)

    def capacity(self) -> Capacity:
        """See `Backend`. Free cores are on as few machines as possible."""
        total = Resources(NODE_CORES, 2**20)
        free_cores = max(0.0, self.cores - self._used_cores)
        nodes = []
        for number in range(NODES):
            free = replace(total, cpus=min(free_cores, NODE_CORES))
            free_cores -= free.cpus
            nodes.append(NodeCapacity(f"node-{number}", total, free))
        return Capacity(tuple(nodes))

    def changes(self, stop_after_seconds: float | None = None) -> Iterator[set[str]]:
        """See `Backend`."""
        while True:
            try:
                name = self._changes.get(timeout=0.5)
            except queue.Empty:
                yield set()
                continue
            yield {name}
            self._changes.task_done()

    def wait_for_watcher(self) -> None:
        """Return once the watcher has handled every change."""
        self._changes.join()

    def logs(self, name: str, rank: int, offset: int = 0, limit: int = 65536) -> LogChunk:
        """See `Backend`. Runs print nothing."""
        return LogChunk("", offset, eof=True)

    def run_folder(self, name: str) -> Path:
        """See `Backend`. Runs write nothing."""
        return Path("/nonexistent")

    def isolation_gaps(self) -> list[str]:
        """See `Backend`."""
        return []

    def check_image(self, image: Image, controller: Controller = Controller.GLOO, *, gpus: int = 0) -> None:
        """See `Backend`. Every image can run."""

    def image_identity(self, image: Image) -> str:
        """See `Backend`. Images never change."""
        return image.builtin or image.reference


class QueueWorker:
    """The commands of `control_plane`, which a worker process executes."""

    def __init__(self, queued: int, finished: int) -> None:
        from bench.purchase_copies import PurchaseCopies  # noqa: PLC0415 - Django must be set up first
        from jobs import clusters, scheduler, watcher  # noqa: PLC0415 - as above

        # On a slow machine jobs would wait longer than the product's limit of ten minutes. The scheduler would then
        # keep nodes free for a large job, and fewer claims would be measured.
        scheduler.BACKFILL_LIMIT = timedelta(days=1)
        self._queued = queued
        self._running: list[str] = []
        self._cluster = MemoryCluster()
        # The console then uses this cluster in place of the one in its settings.
        clusters.create = lambda _kind, **_options: self._cluster  # type: ignore[assignment,return-value]
        clusters.cluster.cache_clear()
        self._copies = PurchaseCopies(self._cluster, ORGANIZATIONS, SHAPES)
        self._copies.add_finished(finished)
        self._copies.queue_up_to(queued)
        threading.Thread(target=watcher.follow_all, args=(threading.Event(),), daemon=True).start()

    def idle_pass_milliseconds(self, passes: int) -> float:
        """Return the median duration of a scheduling pass for a full cluster."""
        from jobs import dispatch  # noqa: PLC0415 - Django must be set up first

        milliseconds = []
        for _ in range(passes + 1):
            started_at = time.perf_counter()
            dispatch.dispatch_queue()
            milliseconds.append((time.perf_counter() - started_at) * 1000)
        return statistics.median(milliseconds[1:])  # the first pass fills caches

    def claims_per_second(self, cores: int) -> float:
        """Dispatch the jobs that fit on `cores` cores.

        Returns claims per second, from reading the queue to the last submission.
        """
        from jobs import dispatch  # noqa: PLC0415 - Django must be set up first

        self._copies.queue_up_to(self._queued)
        self._cluster.cores = float(cores)
        started_at = time.perf_counter()
        submitted: list[str] = []
        while not submitted:  # the dispatcher may hold the cluster's lock at first
            dispatch.dispatch_queue()
            submitted = self._read_submissions()
        seconds = time.perf_counter() - started_at
        self._running = self._cluster.running()
        if set(submitted) != set(self._running):
            raise SystemExit(f"{len(submitted)} runs were submitted, and {len(self._running)} run")
        return len(submitted) / seconds

    def run_end_to_claim_milliseconds(self, runs: int) -> float:
        """Return the median time from the end of a run to the submission of another in its place."""
        milliseconds = []
        for name in self._running[:runs]:
            ended_at = time.perf_counter()
            self._cluster.end(name)
            try:
                submitted_at = ended_at
                while submitted_at <= ended_at:  # submissions of an earlier pass do not count
                    _name, submitted_at = self._cluster.submissions.get(timeout=START_SECONDS)
            except queue.Empty:
                raise SystemExit(f"Nothing was started in {START_SECONDS:.0f} s after {name} had ended.") from None
            milliseconds.append((submitted_at - ended_at) * 1000)
            self._cluster.wait_for_watcher()  # so that the next measurement begins without a backlog
            self._read_submissions()
        return statistics.median(milliseconds)

    def memory_mib(self) -> float:
        """Return the process's largest memory use so far."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    def end_all_runs(self) -> None:
        """End all runs, with no cores for others."""
        self._cluster.cores = 0.0
        while True:
            for name in self._cluster.running():
                self._cluster.end(name)
            self._cluster.wait_for_watcher()
            try:
                # A scheduling pass that read the capacity before the cores were taken away may still start a run.
                self._cluster.submissions.get(timeout=QUIET_SECONDS)
            except queue.Empty:
                break
        if running := self._cluster.running():
            raise SystemExit(f"{len(running)} runs still run")

    def _read_submissions(self) -> list[str]:
        names = []
        while not self._cluster.submissions.empty():
            names.append(self._cluster.submissions.get()[0])
        return names


def run_worker(commands: Connection, environment: dict[str, str], queued: int, finished: int) -> None:
    """Run a worker process: create its jobs, report its memory, then call methods until the command is None."""
    os.environ |= environment
    django.setup()
    from celery.contrib.testing.worker import start_worker  # noqa: PLC0415 - Django must be set up first

    from console.celery import app  # noqa: PLC0415 - as above

    worker = QueueWorker(queued, finished)
    # The dispatcher runs in this process, because the cluster is in its memory.
    with start_worker(app, pool="solo", perform_ping_check=False, queues=("dispatch",)):
        commands.send(worker.memory_mib())  # `control_plane` takes this as the sign that the worker is ready
        while (command := commands.recv()) is not None:
            method, arguments = command
            commands.send(getattr(worker, method)(*arguments))
