"""Fakes that behave: they keep the contract of what they stand for, and let a test decide what happens next."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from runtime.errors import BackendUnavailable, InvalidSpec, NoCapacity, RunNotFound, RuntimeFault
from runtime.launcher.frameworks import rank_environment
from runtime.launcher.topology import Plan
from runtime.specs import (
    Capacity,
    Controller,
    Failure,
    FailureCode,
    Framework,
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

HEARTBEAT_SECONDS = 0.05
CODE_OF = {
    Outcome.CODE_FAILED: FailureCode.RANK_EXITED,
    Outcome.OUT_OF_MEMORY: FailureCode.OUT_OF_MEMORY,
    Outcome.DISK_FULL: FailureCode.DISK_FULL,
    Outcome.HUNG: FailureCode.HUNG,
    Outcome.STOPPED: FailureCode.STOPPED,
    Outcome.TIME_LIMIT: FailureCode.TIME_LIMIT,
    Outcome.NODE_LOST: FailureCode.NODE_LOST,
    Outcome.NO_CAPACITY: FailureCode.NODES_NOT_PLACED,
    Outcome.PLATFORM_ERROR: FailureCode.PLATFORM_ERROR,
}


@dataclass
class FakeRun:
    """One run of the fake cluster. `output` holds each rank's bytes, `samples` each node's, `stacks` each rank's."""

    spec: RunSpec
    status: RunStatus
    output: dict[int, bytes] = field(default_factory=dict)
    samples: dict[int, bytes] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)
    kill_at: float = math.inf


