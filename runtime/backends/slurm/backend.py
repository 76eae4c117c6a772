"""The Slurm backend: a run is one batch job, and each of its nodes is a task that supervises a sandbox.

The console and the compute nodes share storage at the same paths: the runs' folders, the images, and the mounted
folders. All state is on this storage and in Slurm, none in this process. So any number of processes may use one `root`,
and each may die at any moment.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from runtime.backends import admission, sandbox
from runtime.backends.base import ShellTunnel
from runtime.backends.reservations import NodeRequest, reserve
from runtime.backends.slurm import images, program, submission
from runtime.backends.slurm.capacity import compute_capacity
from runtime.backends.slurm.commands import CommandFailed, Slurm
from runtime.backends.slurm.config import SlurmConfig
from runtime.backends.slurm.node import RunPlan
from runtime.backends.slurm.runs import SlurmRun
from runtime.backends.slurm.shells import ShellSteps
from runtime.backends.slurm.states import SlurmJob
from runtime.backends.supervision import shell_socket
from runtime.backends.supervision.folder_backend import FolderBackend, check_folder_name, translate_errors
from runtime.errors import BackendUnavailable, InvalidSpec, NoCapacity, RunNotFound, RunUnreadable
from runtime.files import FileLock, refresh_listing
from runtime.specs import Capacity, Controller, Image, Resources, RunPhase, RunSpec

_POLL_SECONDS = 0.25
"""Interval at which `changes` polls shared storage, which sends no events. People who follow a log hardly notice a
quarter of a second."""
_POLL_AFTER_CHANGE_SECONDS = 0.05
"""The interval after a change, since changes often follow each other."""
_MAX_MACHINES_AGE_SECONDS = 5.0
"""Maximum age of the list of machines that `_check_size` uses. The sizes of machines rarely change."""
_REACHABLE_SECONDS = 2.0
"""How long `is_reachable` may take: the protocol promises an answer in this time."""
_REPEATED_KILL_SECONDS = 15.0
"""How long `kill` waits for jobs to end: Slurm needs some seconds on a busy machine. Not longer, because the console
repeats it until it succeeds, and takes a call of 20 seconds for a sign of a slow cluster."""
_LOCK_FILES = 16
"""Number of lock files. A submission or deletion locks one of them, chosen by a hash of the run's name. A file for each
run would accumulate. Two runs that share a lock only wait for each other; 16 locks make that rare for the 8 submissions
that a process makes in parallel."""
# Parts of sbatch's error messages (in Slurm's src/common/slurm_errno.c), by their meaning for a run. All other errors
# count as faults of the cluster.
_CANNOT_FIT = (
    "Requested node configuration is not available",
    "More processors requested than permitted",
    "Node count specification invalid",
    "Memory specification can not be satisfied",
    "Invalid generic resource",
)
_TOO_LONG = ("Requested time limit is invalid", "Job violates partition time limit", "time limit exceeds")
_INVALID_ACCOUNT = "Invalid account or account/partition combination"
_OVER_LIMIT = ("violates accounting/QOS policy", "job submit limit", "exceeds the limit")

logger = logging.getLogger(__name__)


class SlurmBackend(FolderBackend):
    """Runs jobs on one Slurm cluster. `root` holds the runs, `images_root` the built-in images; both are shared."""

    parallel_submissions = 8  # a submission mostly waits for Slurm's commands

    def __init__(self, *, config: SlurmConfig, root: Path, images_root: Path) -> None:
        super().__init__(root, images_root)
        self._config = config
        self._slurm = Slurm(config)
        self._shells = ShellSteps(self._slurm, self._root, self._images_root)
        (self._root / ".locks").mkdir(exist_ok=True, mode=0o700)

    # The protocol

    def submit(self, spec: RunSpec) -> None:
        """See `Backend.submit`."""
        admission.check_name(spec.name)
        run = self._find(spec.name)
        if run.exists():  # checked again under the lock; this check only saves the work of the next lines
            return
        spec = self._admit(spec)
        self._check_size(spec)
        has_trash = False
        try:
            with self._lock(spec.name):
                if run.exists():
                    return
                # An interrupted submission of this name may have left a folder and a job. No other process may submit
                # the run before they are gone, so the lock is kept meanwhile.
                run.kill()
                has_trash = run.move_to_trash()
                try:
                    self._start(run, spec)
                except BaseException as error:
                    has_trash = self._remove_failed_submission(run) or has_trash
                    if isinstance(error, CommandFailed):
                        own_account = self._config.accounts.get(spec.labels.get("organization", ""), "")
                        raise _translate_sbatch_error(error, own_account) from error
                    if isinstance(error, OSError):
                        raise BackendUnavailable(f"The run's folder could not be written: {error}.") from error
                    raise
            if spec.image.reference:
                has_trash = self._move_unused_images() or has_trash
        finally:
            # Removing files may take long, so the lock is released first.
            if has_trash:
                self._trash.empty()

    def stop(self, name: str, grace_seconds: int) -> None:
        """See `Backend.stop`."""
        run = self._find(name)
        try:
            has_ended = run.status().phase is RunPhase.ENDED
        except RunNotFound:
            return
        except RunUnreadable:  # it may still run, and must be stopped all the same
            has_ended = False
        if not has_ended:
            with translate_errors(name):
                run.request_stop(grace_seconds)

    def kill(self, name: str) -> None:
        """See `Backend.kill`."""
        run = self._find(name)
        run.kill_jobs(_REPEATED_KILL_SECONDS)
        with contextlib.suppress(OSError):  # where the storage fails, the marker stays
            run.active_marker.unlink(missing_ok=True)

    def delete(self, name: str) -> None:
        """See `Backend.delete`."""
        run = self._find(name)
        with translate_errors(name):
            killed_job = run.job_id()
            run.kill()  # before the lock is taken, since the job may take long to end
            with self._lock(name):
                if run.job_id() != killed_job:  # another process has submitted the run meanwhile
                    run.kill()
                run.move_to_trash()
            self._trash.empty()

    def capacity(self) -> Capacity:
        """See `Backend.capacity`. Does not consider limits of accounts and QOS.

        Counts the resources of the console's own jobs in Slurm's queue as used, since they come before later jobs.
        """
        # The jobs are read before the machines. A job that starts in between then counts twice for a moment; in the
        # other order it would not count at all.
        jobs = self._slurm.jobs(max_age_seconds=0)
        waiting_nodes: list[NodeRequest] = []
        for name in self.names(live=True):
            # The submission is not complete, the run was deleted, or its files cannot be read. The last case must not
            # keep other runs from starting: if such a run waits, they wait behind it in Slurm's queue.
            with contextlib.suppress(RunNotFound, RunUnreadable):
                submitted = self._find(name).submission()
                job = jobs.get(submitted["job_id"])
                if job is not None and job.is_waiting:
                    spec = submitted["spec"]
                    waiting_nodes += [NodeRequest(Resources(**spec["resources"]), spec["node_kind"])] * spec["nodes"]
        return reserve(compute_capacity(self._slurm.machines(max_age_seconds=0), self._config), waiting_nodes)

    def is_reachable(self) -> bool:
        """See `Backend.is_reachable`."""
        try:
            self._slurm.call("scontrol", "ping", seconds=_REACHABLE_SECONDS)
        except (CommandFailed, BackendUnavailable):
            return False
        return True

    def changes(self, stop_after_seconds: float | None = None) -> Iterator[set[str]]:
        """See `Backend.changes`. Polls the runs' change files, while a thread polls Slurm's queue."""
        stop_at = None if stop_after_seconds is None else time.monotonic() + stop_after_seconds
        previous: dict[str, object] = {}
        is_closed = threading.Event()
        threading.Thread(target=self._refresh_jobs, args=(is_closed,), name="slurm-queue", daemon=True).start()
        try:
            while stop_at is None or time.monotonic() < stop_at:
                current = {name: self._fingerprint(name) for name in self.names(live=True)}
                # A run that is only in `current` is new; one that is only in `previous` has ended or was deleted.
                changed = {name for name in current.keys() | previous.keys() if current.get(name) != previous.get(name)}
                previous = current
                yield changed  # often empty: the protocol demands something at least every second
                is_closed.wait(_POLL_AFTER_CHANGE_SECONDS if changed else _POLL_SECONDS)
        finally:
            is_closed.set()

    def check_image(self, image: Image, controller: Controller = Controller.GLOO, *, gpus: int = 0) -> None:
        """See `Backend.check_image`. Does not ask the registry, since the console may have no access to it."""
        if image.builtin or not self._config.containers:
            super().check_image(image, controller, gpus=gpus)
            return
        admission.check_reference(image)
        if controller is Controller.MPI:
            # mpirun would be the image's, and the launcher would start it. Only ranks may run programs of a customer's
            # image: see `runtime.backends.container`.
            raise InvalidSpec("Own images cannot use MPI on this cluster. Choose gloo.", field="controller")
        if gpus:
            # An image has no GPU driver, and the sandbox does not mount the machine's driver into it.
            raise InvalidSpec("Own images cannot use GPUs on this cluster. Choose a built-in image.", field="gpus")

    def image_identity(self, image: Image) -> str:
        """See `Backend.image_identity`."""
        return image.reference or super().image_identity(image)

    def shell_socket(self, name: str, node: int) -> ShellTunnel | None:
        """See `Backend.shell_socket`. Only a process on the node's machine can connect, so a Slurm step connects."""
        run = self._find(name)
        path = shell_socket.path_of(run.folder, node)
        refresh_listing(path.parent)  # an NFS client may still take the socket for missing
        return functools.partial(self._shells.open, run, node) if path.is_socket() else None

    def stop_prepared_processes(self) -> None:
        """Do nothing: starts are always cold."""

    def isolation_gaps(self) -> list[str]:
        """See `Backend.isolation_gaps`."""
        settings = self._slurm.settings()
        gaps = ["Runs share the network of their machine and can reach what listens there and on other machines."]
        if "task/cgroup" not in settings.get("TaskPlugin", ""):
            gaps.append(
                "Slurm's TaskPlugin does not contain task/cgroup, so the kernel does not limit runs. The console "
                "measures their memory and processes four times a second instead. Their CPU time is not limited."
            )
        return gaps

    # Starting

    def _admit(self, spec: RunSpec) -> RunSpec:
        """Check a spec; return it with the sources of its mounts resolved. Raises InvalidSpec."""
        if spec.image.builtin or not self._config.containers:
            return admission.admit(spec, self._images_root)
        admission.check_values(spec)
        self.check_image(spec.image, spec.controller, gpus=spec.resources.gpus)
        if spec.packages:
            raise InvalidSpec("Packages cannot be added to own images on this cluster.", field="packages")
        return admission.resolve_mounts(spec)

    def _move_unused_images(self) -> bool:
        """Move unused images of customers to the trash; return whether the trash may hold some now.

        Logs any error, since it must not fail the submission that calls this.
        """
        used_folders = set()
        try:
            for name in self.names(live=True):
                with contextlib.suppress(RunNotFound):  # a submission that is not complete; its image was just used
                    spec = self._find(name).spec()
                    if spec.image.reference:
                        used_folders.add(images.image_folder(self._root, spec))
            seconds = self._config.import_seconds
            return images.move_unused_to_trash(self._root, self._trash, used_folders, seconds)
        except Exception:
            logger.exception("Unused images could not be moved to the trash.")
            return True

    def _check_size(self, spec: RunSpec) -> None:
        """Check that the empty cluster could hold all nodes of the run. Raises InvalidSpec."""
        machines = self._slurm.machines(_MAX_MACHINES_AGE_SECONDS)
        fitting_nodes = compute_capacity(machines, self._config).nodes_ever(spec.resources, spec.node_kind)
        if fitting_nodes < spec.nodes:
            raise InvalidSpec(
                f"{spec.nodes} nodes of this kind can never run here: the cluster has room for {fitting_nodes}.",
                field="nodes",
            )

    def _start(self, run: SlurmRun, spec: RunSpec) -> None:
        """Write the run's plan, submit the job, and record the submission.

        The nodes read the plan only after the submission is recorded. By `nonce` they recognize their own submission:
        another one may have the same name.
        """
        package = program.install_node_program(self._root)
        nonce = secrets.token_hex(16)
        run_plan = self._run_plan(run, spec, package, nonce)
        run.write_plan(dict(run_plan))
        python = str(program.interpreter(self._images_root, spec.image))
        code = f"import sys; sys.path[:0] = [{str(package)!r}]; from runtime.backends.slurm.node import start; start()"
        # -I and -S: no environment variable and no site-packages of the machine change what the interpreter imports.
        command = [python, "-I", "-S", "-c", code, str(run.folder), nonce]
        log = str(run.folder / "logs" / "slurm.log")
        job_id = self._slurm.submit(
            submission.arguments(spec, self._config, job_name=run.job_name, log=log),
            submission.script(spec, self._config, command),
        )
        run.record_submission(spec, nonce=nonce, job_id=job_id)

    def _run_plan(self, run: SlurmRun, spec: RunSpec, package: Path, nonce: str) -> RunPlan:
        """Return the plan that the run's nodes read. `package` is the folder of their program."""
        checkpoints, outputs = self._checkpoint_and_output_folders(run, spec)
        return {
            "spec": json.loads(spec.to_json()),
            "secrets": spec.secrets,
            "nonce": nonce,
            "token": secrets.token_hex(32),
            "folder": str(run.folder),
            "change_file": str(run.change_file),
            "checkpoints": str(checkpoints),
            "outputs": str(outputs),
            "image": str(self._images_root / spec.image.builtin),  # not used with `own_image`
            "launcher": str(package / "runtime" / "launcher"),
            "disk_mib": self._config.disk_mib,
            "start_seconds": self._config.start_seconds,
            "interface": self._config.interface,
            "bubblewrap": self._config.bubblewrap,
            "own_image": images.image_plan(self._root, spec, self._config) if spec.image.reference else None,
            "fallback_bubblewrap": sandbox.find_bubblewrap(),
        }

    def _remove_failed_submission(self, run: SlurmRun) -> bool:
        """Kill the job of a submission that failed and move its folder to the trash; return whether there was a folder.

        If Slurm cannot kill the job, its nodes end by themselves, since they find no recorded submission.
        """
        try:
            run.kill()
        except BackendUnavailable:
            logger.warning("The job of the failed submission '%s' could not be ended in Slurm.", run.name)
        return run.move_to_trash()

    def _lock(self, name: str) -> FileLock:
        """Return the lock for submissions and deletions of this run."""
        number = int(hashlib.sha256(name.encode()).hexdigest(), 16) % _LOCK_FILES
        return FileLock(self._root / ".locks" / str(number))

    # Changes

    def _fingerprint(self, name: str) -> object:
        """Return a value that changes whenever the run's status or output does."""
        modified_at = 0
        try:
            # Opening the file makes an NFS client ask its server. A mere stat(2) would use cached attributes.
            descriptor = os.open(self._root / ".changes" / name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                modified_at = os.fstat(descriptor).st_mtime_ns
            finally:
                os.close(descriptor)
        except OSError:  # such as after the run's deletion, when the file is missing
            pass
        job = self._last_known_job(name)
        return modified_at, (None if job is None else (job.state, job.reason))

    def _last_known_job(self, name: str) -> SlurmJob | None:
        """Return the run's job as Slurm last reported it, without asking Slurm; None if the report lacks the job."""
        try:
            job_id = self._find(name).submission()["job_id"]
        except (RunNotFound, RunUnreadable):
            return None
        return self._slurm.known_jobs().get(job_id)

    def _refresh_jobs(self, is_closed: threading.Event) -> None:
        """Query Slurm's queue at intervals, while there are live runs, until `is_closed` is set."""
        while not is_closed.is_set():
            try:
                if self.names(live=True):
                    # Another call may have asked Slurm just now. Half an interval is new enough.
                    self._slurm.jobs(max_age_seconds=self._config.poll_seconds / 2)
            except BackendUnavailable as error:
                logger.warning("Slurm's queue could not be read: %s", error)
            is_closed.wait(self._config.poll_seconds)

    def _find(self, name: str) -> SlurmRun:
        """Return the run of this name, which need not exist. Raises RunNotFound if the name cannot be a folder's."""
        check_folder_name(name)
        return SlurmRun(self._root, name, self._slurm, self._config)


def _translate_sbatch_error(error: CommandFailed, own_account: str) -> Exception:
    """Return the error that `Backend.submit` raises for an error of sbatch.

    `own_account` is the Slurm account of the job's organization; empty: the organization has none of its own.
    """
    text = str(error)
    if any(part in text for part in _CANNOT_FIT):
        return InvalidSpec(f"Slurm has no machines for nodes of this kind: {text}", field="nodes")
    if any(part in text for part in _TOO_LONG):
        return InvalidSpec(f"The run may last longer than Slurm allows: {text}", field="deadline_seconds")
    if _INVALID_ACCOUNT in text and own_account:
        # Jobs of other organizations are accepted, so this is no fault of the cluster.
        return InvalidSpec(
            f"Slurm does not let the console submit to the account '{own_account}': {text}", field="account"
        )
    if any(part in text for part in _OVER_LIMIT):
        return NoCapacity(f"A limit of Slurm is reached: {text}")
    return BackendUnavailable(f"Slurm did not accept the run: {text}")
