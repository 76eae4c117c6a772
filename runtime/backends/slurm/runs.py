"""The folder of one run on a Slurm cluster.

    <root>/<name>/submission.json        the spec, the time of submission, the job's id
                  order.json             the RunPlan for the nodes, with secrets; deleted when all nodes have read it
                  stop.json              a request to end
                  end.json               why the console, or a node that could not start, ended the run
                  import.json            whether node 0 imports the run's own image, or has done so
                  final.json             the nodes' last records, completed by Slurm's reasons for their ends. Written
                                         once, under the lock final.lock
                  nodes/, logs/, etc/, run/, checkpoints/, outputs/   as for a local run (`runtime.backends.local.runs`)
                  nodes/<node>.meeting   a node's address and ports
                  nodes/<node>.shell     the socket on which shells are opened, on the node's machine (`shells`)
                  logs/slurm.log         the output of the batch script and srun
    <root>/.active/, .changes/, .checkpoints/, .outputs/, .trash/    as for local runs
    <root>/.program/<version>/           the program of the compute nodes
    <root>/.locks/                       locks of submissions
    <root>/.images/                      customers' own images (`image_import`)

`submission.json` is written after the job was submitted, as the last file and by a rename. Without it the run does not
exist: its nodes do not start, and a later submission may clear the folder.
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
from runtime.backends.slurm.evidence import Cause, EndRequest, Observation, RecordData
from runtime.backends.slurm.node import IMPORT_FILE, RUN_PLAN_FILE, STOP_SIGNAL
from runtime.backends.slurm.pending import explain_waiting
from runtime.backends.slurm.states import SlurmJob
from runtime.backends.supervision import outcome, peer_liveness
from runtime.backends.supervision.folder_backend import TRASH_FOLDER
from runtime.errors import BackendUnavailable, RunNotFound, RunUnreadable
from runtime.files import FileLock, refresh_listing, write_json
from runtime.specs import FailureCode, Outcome, RunPhase, RunSpec, RunStatus
from runtime.trash import Trash

_HEALTHY_SECONDS = 15.0
"""How long a running node may send no heartbeat before Slurm is asked about it: three intervals of heartbeats."""
_STOP_MARGIN_SECONDS = 30.0
"""How long the job of a stopped run may live after its grace period. Then the console has Slurm end the job.
Supervisors read the request from shared storage and write their last records there, which takes seconds."""
_FRESH_SECONDS = 1.0
"""Maximum age of Slurm's answers about a run that is starting or may have failed. However many such runs there are,
Slurm then gets at most one query a second."""
_KILL_SECONDS = 60.0
"""How long a killed job may take to end before `kill` gives up. Slurm waits for every machine of the job, and a machine
that does not answer delays the end."""
_KILL_POLL_SECONDS = 0.2
"""Interval of queries whether a killed job has ended, since Slurm sends no events."""
_SELF_ENDED_STATES = frozenset({"COMPLETED", "FAILED"})
"""States of a job whose tasks ended by themselves."""


class SlurmRun:
    """The folder and the job of one run, which may not exist. `root` holds the folders of all runs."""

    def __init__(self, root: Path, name: str, slurm: Slurm, config: SlurmConfig) -> None:
        self.name = name
        self.folder = root / name
        self.active_marker = root / ".active" / name
        self.change_file = root / ".changes" / name
        self._slurm = slurm
        self._config = config
        self._trash = Trash(root / TRASH_FOLDER)
        # The hash distinguishes several consoles that use one cluster as the same user, since each names a run
        # `job-1-1`.
        self.job_name = f"{name}.{hashlib.sha256(str(root).encode()).hexdigest()[:8]}"

    def exists(self) -> bool:
        """Return whether the run exists, that is, its submission is recorded."""
        return (self.folder / "submission.json").exists()

    def write_plan(self, run_plan: dict[str, Any]) -> None:
        """Create the folders that supervisors and customer code write to, and write the run's plan."""
        for subfolder in ("nodes", "logs", "run/tensorboard", "checkpoints", "outputs"):
            (self.folder / subfolder).mkdir(parents=True, mode=0o700)
        for key in ("checkpoints", "outputs"):  # the run's own folders, or those that it shares with other attempts
            Path(run_plan[key]).mkdir(exist_ok=True, mode=0o700)
        (self.folder / RUN_PLAN_FILE).touch(mode=0o600)  # before it holds secrets
        (self.folder / RUN_PLAN_FILE).write_text(json.dumps(run_plan))
        # Supervisors look for a request to stop here. The file exists from the start, since an NFS client may cache for
        # half a minute that a file is missing.
        write_json(self.folder / "stop.json", None)
        self.change_file.touch()
        self.active_marker.touch()

    def record_submission(self, spec: RunSpec, *, nonce: str, job_id: str) -> None:
        """Write `submission.json`, which makes the run exist."""
        submission = {
            "spec": json.loads(spec.to_json()),
            "nonce": nonce,
            "job_id": job_id,
            "submitted_at": time.time(),
        }
        write_json(self.folder / "submission.json", submission)

    def submission(self) -> dict[str, Any]:
        """Return the contents of `submission.json`. Raises RunNotFound, RunUnreadable, BackendUnavailable.

        Without its submission, a run of which Slurm has no job is not found.
        """
        data = self._load("submission.json")
        if data is None and self.exists() and self._slurm.active_jobs(self.job_name):
            raise RunUnreadable(f"The submission of the run '{self.name}' is damaged.")
        if data is None:
            raise RunNotFound(f"There is no run named '{self.name}'.")
        return data

    def job_id(self) -> str:
        """Return the id of the recorded job; empty if no submission is recorded, or if it cannot be read."""
        try:
            return str(self.submission()["job_id"])
        except (RunNotFound, BackendUnavailable):
            return ""

    def spec(self) -> RunSpec:
        """Return the spec as submitted. Raises RunNotFound."""
        return RunSpec.from_json(json.dumps(self.submission()["spec"]))

    # Reading

    def status(self) -> RunStatus:
        """Return the run's status. Raises RunNotFound, BackendUnavailable.

        This call also stores the outcome of a run that has ended, and ends a run that has waited in Slurm's queue for
        too long. If a job has outlived a request to stop, this call has Slurm end it.
        """
        submission = self.submission()
        submitted_at = float(submission["submitted_at"])
        job_id, nodes = str(submission["job_id"]), int(submission["spec"]["nodes"])
        final = self._load("final.json")
        if final is not None:
            # The process that stored the end may have died before it removed the marker.
            if self.active_marker.exists():
                self._end_processes(job_id, final["records"])
            return outcome.merge(self.name, submitted_at, final["records"])
        now = time.time()
        records = self._read_records(nodes)
        observation = self._observe(job_id, records, submitted_at, now)
        if observation.job_has_ended:
            # A supervisor may have written its last record after the records were read.
            records = self._read_records(nodes)
        assessed_records = [evidence.assess(node, record, observation) for node, record in enumerate(records)]
        status = outcome.merge(self.name, submitted_at, assessed_records)
        if status.phase is RunPhase.ENDED:
            final_records = self._store_end(assessed_records)
            self._end_processes(job_id, final_records)
            return outcome.merge(self.name, submitted_at, final_records)
        if status.phase is RunPhase.STARTING:
            status = self._with_waiting_reason(status, job_id, observation)
        self._enforce_end(job_id, observation)
        return status

    def _observe(self, job_id: str, records: list[RecordData | None], submitted_at: float, now: float) -> Observation:
        """Return all facts about the run except the records.

        Does not ask Slurm while the records suffice, which is usual for a running run.
        """
        end_request = self._end_request()
        known_job = self._slurm.known_jobs().get(job_id)
        known_job_has_ended = known_job is not None and not known_job.is_active
        if not known_job_has_ended and not evidence.needs_slurm(records, now, _HEALTHY_SECONDS):
            # The heartbeats show that the job runs.
            return Observation(SlurmJob(job_id, "RUNNING"), end_request, frozenset(), submitted_at, now)
        # A cached answer from before the job's submission does not list it, so Slurm is asked again.
        job = self._slurm.jobs(_FRESH_SECONDS).get(job_id) or self._slurm.jobs(max_age_seconds=0).get(job_id)
        if job is None:
            job = self._slurm.finished_job(job_id)
        # If all nodes end by themselves in the grace period of a preemption, Slurm reports that the job completed.
        if job is not None and job.state in _SELF_ENDED_STATES and self._slurm.was_preempted(job_id):
            job = dataclasses.replace(job, state="PREEMPTED")
        failed_machines = frozenset[str]()
        machine_names = {record.get("machine") for record in records if record is not None}
        if machine_names:
            # Once the job has ended, the list must be newer than its end, since a failed machine decides the cause.
            max_age_seconds = _FRESH_SECONDS if job is not None and job.is_active else 0.0
            machines = self._slurm.machines(max_age_seconds)
            failed_machines = frozenset(
                machine.name for machine in machines if machine.has_failed and machine.name in machine_names
            )
        return Observation(job, end_request, failed_machines, submitted_at, now)

    def machine_of(self, node: int) -> str:
        """Return the machine on which a node was started; empty if it has not been started."""
        record = peer_liveness.load_record(peer_liveness.record_path(self.folder, node)) or {}
        return str(record.get("machine") or "")

    def _read_records(self, nodes: int) -> list[RecordData | None]:
        """Return the record of each node; None where there is none. Raises RunUnreadable."""
        refresh_listing(self.folder / "nodes")
        paths = (peer_liveness.record_path(self.folder, node) for node in range(nodes))
        try:
            return [peer_liveness.read_record(path) for path in paths]
        except OSError as error:
            raise self._unreadable(error) from error

    def _load(self, file: str) -> dict[str, Any] | None:
        """Return the object in a JSON file of the run's folder; None if the file is missing, damaged or contains null.

        Raises RunUnreadable if the file cannot be read.
        """
        try:
            data: dict[str, Any] | None = json.loads((self.folder / file).read_bytes())
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        except OSError as error:
            raise self._unreadable(error) from error
        return data

    def _unreadable(self, error: OSError) -> RunUnreadable:
        """Return the error for a file that cannot be read now, such as after EMFILE, or EIO of the shared storage.

        The file must not count as missing: then a run that is alive, or that completed, would count as lost.
        """
        return RunUnreadable(f"The run '{self.name}' cannot be read: {error.strerror}.")

    def _end_request(self) -> EndRequest | None:
        """Return the request to end the run; None if there is none.

        A decision of the platform (`end.json`) has priority over a customer's request (`stop.json`).
        """
        end = self._load("end.json")
        if end is not None:
            return EndRequest(float(end["at"]), 0.0, end["loss"])
        stop = self._load("stop.json")
        if stop is None:
            return None
        cause = evidence.new_cause(Outcome.STOPPED, FailureCode.STOPPED, "The run was stopped on request.")
        return EndRequest(float(stop["at"]), float(stop["grace_seconds"]), cause)

    def _with_waiting_reason(self, status: RunStatus, job_id: str, observation: Observation) -> RunStatus:
        """Return the status with the reason why the run has not started.

        Ends a run that has waited in Slurm's queue for too long.
        """
        job = observation.job
        importing = self._load(IMPORT_FILE)
        waiting = explain_waiting(job, is_importing=importing is not None and not importing["is_ready"])
        waited_seconds = observation.now - observation.submitted_at
        if job is not None and job.is_waiting and waited_seconds > self._config.pending_seconds:
            # Slurm starts all nodes of a job together, so none is placed yet.
            data = {"placed": 0, "nodes": len(status.nodes), "seconds": int(waited_seconds)}
            message = f"Slurm did not start the run within {self._config.pending_seconds} s: {waiting.sentence}"
            self._store_own_end_request(
                evidence.new_cause(Outcome.NO_CAPACITY, FailureCode.NODES_NOT_PLACED, message, data)
            )
            self._slurm.cancel_waiting(job_id)
        return dataclasses.replace(
            status, waiting_for=waiting.sentence, waiting_code=waiting.code.value, waiting_data=waiting.data
        )

    # Ending

    def _store_end(self, records: list[RecordData]) -> list[RecordData]:
        """Store how the run ended, unless another process has; return the stored records."""
        with FileLock(self.folder / "final.lock"):
            refresh_listing(self.folder)
            final = self._load("final.json")
            if final is None:
                final = {"records": records}
                write_json(self.folder / "final.json", final)
        stored: list[RecordData] = final["records"]
        return stored

    def _end_processes(self, job_id: str, records: list[RecordData]) -> None:
        """End the processes that a run may still have after its end was stored. Raises BackendUnavailable.

        Never call this before the end is stored: `stop.json` would count as a customer's request, and a run that its
        customer stopped is paid.
        """
        # Supervisors that have written their last record end by themselves.
        if not all(record["alive"] for record in records):
            # Slurm cannot end a supervisor on a machine whose slurmd has failed, but the supervisor reads this file.
            write_json(self.folder / "stop.json", {"at": time.time(), "grace_seconds": 0})
            self._slurm.cancel(job_id)
        (self.folder / RUN_PLAN_FILE).unlink(missing_ok=True)  # the nodes delete it only if they all start
        self.active_marker.unlink(missing_ok=True)
        # `changes` reports a run whose change file has a new modification time, or whose marker has vanished.
        with contextlib.suppress(OSError):
            self.change_file.write_bytes(b"!")

    def _enforce_end(self, job_id: str, observation: Observation) -> None:
        """Have Slurm end the job of a run that should have ended by request and has not."""
        request, job = observation.end_request, observation.job
        if request is None or job is None or not job.is_active:
            return
        if job.is_waiting:
            self._slurm.cancel_waiting(job_id)
        elif observation.now > request.at + request.grace_seconds + _STOP_MARGIN_SECONDS:
            self._slurm.cancel(job_id)

    def _store_own_end_request(self, cause: Cause) -> None:
        """Store in `end.json` that the console ends the run, and why. An earlier decision stays."""
        if self._load("end.json") is None:
            write_json(self.folder / "end.json", {"at": time.time(), "loss": cause})

    def request_stop(self, grace_seconds: int) -> None:
        """Ask every supervisor to end the run. An earlier request that ends it sooner stays in force."""
        submission, request, now = self.submission(), self._load("stop.json"), time.time()
        if request is None or now + grace_seconds < request["at"] + request["grace_seconds"]:
            write_json(self.folder / "stop.json", {"at": now, "grace_seconds": grace_seconds})
        job_id = str(submission["job_id"])
        self._slurm.cancel_waiting(job_id)
        self._slurm.signal(job_id, STOP_SIGNAL.name.removeprefix("SIG"))

    def kill(self) -> None:
        """Call `kill_jobs` if the run has a folder; else it has no jobs."""
        if self.folder.is_dir():
            self.kill_jobs()

    def kill_jobs(self, wait_seconds: float = _KILL_SECONDS) -> None:
        """Kill every job of this run's name. Raises RunUnreadable if not all have ended after `wait_seconds`.

        Jobs are found by name, since an interrupted submission has not recorded its job's id, and the storage may fail.
        """
        self._slurm.kill([f"--name={self.job_name}"])
        give_up_at = time.monotonic() + wait_seconds
        while job_ids := self._slurm.active_jobs(self.job_name):
            if time.monotonic() > give_up_at:
                raise RunUnreadable(f"Jobs of the run '{self.name}' have not ended: {', '.join(job_ids)}.")
            time.sleep(_KILL_POLL_SECONDS)  # Slurm sends no events

    def move_to_trash(self) -> bool:
        """Move the run's folder to the trash; return whether there was one.

        Call this only after the run's processes ended. The caller empties the trash, which may take long.
        """
        existed = self.folder.is_dir()
        if existed:
            self._trash.move_in(self.folder)
        self.active_marker.unlink(missing_ok=True)
        self.change_file.unlink(missing_ok=True)
        return existed
