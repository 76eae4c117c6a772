"""The folder of one local run.

    <root>/<name>/submission.json        the spec, the submission's time and nonce, each node's GPUs
                  stop.json              a request to end
                  deadline.json          a later deadline than the spec's
                  nodes/<node>.json      the record of the node's supervisor
                  nodes/<node>.lock      locked while the supervisor lives
                  nodes/<node>.silent    exists if the supervisor was killed because it sent no heartbeat
                  nodes/<node>.shell     the socket on which members of the organization open shells in the node
                  nodes/<node>.cgroups   the node's control groups, while they exist
                  nodes/<node>.samples.jsonl  resource usage over time
                  logs/rank-<rank>.log   the output of each rank
                  logs/rank-<rank>.times when the output was written, see `runtime.launcher.log_times`
                  logs/node-<node>.log   the output of the launcher
                  logs/supervisor-<node>.log  the output of the supervisor, which is empty unless it fails
                  logs/stacks-<rank>.txt the rank's stacks when the run hung
                  etc/<node>/            the sandbox's files for /etc
                  run/                   RUN_DIR; written by customer code, hostile
                  checkpoints/           CHECKPOINT_DIR of a run that shares it with no other attempt
                  outputs/               OUTPUT_DIR of such a run
    <root>/.checkpoints/<key>/           CHECKPOINT_DIR shared by attempts with this checkpoint key
    <root>/.outputs/<key>/               OUTPUT_DIR shared by attempts
    <root>/.active/<name>                exists while the run holds capacity; says how much (`Reservation`)
    <root>/.trash/                       folders that are being removed
    <root>/.changes/<name>               touched whenever the run's status or output changes
    <root>/.lock                         locked by submissions and deletions
    <root>/.warm_pool/                   sockets and state of the warm pool (`warm_pool`)

`submission.json` is written as the last file, and by a rename. Without it the run does not exist: its supervisors do
not start, and a later submission may clear the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from runtime import pids
from runtime.backends.supervision import cgroups, outcome, peer_liveness, process_tree
from runtime.backends.supervision.folder_backend import TRASH_FOLDER
from runtime.errors import RunNotFound, RunUnreadable
from runtime.files import write_json
from runtime.specs import Outcome, RunPhase, RunSpec, RunStatus
from runtime.trash import Trash

_END_SECONDS = 5.0
"""How long supervisors may take to end their nodes before they are killed. They need a fraction of a second."""


class Reservation(TypedDict):
    """What a run takes of the machine, all nodes together. `gpus` are device numbers."""

    cpus: float
    memory_mib: int
    gpus: list[int]


def reservation_of(spec: Mapping[str, Any], gpus: Sequence[Sequence[int]]) -> Reservation:
    """Return the reservation of a run. `spec` is its RunSpec as JSON data, `gpus` each node's device numbers."""
    resources, nodes = spec["resources"], spec["nodes"]
    return {
        "cpus": resources["cpus"] * nodes,
        "memory_mib": resources["memory_mib"] * nodes,
        "gpus": [number for node_gpus in gpus for number in node_gpus],
    }


