"""The folder of one run on a Slurm cluster.

    <root>/<name>/submission.json        the spec, the time of submission, the job's id
                  order.json             what the nodes need, with secrets; deleted when all nodes have read it
                  stop.json              a request to end
                  end.json               why the console ended the run itself
                  final.json             the nodes' last records and what Slurm said about them
                  nodes/, logs/, run/, checkpoints/, outputs/   as of a local run; see `runtime.backends.local.runs`
                  nodes/<node>.meeting   a node's address and ports
                  logs/slurm.log         what the batch script and srun print
    <root>/.active/, .changes/, .checkpoints/, .outputs/, .trash/    as for local runs
    <root>/.program/<version>/           the program of the compute nodes
    <root>/.locks/                       locks of submissions

`submission.json` is written last, by a rename, when the job was submitted. Without it the run does not exist: its nodes
do not start, and a later submission may clear the folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
from pathlib import Path
from typing import Any

from runtime.backends.slurm import evidence
from runtime.backends.slurm.commands import Slurm
from runtime.backends.slurm.config import SlurmConfig
from runtime.backends.slurm.evidence import Loss, Record, Request, Scene
from runtime.backends.slurm.node import ORDER_FILE, STOP_SIGNAL, refresh
from runtime.backends.slurm.pending import explain
from runtime.backends.slurm.states import JobState
from runtime.backends.supervision import outcome, peer_liveness
from runtime.backends.supervision.folder_backend import TRASH
from runtime.errors import BackendUnavailable, RunNotFound
from runtime.files import write_json
from runtime.specs import FailureCode, Outcome, RunPhase, RunSpec, RunStatus
from runtime.trash import Trash

_HEALTHY_SECONDS = 15.0
"""Without a heartbeat for so long, Slurm is asked about a running node."""
_STOP_MARGIN_SECONDS = 30.0
"""How long after its grace period a stopped run may still have a job before Slurm is asked to end it."""
_FRESH_SECONDS = 1.0
"""Age of Slurm's answers about a run that starts or has signs of trouble."""
_KILL_SECONDS = 60.0
"""How long a killed job may take to end before its deletion is given up. Slurm waits for every machine of it."""
_KILL_POLL_SECONDS = 0.2
_PLAIN_ENDS = frozenset({"COMPLETED", "FAILED"})
"""States of a job that ended by itself."""


