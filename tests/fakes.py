"""A fake cluster that keeps the backend's contract; the test decides what happens in it."""

from __future__ import annotations

import io
import json
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from runtime.backends import log_chunks
from runtime.backends.base import Tunnel
from runtime.backends.supervision.folder_backend import FolderBackend
from runtime.errors import BackendUnavailable, InvalidSpec, NoCapacity, RunNotFound, RuntimeFault
from runtime.launcher.notebook import SOCKET
from runtime.specs import (
    Capacity,
    Controller,
    Failure,
    FailureCode,
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
"""How often `changes` yields when nothing changes."""
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
    """One run of the fake cluster. `output` holds each rank's bytes, `samples` each node's, `stacks` each rank's.

    `log_times` holds (offset, Unix seconds) of each rank's writes. At `kill_at` the grace period of a stopped run ends.
    """

    spec: RunSpec
    status: RunStatus
    output: dict[int, bytes] = field(default_factory=dict)
    log_times: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    samples: dict[int, bytes] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)
    kill_at: float = math.inf


class FakeBackend:
    """A cluster in memory that keeps the contract of `runtime.backends.base.Backend`. Thread-safe.

    Nothing runs by itself: `start`, `write`, `sample`, `progress`, `shrink`, `hang`, `end` and `lose` change a run, at
    the time of `clock`. No run lasts longer than its deadline, as on a real cluster, unless a test sets
    `keeps_deadlines = False`. `available = False` makes every call raise BackendUnavailable; `refuses[name]` is raised
    by that run's submit.
    """

    # What this kind of backend can do: see `Backend`.
    shares_storage = True
    extends_runs = True
    has_notebooks = True
    parallel_submissions = 1

    def __init__(
        self, *, root: Path, cpus: float = 8.0, memory_mib: int = 65536, clock: Callable[[], float] = time.time
    ) -> None:
        self.root = root
        self.total = Resources(cpus, memory_mib)
        self.clock = clock
        self.available = True
        self.keeps_deadlines = True
        self.refuses: dict[str, RuntimeFault] = {}
        self.submissions: list[str] = []  # the run of each call of `submit`, also of a repeated one
        self.runs: dict[str, FakeRun] = {}
        self.checkpoints: set[str] = set()  # keys of submitted runs, until `delete_shared`
        self.missing_images: set[str] = set()
        self.image_digest = "sha256:1"
        self.images_with_mpi: set[str] = set()
        self.images_for_cpus: set[str] = set()
        self._changed = threading.Condition(threading.RLock())
        self._log: list[str] = []  # the run of each change, oldest first

    # The contract: see `Backend`

    def submit(self, spec: RunSpec) -> None:
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
            self._notify(spec.name)

    def describe(self, name: str) -> RunStatus:
        with self._answering():
            self._enforce(self._run(name))
            return self._run(name).status

    def logs(
        self,
        name: str,
        rank: int,
        offset: int = 0,
        limit: int = 65536,
        *,
        at_line: bool = False,
        with_times: bool = False,
    ) -> LogChunk:
        with self._answering():
            run = self._run(name)
            raw_chunk = log_chunks.read_raw_chunk(io.BytesIO(run.output.get(rank, b"")), offset, limit)
            ended = run.status.phase is RunPhase.ENDED and raw_chunk.at_end
            times = run.log_times.get(rank, []) if with_times else None
            return log_chunks.text_chunk(raw_chunk, is_final=ended, at_line=at_line, times=times)

    def samples(self, name: str, node: int, offset: int = 0, limit: int = 65536) -> LogChunk:
        with self._answering():
            run = self._run(name)
            raw_chunk = log_chunks.read_raw_chunk(io.BytesIO(run.samples.get(node, b"")), offset, limit)
            ended = run.status.phase is RunPhase.ENDED and raw_chunk.at_end
            return log_chunks.lines_chunk(raw_chunk.data, raw_chunk.offset, is_final=ended)

    def stacks(self, name: str) -> dict[int, str]:
        with self._answering():
            return dict(self._run(name).stacks)

    def stop(self, name: str, grace_seconds: int) -> None:
        """See `Backend.stop`. The code ends after its grace period, or when the test calls `end`."""
        with self._answering():
            run = self.runs.get(name)
            if run is None or run.status.phase is RunPhase.ENDED:
                return
            run.kill_at = min(run.kill_at, self.clock() + grace_seconds)
            run.status = replace(run.status, phase=RunPhase.STOPPING)
            self._notify(name)

    def extend(self, name: str, deadline_seconds: int) -> None:
        with self._answering():
            run = self._run(name)
            if run.status.phase is RunPhase.RUNNING and deadline_seconds > run.spec.deadline_seconds:
                run.spec = replace(run.spec, deadline_seconds=deadline_seconds)

    def kill(self, name: str) -> None:
        with self._answering():
            if name in self.runs:
                self.end(name, Outcome.NODE_LOST)

    def delete(self, name: str) -> None:
        with self._answering():
            shutil.rmtree(self.run_folder(name), ignore_errors=True)
            if self.runs.pop(name, None):
                self._notify(name)

    def delete_shared(self, checkpoint_key: str) -> None:
        with self._answering():
            shutil.rmtree(self.checkpoint_folder(checkpoint_key), ignore_errors=True)
            shutil.rmtree(self.output_folder(checkpoint_key), ignore_errors=True)
            self.checkpoints.discard(checkpoint_key)

    fill_checkpoints = FolderBackend.fill_checkpoints

    def names(self, *, live: bool = False) -> list[str]:
        with self._answering():
            return sorted(name for name, run in self.runs.items() if not live or run.status.phase is not RunPhase.ENDED)

    def check_image(self, image: Image, controller: Controller = Controller.GLOO, *, gpus: int = 0) -> None:
        with self._answering():
            if image.builtin in self.missing_images:
                raise InvalidSpec("It is not built.", field="image")
            if controller is Controller.MPI and image.builtin not in self.images_with_mpi:
                raise InvalidSpec("It has no mpirun.", field="controller")
            if gpus and image.builtin in self.images_for_cpus:
                raise InvalidSpec("It cannot use GPUs.", field="gpus")

    def stop_prepared_processes(self) -> None:
        """Do nothing."""

    def image_identity(self, image: Image) -> str:
        """Return the built image's name with a digest that a test may change, or the reference."""
        return image.reference or f"{image.builtin}@{self.image_digest}"

    def isolation_gaps(self) -> list[str]:
        """Return none."""
        return []

    def capacity(self) -> Capacity:
        """See `Backend.capacity`. There is one machine."""
        with self._answering():
            live = [run.spec for run in self.runs.values() if run.status.phase is not RunPhase.ENDED]
            cpus = self.total.cpus - sum(spec.resources.cpus * spec.nodes for spec in live)
            memory = self.total.memory_mib - sum(spec.resources.memory_mib * spec.nodes for spec in live)
            free = Resources(max(0.0, round(cpus, 6)), max(0, memory))
            return Capacity((NodeCapacity("fake", self.total, free),))

    def is_reachable(self) -> bool:
        return self.available

    def changes(self, stop_after_seconds: float | None = None) -> Iterator[set[str]]:
        seen = len(self._log)
        end = math.inf if stop_after_seconds is None else time.monotonic() + stop_after_seconds
        while time.monotonic() < end:
            with self._changed:
                self._changed.wait_for(lambda seen=seen: len(self._log) > seen, timeout=HEARTBEAT_SECONDS)
                fresh, seen = set(self._log[seen:]), len(self._log)
            yield fresh

    environment = FolderBackend.environment  # it only reads the spec

    def run_folder(self, name: str) -> Path:
        return self.root / name

    def shell_socket(self, name: str, node: int) -> Path | None:
        path = self.root / name / f"{node}.shell"
        return path if path.is_socket() else None

    def notebook_socket(self, name: str) -> Path | Tunnel | None:
        return self.run_folder(name) / "run" / SOCKET

    def checkpoint_folder(self, checkpoint_key: str) -> Path:
        return self.root / ".checkpoints" / checkpoint_key

    def output_folder(self, checkpoint_key: str) -> Path:
        return self.root / ".outputs" / checkpoint_key

    # What a test does to a run

    def start(self, name: str, *, at: float | None = None) -> None:
        """Let every node run the code from `at` (now) on."""
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
            self._notify(name)

    def wait(self, name: str, code: str, **data: Any) -> None:
        """Let the run's nodes wait for something (`runtime.specs.WaitingCode`)."""
        with self._changed:
            run = self._run(name)
            run.status = replace(run.status, waiting_for=code, waiting_code=code, waiting_data=data)
            self._notify(name)

    def write(self, name: str, text: str, *, rank: int = 0) -> None:
        """Let a rank write output."""
        with self._changed:
            run = self._run(name)
            before = run.output.get(rank, b"")
            run.log_times.setdefault(rank, []).append((len(before), self.clock()))
            run.output[rank] = before + text.encode()
            self._notify(name)

    def sample(self, name: str, line: Mapping[str, Any], *, node: int = 0) -> None:
        """Add a sample of a node's launcher."""
        with self._changed:
            run = self._run(name)
            run.samples[node] = run.samples.get(node, b"") + json.dumps(line).encode() + b"\n"

    def progress(self, name: str, *, at: float | None = None, checkpoint: bool = False) -> None:
        """Let the run progress at `at` (now), and write a checkpoint if `checkpoint` is set."""
        with self._changed:
            run = self._run(name)
            moment = self.clock() if at is None else at
            run.status = replace(run.status, progress_at=moment)
            if checkpoint:
                run.status = replace(run.status, checkpoint_at=moment)
            self._notify(name)

    def shrink(self, name: str, nodes: int, *, at: float | None = None) -> None:
        """Let an elastic run continue with `nodes` nodes from `at` (now) on."""
        with self._changed:
            run = self._run(name)
            if run.status.phase is not RunPhase.RUNNING:
                return
            moment = self.clock() if at is None else at
            *before, last = run.status.spans
            spans = (*before, replace(last, finished_at=moment), Span(nodes, moment))
            run.status = replace(run.status, spans=spans, restarts=run.status.restarts + 1)
            self._notify(name)

    def hang(
        self,
        name: str,
        *,
        at: float | None = None,
        progress_at: float | None = None,
        data: dict[str, Any] | None = None,
    ) -> None:
        """End a run as hung at `at` (now), with `data` in its failure. Its last progress was at `progress_at`."""
        with self._changed:
            run = self._run(name)
            if progress_at is not None:
                run.status = replace(run.status, progress_at=progress_at)
            run.stacks = {rank: f"rank {rank}: in all_reduce\n" for rank in range(run.spec.world_size)}
            self.end(name, Outcome.HUNG, at=at, data=data)

    def end(
        self,
        name: str,
        outcome: Outcome,
        *,
        at: float | None = None,
        message: str = "",
        rank: int | None = None,
        data: dict[str, Any] | None = None,
    ) -> None:
        """End the run's last process at `at` (now), or at the run's deadline if that is earlier.

        `message` and `data` are those of its failure. `rank` is the rank that failed first; its exit code is 1.
        """
        with self._changed:
            run = self._run(name)
            if run.status.phase is RunPhase.ENDED:
                return
            finished = self.clock() if at is None else at
            if finished > self._deadline(run):
                finished, outcome = self._deadline(run), Outcome.TIME_LIMIT
            failure = None
            if outcome is not Outcome.COMPLETED:
                failure = Failure(message or f"It ended: {outcome}.", code=CODE_OF[outcome], data=data or {})
                if rank is not None:
                    node = rank // run.spec.workers_per_node
                    failure = replace(failure, rank=rank, node=node, exit_code=1)
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
            self._notify(name)

    def lose(self, name: str) -> None:
        """Delete the run without a trace, as when its machine is lost."""
        with self._changed:
            self.runs.pop(name, None)
            self._notify(name)

    # Internals

    def _enforce(self, run: FakeRun) -> None:
        """End a run at the end of its grace period or its deadline, if that has passed."""
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
        """Return the lock for a call of the contract. Raise BackendUnavailable while the cluster is not available."""
        if not self.available:
            raise BackendUnavailable("The fake cluster is away.")
        return self._changed

    def _notify(self, name: str) -> None:
        self._log.append(name)
        self._changed.notify_all()
