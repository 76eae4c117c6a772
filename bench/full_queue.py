"""A console's worker with a full queue and a history, on a cluster in memory: the other half of `bench.control_plane`.

Hides how thousands of purchases are made in seconds: a few are bought as anybody buys, and their rows are copied. The
one rule: what is timed is the product's own code on a real database; only the cluster is imagined.
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
SHAPES = (("nano", 1), ("nano", 2), ("small", 1), ("small", 4))
"""What is bought, in turn."""
PATIENCE = 60.0
CALM = 0.5
"""Nothing is started any more when nothing was for so long, without room."""


class ImaginedCluster:
    """A backend in memory with as much room as `cores`: runs start at once, and end when they are told to."""

    submits_at_once = 1

    def __init__(self) -> None:
        self.cores = 0.0
        self.submitted: queue.Queue[tuple[str, float]] = queue.Queue()
        self._runs: dict[str, tuple[RunSpec, RunStatus]] = {}
        self._used = 0.0
        self._changes: queue.Queue[str] = queue.Queue()
        self._lock = threading.Lock()

    def submit(self, spec: RunSpec) -> None:
        """See `Backend`. Every node runs at once."""
        now = time.time()
        nodes = tuple(NodeStatus(node, RunPhase.RUNNING, started_at=now) for node in range(spec.nodes))
        status = RunStatus(spec.name, RunPhase.RUNNING, nodes, now, now, spans=(Span(spec.nodes, now),))
        with self._lock:
            self._runs[spec.name] = spec, status
            self._used += spec.resources.cpus * spec.nodes
        self.submitted.put((spec.name, time.perf_counter()))

    def end(self, name: str) -> None:
        """The run completes, and whoever follows the cluster hears of it."""
        now = time.time()
        with self._lock:
            spec, status = self._runs[name]
            spans = (replace(status.spans[0], finished_at=now),)
            status = replace(status, phase=RunPhase.ENDED, finished_at=now, outcome=Outcome.COMPLETED, spans=spans)
            self._runs[name] = spec, status
            self._used -= spec.resources.cpus * spec.nodes
        self._changes.put(name)

    def live(self) -> list[str]:
        """What runs."""
        return [name for name, (_spec, status) in self._runs.items() if status.phase is RunPhase.RUNNING]

    def describe(self, name: str) -> RunStatus:
        """See `Backend`."""
        return self._runs[name][1]

    def names(self, *, live: bool = False) -> list[str]:
        """See `Backend`."""
        return self.live() if live else list(self._runs)

    def capacity(self) -> Capacity:
        """See `Backend`: machines of 64 cores that are filled one after another."""
        total = Resources(64.0, 2**20)
        room, machines = max(0.0, self.cores - self._used), []
        for number in range(64):
            free = min(room, 64.0)
            room -= free
            machines.append(NodeCapacity(f"node-{number}", total, replace(total, cpus=free)))
        return Capacity(tuple(machines))

    def changes(self, stop_after: float | None = None) -> Iterator[set[str]]:
        """See `Backend`."""
        while True:
            try:
                name = self._changes.get(timeout=0.5)
            except queue.Empty:
                yield set()
                continue
            yield {name}
            self._changes.task_done()

    def wait_until_taken_in(self) -> None:
        """Return once whoever follows the cluster has dealt with every change."""
        self._changes.join()

    def logs(self, name: str, rank: int, offset: int = 0, limit: int = 65536) -> LogChunk:
        """Runs print nothing."""
        return LogChunk("", offset, eof=True)

    def run_folder(self, name: str) -> Path:
        """They write nothing either."""
        return Path("/nonexistent")

    def isolation_gaps(self) -> list[str]:
        """None."""
        return []

    def check_image(self, image: Image, controller: Controller = Controller.GLOO) -> None:
        """Every image can be run."""


class Worker:
    """What one worker process does, asked for by `control_plane`."""

    def __init__(self, queued: int, finished: int) -> None:
        from bench.copies import Copies  # noqa: PLC0415 - Django must be set up first
        from jobs import queue as waiting  # noqa: PLC0415 - as above
        from jobs import watching  # noqa: PLC0415 - as above

        # On a slow machine the queue would grow older than that, and room be kept free for a large run, as it should.
        waiting.PATIENCE = timedelta(days=1)
        self._queued = queued
        self.cluster = ImaginedCluster()
        install(self.cluster)
        self._copies = Copies(self.cluster, ORGANIZATIONS, SHAPES)
        self._copies.finish(finished)
        self._copies.queue_up_to(queued)
        self._stop = threading.Event()
        follower = threading.Thread(target=watching.follow_all, args=(self._stop,), daemon=True)
        follower.start()

    def idle_pass(self, times: int) -> float:
        """Median milliseconds of a pass over the queue of a full cluster."""
        from jobs import dispatch  # noqa: PLC0415 - Django must be set up first

        took = []
        for _ in range(times + 1):
            begun = time.perf_counter()
            dispatch.dispatch_queue()
            took.append((time.perf_counter() - begun) * 1000)
        return statistics.median(took[1:])

    def claims(self, count: int) -> float:
        """Claims per second, from the look at the queue until the cluster has the runs."""
        from jobs import dispatch  # noqa: PLC0415 - Django must be set up first

        self._copies.queue_up_to(self._queued)
        self.cluster.cores = count * 1.0
        begun = time.perf_counter()
        dispatch.dispatch_queue()
        took = time.perf_counter() - begun
        started = self._drain()
        self._expect(started, self.cluster.live())
        self._running = self.cluster.live()
        return len(started) / took

    def free_to_claim(self, times: int) -> float:
        """Median milliseconds from the end of a run until another is handed to the cluster in its place."""
        waits = []
        for name in self._running[:times]:
            ended = time.perf_counter()
            self.cluster.end(name)
            try:
                at = ended
                while at <= ended:  # what a pass of before has started late does not count
                    _next, at = self.cluster.submitted.get(timeout=PATIENCE)
            except queue.Empty:
                raise SystemExit(f"Nothing was started in {PATIENCE:.0f} s after {name} had ended.") from None
            waits.append((at - ended) * 1000)
            self.cluster.wait_until_taken_in()  # what is timed is one end, not a backlog of them
            self._drain()
        return statistics.median(waits)

    def memory(self) -> float:
        """MiB that the process had at its largest."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    def calm(self) -> None:
        """End what runs, without room for more."""
        self.cluster.cores = 0.0
        while True:
            for name in self.cluster.live():
                self.cluster.end(name)
            self.cluster.wait_until_taken_in()
            try:
                self.cluster.submitted.get(timeout=CALM)  # a pass that was under way had seen room
            except queue.Empty:
                break
        self._expect([], self.cluster.live())

    def _drain(self) -> list[str]:
        found = []
        while not self.cluster.submitted.empty():
            found.append(self.cluster.submitted.get()[0])
        return found

    @staticmethod
    def _expect(wanted: list[str], found: list[str]) -> None:
        if set(wanted) != set(found):
            raise SystemExit(f"{len(wanted)} runs were to be there, and {len(found)} are")


def install(cluster: ImaginedCluster) -> None:
    """Make it the console's one cluster."""
    from jobs import backend  # noqa: PLC0415 - Django must be set up first

    backend.create = lambda _kind, **_options: cluster  # type: ignore[assignment,return-value]
    backend.cluster.cache_clear()


def serve(orders: Connection, environment: dict[str, str], queued: int, finished: int) -> None:
    """A process: makes its queue, then does what it is told by (method, arguments)."""
    os.environ |= environment
    django.setup()
    worker = Worker(queued, finished)
    orders.send(worker.memory())
    while (order := orders.recv()) is not None:
        method, *arguments = order
        orders.send(getattr(worker, method)(*arguments))