class SlurmRun:
    """The folder and the job of one run, which may not exist. `root` holds the folders of all runs."""

    def __init__(self, root: Path, name: str, slurm: Slurm, config: SlurmConfig) -> None:
        self.name = name
        self.folder = root / name
        self.active = root / ".active" / name
        self.change_file = root / ".changes" / name
        self._slurm = slurm
        self._config = config
        self._trash = Trash(root / TRASH)
        # Several consoles may use one cluster as the same user, and each has a job 1.
        self.job_name = f"{name}.{hashlib.sha256(str(root).encode()).hexdigest()[:8]}"

    def exists(self) -> bool:
        """Whether the run exists."""
        return (self.folder / "submission.json").exists()

    def prepare(self, order: dict[str, Any]) -> None:
        """Create the folders that supervisors and code write to, and the order."""
        for subfolder in ("nodes", "logs", "run/tensorboard", "checkpoints", "outputs"):
            (self.folder / subfolder).mkdir(parents=True, mode=0o700)
        for key in ("checkpoints", "outputs"):
            Path(order[key]).mkdir(exist_ok=True, mode=0o700)
        (self.folder / ORDER_FILE).touch(mode=0o600)
        (self.folder / ORDER_FILE).write_text(json.dumps(order))
        # An NFS client may take a file that it has looked for in vain for missing for half a minute longer.
        write_json(self.folder / "stop.json", None)
        self.change_file.touch()
        self.active.touch()

    def record(self, spec: RunSpec, *, nonce: str, job_id: str) -> None:
        """Write `submission.json`, which makes the run exist."""
        submission = {
            "spec": json.loads(spec.to_json()),
            "nonce": nonce,
            "job_id": job_id,
            "submitted_at": time.time(),
        }
        write_json(self.folder / "submission.json", submission)

    def submission(self) -> dict[str, Any]:
        """Return the contents of `submission.json`. Raises RunNotFound."""
        data = _load(self.folder / "submission.json")
        if data is None:
            raise RunNotFound(f"There is no run named '{self.name}'.")
        return data

    def spec(self) -> RunSpec:
        """Return the spec as submitted. Raises RunNotFound."""
        return RunSpec.from_json(json.dumps(self.submission()["spec"]))

    # Reading

    def status(self) -> RunStatus:
        """Return the run's status; end what must end, and store an end. Raises RunNotFound, BackendUnavailable."""
        submission = self.submission()
        submitted_at = float(submission["submitted_at"])
        final = _load(self.folder / "final.json")
        if final is not None:
            self.active.unlink(missing_ok=True)
            return outcome.merge(self.name, submitted_at, final["records"])
        job_id, nodes = str(submission["job_id"]), int(submission["spec"]["nodes"])
        now = time.time()
        records = self._read_records(nodes)
        scene = self._scene(job_id, records, submitted_at, now)
        if scene.is_over:
            # A supervisor may have written its last record after the records were read.
            records = self._read_records(nodes)
        assessed = [evidence.assess(node, record, scene) for node, record in enumerate(records)]
        status = outcome.merge(self.name, submitted_at, assessed)
        if status.phase is RunPhase.ENDED:
            self._end(job_id, assessed, scene)
        elif status.phase is RunPhase.STARTING:
            status = self._waiting(status, job_id, scene)
        self._enforce(job_id, scene, status)
        return status

    def _scene(self, job_id: str, records: list[Record | None], submitted_at: float, now: float) -> Scene:
        """Return what is known besides the records. Slurm is not asked while all supervisors report."""
        request = self._request()
        known = self._slurm.known_jobs().get(job_id)
        has_ended = known is not None and not known.is_active
        if not has_ended and not evidence.needs_slurm(records, now, _HEALTHY_SECONDS):
            return Scene(JobState(job_id, "RUNNING"), request, frozenset(), submitted_at, now)
        # An answer that is older than the job does not have it.
        job = self._slurm.jobs(_FRESH_SECONDS).get(job_id) or self._slurm.jobs(0).get(job_id)
        if job is None:
            job = self._slurm.finished_job(job_id)
        # In the grace time of a preemption the nodes end by themselves, which Slurm takes for a job that completed.
        if job is not None and job.state in _PLAIN_ENDS and self._slurm.was_preempted(job_id):
            job = dataclasses.replace(job, state="PREEMPTED")
        failed = frozenset[str]()
        machines = {record.get("machine") for record in records if record is not None}
        if machines:
            # The answer must not be older than the end of the job: the machine that failed decides the cause.
            max_age = _FRESH_SECONDS if job is not None and job.is_active else 0.0
            failed = frozenset(
                each.name for each in self._slurm.machines(max_age) if each.has_failed and each.name in machines
            )
        return Scene(job, request, failed, submitted_at, now)

    def _read_records(self, nodes: int) -> list[Record | None]:
        refresh(self.folder / "nodes")
        paths = (peer_liveness.record_path(self.folder, node) for node in range(nodes))
        return [peer_liveness.load_record(path) for path in paths]

    def _request(self) -> Request | None:
        """Return the console's request to end the run: the one with the earliest end."""
        end = _load(self.folder / "end.json")
        if end is not None:
            return Request(float(end["at"]), 0.0, end["loss"])
        stop = _load(self.folder / "stop.json")
        if stop is None:
            return None
        loss = evidence.cause(Outcome.STOPPED, FailureCode.STOPPED, "The run was stopped on request.")
        return Request(float(stop["at"]), float(stop["grace_seconds"]), loss)

    def _waiting(self, status: RunStatus, job_id: str, scene: Scene) -> RunStatus:
        """Add why the run has not started. End a run that has waited in Slurm's queue for too long."""
        job = scene.job
        waiting = explain(job)
        waited_seconds = scene.now - scene.submitted_at
        if job is not None and job.is_waiting and waited_seconds > self._config.pending_seconds:
            data = {"placed": 0, "nodes": len(status.nodes), "seconds": int(waited_seconds)}
            message = f"Slurm did not start the run within {self._config.pending_seconds} s: {waiting.sentence}"
            self._request_end(evidence.cause(Outcome.NO_CAPACITY, FailureCode.NODES_NOT_PLACED, message, data))
            self._slurm.cancel_waiting(job_id)
        return dataclasses.replace(
            status, waiting_for=waiting.sentence, waiting_code=waiting.code.value, waiting_data=waiting.data
        )

    # Ending

    def _end(self, job_id: str, records: list[Record], scene: Scene) -> None:
        """Store how the run ended, and end what Slurm may still run of it."""
        # Supervisors that wrote their last record end by themselves.
        if not all(record["alive"] for record in records):
            # On a machine without a slurmd, a supervisor may live on and read this.
            write_json(self.folder / "stop.json", {"at": time.time(), "grace_seconds": 0})
            if scene.job is not None and scene.job.is_active:
                self._slurm.cancel(job_id)
        write_json(self.folder / "final.json", {"records": records})
        (self.folder / ORDER_FILE).unlink(missing_ok=True)  # a job that never started has not read it
        self.active.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.change_file.write_bytes(b"!")

    def _enforce(self, job_id: str, scene: Scene, status: RunStatus) -> None:
        """Have Slurm end a job whose supervisors have not ended it in time."""
        request = scene.request
        if status.phase is RunPhase.ENDED or request is None or scene.job is None or not scene.job.is_active:
            return
        if scene.job.is_waiting:
            self._slurm.cancel_waiting(job_id)
        elif scene.now > request.at + request.grace_seconds + _STOP_MARGIN_SECONDS:
            self._slurm.cancel(job_id)

    def _request_end(self, loss: Loss) -> None:
        if _load(self.folder / "end.json") is None:
            write_json(self.folder / "end.json", {"at": time.time(), "loss": loss})

    def request_stop(self, grace_seconds: int) -> None:
        """Ask every supervisor to end the run. A request that ends it sooner stays in force."""
        submission, path, now = self.submission(), self.folder / "stop.json", time.time()
        request = _load(path)
        if request is None or now + grace_seconds < request["at"] + request["grace_seconds"]:
            write_json(path, {"at": now, "grace_seconds": grace_seconds})
        job_id = str(submission["job_id"])
        self._slurm.cancel_waiting(job_id)
        self._slurm.signal(job_id, STOP_SIGNAL.name.removeprefix("SIG"))

    def kill(self) -> None:
        """Kill every job of this run's name and wait for its end. Raises BackendUnavailable.

        By name, since a submission that was interrupted has not recorded its job.
        """
        if not self.folder.is_dir():
            return
        self._slurm.kill([f"--name={self.job_name}"])
        job_id = str((_load(self.folder / "submission.json") or {}).get("job_id", ""))
        give_up_at = time.monotonic() + _KILL_SECONDS
        while (job := self._slurm.jobs(0).get(job_id)) is not None and job.is_active:
            if time.monotonic() > give_up_at:
                raise BackendUnavailable(f"The job {job_id} of the run '{self.name}' is still {job.state}.")
            time.sleep(_KILL_POLL_SECONDS)  # Slurm sends no events

    def destroy(self) -> bool:
        """Move the folder to the trash; return whether there was one. No process of the run may live any more."""
        existed = self.folder.is_dir()
        if existed:
            self._trash.move_in(self.folder)
        self.active.unlink(missing_ok=True)
        self.change_file.unlink(missing_ok=True)
        return existed


def _load(path: Path) -> dict[str, Any] | None:
    try:
        data: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return data