class Run:
    """The folder of one run, which may not exist. `root` holds the folders of all runs."""

    def __init__(self, root: Path, name: str) -> None:
        self.name = name
        self.folder = root / name
        self.active_marker = root / ".active" / name
        self.change_file = root / ".changes" / name
        self._trash = Trash(root / TRASH_FOLDER)

    def exists(self) -> bool:
        """Return whether the run exists, that is, its submission is recorded."""
        return (self.folder / "submission.json").exists()

    def create_folders(self, reservation: Reservation) -> None:
        """Create the folders that supervisors and customer code write to, and count the run as active.

        `run/tensorboard` is TENSORBOARD_LOGDIR.
        """
        for subfolder in ("nodes", "logs", "run/tensorboard", "checkpoints", "outputs"):
            (self.folder / subfolder).mkdir(parents=True, mode=0o700)
        self.active_marker.write_text(json.dumps(reservation))

    def hold_lock(self, node: int) -> int:
        """Lock the node's lock file and return its descriptor, which the supervisor inherits.

        The run's folder must be new, so that no other process holds the lock.
        """
        descriptor = os.open(self._lock_path(node), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor

    def record_submission(self, spec: RunSpec, *, nonce: str, gpus: list[list[int]]) -> None:
        """Write `submission.json`, which makes the run exist. `gpus` has the device numbers of each node's GPUs.

        Does not notify the readers of changes: the supervisors notify them when they start.
        """
        write_json(
            self.folder / "submission.json",
            {"spec": json.loads(spec.to_json()), "nonce": nonce, "gpus": gpus, "submitted_at": time.time()},
        )

    def submission(self) -> dict[str, Any]:
        """Return the contents of `submission.json`, written by `record_submission`.

        Raises RunNotFound, RunUnreadable.
        """
        try:
            data: dict[str, Any] = json.loads((self.folder / "submission.json").read_bytes())
        except (FileNotFoundError, NotADirectoryError) as error:
            raise RunNotFound(f"There is no run named '{self.name}'.") from error
        except ValueError as error:
            # After a power failure the file may be empty, and the run is lost. But if the disk has damaged the file,
            # the run may be alive.
            if pids.lock_holders(self.folder / "nodes"):
                raise RunUnreadable(f"The submission of the run '{self.name}' is damaged.") from error
            raise RunNotFound(f"The submission of the run '{self.name}' is damaged.") from error
        except OSError as error:  # such as EMFILE or EIO: the run may be alive
            raise self._unreadable(error) from error
        return data

    def reservation(self) -> Reservation | None:
        """Return what the run takes of the machine; None if that cannot be read. Raises RunNotFound.

        The submission and the active marker both say it, so that an error of the disk in one of them does no harm.
        """
        try:
            submission = self.submission()
            return reservation_of(submission["spec"], submission["gpus"])
        except RunUnreadable:
            with contextlib.suppress(OSError, ValueError):
                reservation: Reservation = json.loads(self.active_marker.read_bytes())
                return reservation
        return None

    def _unreadable(self, error: OSError) -> RunUnreadable:
        return RunUnreadable(f"The run '{self.name}' cannot be read: {error.strerror}.")

    def spec(self) -> RunSpec:
        """Return the spec as submitted. Raises RunNotFound."""
        return RunSpec.from_json(json.dumps(self.submission()["spec"]))

    def status(self) -> RunStatus:
        """Return the run's status; free its capacity (`.active`) if it has ended.

        Raises RunNotFound, RunUnreadable.
        """
        submission = self.submission()
        try:
            records = [self._read_record(node) for node in range(submission["spec"]["nodes"])]
        except OSError as error:
            raise self._unreadable(error) from error
        status = outcome.merge(self.name, submission["submitted_at"], records)
        if status.phase is RunPhase.ENDED:
            # On a disk that cannot be written, the marker stays; the run counts as ended all the same.
            with contextlib.suppress(OSError):
                self.active_marker.unlink(missing_ok=True)
                if status.outcome is Outcome.NODE_LOST:
                    self._remove_cgroups_of_lost_nodes()
        return status

    def _remove_cgroups_of_lost_nodes(self) -> None:
        """Remove the control groups that a killed supervisor could not remove itself."""
        for cgroups_file in (self.folder / "nodes").glob("*.cgroups"):
            process_tree.remove_recorded_cgroups(cgroups_file)

    def _read_record(self, node: int) -> outcome.RecordData:
        """Return a node's record with the fields that `outcome.merge` needs; kill the supervisor if it is frozen.

        Raises OSError if a file cannot be read: a record that counted as missing would end a run that is alive, or that
        completed, as lost.
        """
        path = peer_liveness.record_path(self.folder, node)
        record = peer_liveness.read_record(path)
        if record is None:
            is_alive = self._is_lock_held(node)
            # The supervisor writes its first record while it holds its lock, perhaps just after the record was read
            # here. So the record is read again. If it is still missing and the lock was free, the node is lost.
            record = peer_liveness.read_record(path) or {
                "node": node,
                "phase": "starting",
                "address": "",
                "started_at": None,
                "finished_at": None,
                "exit_code": None,
                "detail": "",
                "causes": [],
                "alive": is_alive,
                "seen_at": self.submission()["submitted_at"],
            }
        if "alive" not in record:  # the record is from the file
            record["alive"] = pids.is_alive(record["pid"], record["start_time"])
            if record["alive"] and peer_liveness.is_silent(path, record):
                peer_liveness.kill_silent(path, record)
                record["alive"] = not pids.wait_for_end(record["pid"], record["start_time"], _END_SECONDS)
                record["silent"] = True  # later, `read_record` sets it by the file that `kill_silent` wrote
            if not record["alive"] and record["phase"] != "ended":
                # The supervisor may have written its last record and ended after this record was read.
                record = {**(peer_liveness.read_record(path) or record), "alive": False}
        return record

    def request_stop(self, grace_seconds: int) -> None:
        """Ask every supervisor to end the run. An earlier request that ends it sooner stays in force.

        Raises RunUnreadable if the request cannot be written.
        """
        path, now = self.folder / "stop.json", time.time()
        try:
            request = json.loads(path.read_bytes())
            requested_end_at = request["at"] + request["grace_seconds"]
        except (OSError, ValueError):  # this is the first request
            requested_end_at = float("inf")
        try:
            if now + grace_seconds < requested_end_at:
                write_json(path, {"at": now, "grace_seconds": grace_seconds})
            for pid, start_time in self._supervisors():
                pids.send(pid, start_time, signal.SIGTERM)  # wakes the supervisor, which then reads stop.json
        except OSError as error:
            raise self._unreadable(error) from error

    def request_deadline(self, deadline_seconds: int) -> None:
        """Ask every supervisor to move its deadline to `deadline_seconds` after the run's start, if that is later."""
        path, current = self.folder / "deadline.json", self.submission()["spec"]["deadline_seconds"]
        with contextlib.suppress(OSError, ValueError):  # no deadline was requested before: the spec's holds
            current = json.loads(path.read_bytes())["deadline_seconds"]
        if deadline_seconds > current:
            write_json(path, {"deadline_seconds": deadline_seconds})

    def destroy(self) -> bool:
        """End the run and move its folder to the trash; return whether there was a folder.

        The caller empties the trash, which may take long.
        """
        existed = self.folder.is_dir()
        if existed:
            self.end()
            self._remove_cgroups_of_lost_nodes()
            self._trash.move_in(self.folder)
        self.active_marker.unlink(missing_ok=True)
        self.change_file.unlink(missing_ok=True)
        return existed

    def end(self) -> None:
        """Ask each supervisor to end its node, and kill each one that has not done so after `_END_SECONDS`."""
        if not any(pids.is_alive(pid, start_time) for pid, start_time in self._supervisors()):
            return
        with contextlib.suppress(RunUnreadable):  # then the supervisors are killed below
            self.request_stop(0)
        give_up_at = time.monotonic() + _END_SECONDS
        for pid, start_time in self._supervisors():
            if not pids.wait_for_end(pid, start_time, give_up_at - time.monotonic()):
                pids.send(pid, start_time, signal.SIGKILL)
                pids.wait_for_end(pid, start_time, _END_SECONDS)

    def kill(self) -> None:
        """Kill the processes of the run, and free its capacity. Needs none of its files.

        The supervisors hold the locks in `nodes/`, and all other processes descend from them. During a submission the
        submitter holds them, so the caller has kept submissions out. Raises RunUnreadable if a process does not end,
        for example because it waits for a disk.
        """
        # Searched again after the kill, since a supervisor may have forked another one.
        while found := pids.with_descendants(pids.lock_holders(self.folder / "nodes")):
            processes = [(pid, pids.start_time(pid)) for pid in found]
            for pid, start_time in processes:
                pids.send(pid, start_time, signal.SIGKILL)
            give_up_at = time.monotonic() + _END_SECONDS
            for pid, start_time in processes:
                if not pids.wait_for_end(pid, start_time, give_up_at - time.monotonic()):
                    raise RunUnreadable(f"The process {pid} of the run '{self.name}' does not end.")
        with contextlib.suppress(OSError):  # where the storage fails, the list of control groups and the marker stay
            self._remove_cgroups_of_lost_nodes()
            # A process whose supervisor ended earlier.
            if cgroups.processes(process_tree.recorded_cgroups(self.folder / "nodes")):
                raise RunUnreadable(f"Processes of the run '{self.name}' do not end.")
            self.active_marker.unlink(missing_ok=True)

    def _supervisors(self) -> list[tuple[int, int]]:
        """Return the pid and start time (`pids.start_time`) of each supervisor that has written a record."""
        records = (peer_liveness.load_record(path) for path in (self.folder / "nodes").glob("*.json"))
        return [(record["pid"], record["start_time"]) for record in records if record is not None]

    def _lock_path(self, node: int) -> Path:
        return self.folder / "nodes" / f"{node}.lock"

    def _is_lock_held(self, node: int) -> bool:
        """Return whether a process holds the node's lock: its supervisor, or one that will become the supervisor.

        Raises OSError if the lock cannot be read.
        """
        try:
            descriptor = os.open(self._lock_path(node), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:  # the run's folder is being removed
            return False
        try:
            # A shared lock, since an exclusive one would make a second reader believe that a supervisor holds it.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False