class FakeBackend:
    """A cluster in memory that keeps `runtime.backends.base.Backend`'s contract. Thread-safe.

    Nothing runs by itself: `start`, `write`, `sample`, `progress`, `shrink`, `hang`, `end` and `lose` make things
    happen, at the time that `clock` tells. What the backend enforces is enforced here too: no run lasts longer than its
    deadline, whatever a test says (unless it sets `keeps_deadlines = False`, for a cluster that is late).
    `available = False` makes every call raise BackendUnavailable; `refuses[name]` is raised by that run's submit.
    """

    submits_at_once = 1

    def __init__(
        self, *, root: Path, cpus: float = 8.0, memory_mib: int = 65536, clock: Callable[[], float] = time.time
    ) -> None:
        self.root = root
        self.total = Resources(cpus, memory_mib)
        self.clock = clock
        self.available = True
        self.keeps_deadlines = True
        self.refuses: dict[str, RuntimeFault] = {}
        self.submissions: list[str] = []
        self.runs: dict[str, FakeRun] = {}
        self.checkpoints: set[str] = set()
        self.missing_images: set[str] = set()
        self.images_with_mpi: set[str] = set()
        self._changed = threading.Condition(threading.RLock())
        self._log: list[str] = []

    # The contract

    def submit(self, spec: RunSpec) -> None:
        """See `Backend.submit`."""
        with self._answering():
            self.submissions.append(spec.name)
            if spec.name in self.runs:
                return
            if fault := self.refuses.get(spec.name):
                raise fault
            if self.capacity().nodes_ever(spec.resources) < spec.nodes:
                raise InvalidSpec("This can never fit.", field="nodes")
            if self.capacity().nodes_now(spec.resources) < spec.nodes:
                raise NoCapacity("There is no room now.")
            nodes = tuple(NodeStatus(node, RunPhase.STARTING) for node in range(spec.nodes))
            status = RunStatus(
                spec.name, RunPhase.STARTING, nodes, submitted_at=self.clock(), waiting_for="The nodes start."
            )
            self.runs[spec.name] = FakeRun(spec, status)
            if spec.checkpoint_key:
                self.checkpoints.add(spec.checkpoint_key)
            (self.run_folder(spec.name) / "run").mkdir(parents=True, exist_ok=True)
            self._ring(spec.name)

    def describe(self, name: str) -> RunStatus:
        """See `Backend.describe`."""
        with self._answering():
            self._enforce(self._run(name))
            return self._run(name).status

    def logs(self, name: str, rank: int, offset: int = 0, limit: int = 65536) -> LogChunk:
        """See `Backend.logs`."""
        with self._answering():
            run = self._run(name)
            stored = run.output.get(rank, b"")
            piece = stored[offset : offset + limit]
            ended = run.status.phase is RunPhase.ENDED and offset + len(piece) >= len(stored)
            return LogChunk(piece.decode("utf-8", "replace"), offset + len(piece), ended)

    def samples(self, name: str, node: int, offset: int = 0, limit: int = 65536) -> LogChunk:
        """See `Backend.samples`."""
        with self._answering():
            run = self._run(name)
            stored = run.samples.get(node, b"")
            piece = stored[offset : offset + limit]
            piece = piece[: piece.rfind(b"\n") + 1]
            ended = run.status.phase is RunPhase.ENDED and offset + len(piece) >= len(stored)
            return LogChunk(piece.decode(), offset + len(piece), ended)

    def stacks(self, name: str) -> dict[int, str]:
        """See `Backend.stacks`."""
        with self._answering():
            return dict(self._run(name).stacks)

    def stop(self, name: str, grace_seconds: int) -> None:
        """See `Backend.stop`. The fake code ends when its grace is over, or when the test says `end`."""
        with self._answering():
            run = self.runs.get(name)
            if run is None or run.status.phase is RunPhase.ENDED:
                return
            run.kill_at = min(run.kill_at, self.clock() + grace_seconds)
            run.status = replace(run.status, phase=RunPhase.STOPPING)
            self._ring(name)

    def delete(self, name: str) -> None:
        """See `Backend.delete`."""
        with self._answering():
            if self.runs.pop(name, None):
                self._ring(name)

    def delete_checkpoints(self, key: str) -> None:
        """See `Backend.delete_checkpoints`."""
        with self._answering():
            self.checkpoints.discard(key)

    def names(self, *, live: bool = False) -> list[str]:
        """See `Backend.names`."""
        with self._answering():
            return sorted(name for name, run in self.runs.items() if not live or run.status.phase is not RunPhase.ENDED)

    def check_image(self, image: Image, controller: Controller = Controller.GLOO) -> None:
        """See `Backend.check_image`."""
        with self._answering():
            if image.builtin in self.missing_images:
                raise InvalidSpec("It is not built.", field="image")
            if controller is Controller.MPI and image.builtin not in self.images_with_mpi:
                raise InvalidSpec("It has no mpirun.", field="controller")

    def prepare(self, image: Image) -> None:
        """Nothing is kept ready."""

    def retire(self) -> None:
        """Nothing is kept ready."""

    def isolation_gaps(self) -> list[str]:
        """None."""
        return []

    def capacity(self) -> Capacity:
        """See `Backend.capacity`: one machine."""
        with self._answering():
            live = [run.spec for run in self.runs.values() if run.status.phase is not RunPhase.ENDED]
            cpus = self.total.cpus - sum(spec.resources.cpus * spec.nodes for spec in live)
            memory = self.total.memory_mib - sum(spec.resources.memory_mib * spec.nodes for spec in live)
            free = Resources(max(0.0, round(cpus, 6)), max(0, memory))
            return Capacity((NodeCapacity("fake", self.total, free),))

    def changes(self, stop_after: float | None = None) -> Iterator[set[str]]:
        """See `Backend.changes`."""
        seen = len(self._log)
        end = math.inf if stop_after is None else time.monotonic() + stop_after
        while time.monotonic() < end:
            with self._changed:
                self._changed.wait_for(lambda seen=seen: len(self._log) > seen, timeout=HEARTBEAT_SECONDS)
                fresh, seen = set(self._log[seen:]), len(self._log)
            yield fresh

    def environment(self, spec: RunSpec, rank: int) -> dict[str, str]:
        """See `Backend.environment`."""
        world = spec.nodes * spec.workers_per_node
        plan = Plan(
            run_id=spec.name,
            node=rank // spec.workers_per_node,
            nodes=spec.nodes,
            workers=spec.workers_per_node,
            framework=spec.framework.value,
            backend="gloo",
            addresses=["127.0.0.1"] * spec.nodes,
            master_port=0,
            script=spec.script,
            arguments=list(spec.arguments),
            epochs=spec.epochs,
            lr=spec.lr,
            batch_size=spec.batch_size,
            datasets=list(spec.datasets),
            datasets_path=spec.datasets_target,
            workspace=spec.workspace_target,
            run_dir="/run/trainyard",
            checkpoint_dir="/checkpoints",
            restart_count=spec.restart_count,
            omp_threads=1,
            traceparent=spec.traceparent,
            interface="lo",
            worker_ports=[0] * world if spec.framework is Framework.TENSORFLOW else [],
        )
        return rank_environment(plan, rank % spec.workers_per_node)

    def run_folder(self, name: str) -> Path:
        """See `Backend.run_folder`."""
        return self.root / name

    # What a test makes happen

    def start(self, name: str, *, at: float | None = None) -> None:
        """Every node runs the code, from `at` (now) on."""
        with self._changed:
            run = self._run(name)
            if run.status.phase is not RunPhase.STARTING:
                return
            began = self.clock() if at is None else at
            nodes = tuple(replace(node, phase=RunPhase.RUNNING, started_at=began) for node in run.status.nodes)
            run.status = replace(
                run.status,
                phase=RunPhase.RUNNING,
                nodes=nodes,
                started_at=began,
                spans=(Span(len(nodes), began),),
                progress_at=began,
                waiting_for="",
                waiting_code="",
                waiting_data={},
            )
            self._ring(name)

    def wait(self, name: str, code: str, **data: Any) -> None:
        """The run's nodes wait for something (`runtime.specs.WaitingCode`)."""
        with self._changed:
            run = self._run(name)
            run.status = replace(run.status, waiting_for=code, waiting_code=code, waiting_data=data)
            self._ring(name)

    def write(self, name: str, text: str, *, rank: int = 0) -> None:
        """A rank writes a piece of output."""
        with self._changed:
            run = self._run(name)
            run.output[rank] = run.output.get(rank, b"") + text.encode()
            self._ring(name)

    def sample(self, name: str, line: Mapping[str, Any], *, node: int = 0) -> None:
        """A node's launcher took a sample."""
        with self._changed:
            run = self._run(name)
            run.samples[node] = run.samples.get(node, b"") + json.dumps(line).encode() + b"\n"

    def progress(self, name: str, *, at: float | None = None, checkpoint: bool = False) -> None:
        """The run shows a sign of progress at `at` (now); `checkpoint`: it writes one."""
        with self._changed:
            run = self._run(name)
            moment = self.clock() if at is None else at
            run.status = replace(run.status, progress_at=moment)
            if checkpoint:
                run.status = replace(run.status, checkpoint_at=moment)
            self._ring(name)

    def shrink(self, name: str, nodes: int, *, at: float | None = None) -> None:
        """An elastic run goes on with `nodes` nodes from `at` (now) on."""
        with self._changed:
            run = self._run(name)
            if run.status.phase is not RunPhase.RUNNING:
                return
            moment = self.clock() if at is None else at
            *before, last = run.status.spans
            spans = (*before, replace(last, finished_at=moment), Span(nodes, moment))
            run.status = replace(run.status, spans=spans, restarts=run.status.restarts + 1)
            self._ring(name)

    def hang(self, name: str, *, at: float | None = None, progress_at: float | None = None) -> None:
        """The run is found hung and ended at `at` (now); its last sign of progress was at `progress_at`."""
        with self._changed:
            run = self._run(name)
            if progress_at is not None:
                run.status = replace(run.status, progress_at=progress_at)
            run.stacks = {rank: f"rank {rank}: in all_reduce\n" for rank in range(run.spec.world_size)}
            self.end(name, Outcome.HUNG, at=at)

    def end(self, name: str, outcome: Outcome, *, at: float | None = None, message: str = "") -> None:
        """The run's last process ends at `at` (now). A run that would last past its deadline ends there instead."""
        with self._changed:
            run = self._run(name)
            if run.status.phase is RunPhase.ENDED:
                return
            finished = self.clock() if at is None else at
            if finished > self._deadline(run):
                finished, outcome = self._deadline(run), Outcome.TIME_LIMIT
            failure = None
            if outcome is not Outcome.COMPLETED:
                failure = Failure(message or f"It ended: {outcome}.", code=CODE_OF[outcome])
            spans = tuple(replace(span, finished_at=span.finished_at or finished) for span in run.status.spans)
            nodes = tuple(replace(node, phase=RunPhase.ENDED, finished_at=finished) for node in run.status.nodes)
            run.status = replace(
                run.status,
                phase=RunPhase.ENDED,
                nodes=nodes,
                finished_at=finished,
                outcome=outcome,
                failure=failure,
                spans=spans,
                waiting_for="",
            )
            self._ring(name)

    def lose(self, name: str) -> None:
        """The run is gone without a trace, as when its machine is."""
        with self._changed:
            self.runs.pop(name, None)
            self._ring(name)

    # Inside

    def _enforce(self, run: FakeRun) -> None:
        """End what outlived its grace or its deadline, at the very moment that it did."""
        if run.status.phase is RunPhase.ENDED:
            return
        limit = self._deadline(run)
        if self.clock() >= min(limit, run.kill_at):
            outcome = Outcome.TIME_LIMIT if limit <= run.kill_at else Outcome.STOPPED
            self.end(run.spec.name, outcome, at=min(limit, run.kill_at))

    def _deadline(self, run: FakeRun) -> float:
        started = run.status.started_at
        return started + run.spec.deadline_seconds if started is not None and self.keeps_deadlines else math.inf

    def _run(self, name: str) -> FakeRun:
        try:
            return self.runs[name]
        except KeyError:
            raise RunNotFound(f"There is no run {name}.") from None

    def _answering(self) -> threading.Condition:
        if not self.available:
            raise BackendUnavailable("The fake cluster is away.")
        return self._changed

    def _ring(self, name: str) -> None:
        self._log.append(name)
        self._changed.notify_all()
