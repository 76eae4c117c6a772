"""The folder of one local run, and what it says.

The one rule: `submission.json` is written last and in one step. While it is missing, the run does not exist:
supervisors that were started vanish, and whoever comes next may clear the folder.

    <root>/<name>/submission.json        the spec, when it was submitted, which GPUs each node has
                  stop.json              a request to end
                  nodes/<node>.json      what the node's supervisor says; .lock is held while it lives, .silent is
                                         there where it was ended for not giving a sign of life, .cgroups names its
                                         control groups while there are any
                  nodes/<node>.samples.jsonl  what the node used over time
                  logs/rank-<rank>.log   output, rank by rank; node-<node>.log is the platform's own, stacks-<rank>.txt
                                         where a rank stood when the run hung
                  run/                   RUN_DIR: written by the customer's code, hostile
                  checkpoints/           CHECKPOINT_DIR where the run shares none
    <root>/.checkpoints/<key>/           CHECKPOINT_DIR shared by attempts
    <root>/.active/<name>                runs that hold capacity
    <root>/.trash/                       what is to be removed: out of the way, whatever is in it
    <root>/.changes/<name>               touched whenever the run's status or output changes
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any

from runtime.backends import identity, outcome, siblings, tree
from runtime.backends.trash import Trash
from runtime.errors import RunNotFound
from runtime.specs import Outcome, RunPhase, RunSpec, RunStatus

TRASH = ".trash"
_END_SECONDS = 5.0


class Run:
    """One run's folder. Cheap to make; whether there is such a run is asked of it."""

    def __init__(self, root: Path, name: str) -> None:
        self.name = name
        self.folder = root / name
        self.active = root / ".active" / name
        self.bell = root / ".changes" / name
        self._trash = Trash(root / TRASH)

    def exists(self) -> bool:
        """Whether the run exists."""
        return (self.folder / "submission.json").exists()

    def prepare(self) -> None:
        """Make the folders that supervisors and code write to."""
        for part in ("nodes", "logs", "run/tensorboard", "checkpoints"):
            (self.folder / part).mkdir(parents=True, mode=0o700)
        self.active.touch()

    def hold_lock(self, node: int) -> int:
        """Take the node's lock and return the descriptor that holds it; its supervisor inherits it."""
        descriptor = os.open(self._lock_path(node), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor

    def record(self, spec: RunSpec, *, nonce: str, gpus: list[list[int]]) -> None:
        """Put the run on record. From here on it exists. The bell is not rung: who submits knows."""
        write_json(
            self.folder / "submission.json",
            {"spec": json.loads(spec.to_json()), "nonce": nonce, "gpus": gpus, "submitted_at": time.time()},
        )

    def submission(self) -> dict[str, Any]:
        """What `record` wrote. Raises RunNotFound."""
        try:
            data: dict[str, Any] = json.loads((self.folder / "submission.json").read_bytes())
        except (OSError, ValueError) as error:
            raise RunNotFound(f"There is no run named '{self.name}'.") from error
        return data

    def spec(self) -> RunSpec:
        """The run as submitted. Raises RunNotFound."""
        return RunSpec.from_json(json.dumps(self.submission()["spec"]))

    def status(self) -> RunStatus:
        """How the run goes; gives its capacity back once it has ended. Raises RunNotFound."""
        submission = self.submission()
        records = [self._read_record(node) for node in range(submission["spec"]["nodes"])]
        status = outcome.merge(self.name, submission["submitted_at"], records)
        if status.phase is RunPhase.ENDED:
            self.active.unlink(missing_ok=True)
            if status.outcome is Outcome.NODE_LOST:
                self._clear_after_the_lost()
        return status

    def _clear_after_the_lost(self) -> None:
        for note in (self.folder / "nodes").glob("*.cgroups"):
            tree.clear_after(note)

    def _read_record(self, node: int) -> outcome.Record:
        path = siblings.record_path(self.folder, node)
        record = siblings.load(path)
        if record is None:
            alive = self._lock_is_held(node)
            # The first record may have been written between the two looks; a lock let go without one is a node lost.
            record = siblings.load(path) or {
                "node": node,
                "phase": "starting",
                "address": "",
                "started_at": None,
                "finished_at": None,
                "exit_code": None,
                "detail": "",
                "causes": [],
                "alive": alive,
                "seen_at": self.submission()["submitted_at"],
            }
        if "alive" not in record:
            record["alive"] = identity.is_alive(record["pid"], record["start_time"])
            if record["alive"] and siblings.is_silent(path, record):
                siblings.end_silent(path, record)
                record["alive"] = not wait_gone(record["pid"], record["start_time"], _END_SECONDS)
                record["silent"] = True
            if not record["alive"] and record["phase"] != "ended":
                # It may have ended properly between the two looks; only the second one counts as lost.
                record = {**(siblings.load(path) or record), "alive": False}
        return record

    def request_stop(self, grace_seconds: int) -> None:
        """Tell every supervisor to end the run; an end that is to come sooner stays."""
        path, now = self.folder / "stop.json", time.time()
        try:
            asked = json.loads(path.read_bytes())
            ends_at = asked["at"] + asked["grace_seconds"]
        except (OSError, ValueError):
            ends_at = float("inf")
        if now + grace_seconds < ends_at:
            write_json(path, {"at": now, "grace_seconds": grace_seconds})
        for pid, started in self._supervisors():
            identity.send(pid, started, signal.SIGTERM)

    def destroy(self) -> bool:
        """End what runs and put every trace into the trash, for the caller to empty; whether there was any."""
        there = self.folder.is_dir()
        if there:
            self.end()
            self._clear_after_the_lost()
            self._trash.take(self.folder)
        self.active.unlink(missing_ok=True)
        self.bell.unlink(missing_ok=True)
        return there

    def end(self) -> None:
        """Let each supervisor end its own node, so that when it is gone nothing of the node is left."""
        if not any(identity.is_alive(pid, started) for pid, started in self._supervisors()):
            return
        self.request_stop(0)
        give_up_at = time.monotonic() + _END_SECONDS
        for pid, started in self._supervisors():
            if not wait_gone(pid, started, give_up_at - time.monotonic()):
                identity.send(pid, started, signal.SIGKILL)
                wait_gone(pid, started, _END_SECONDS)

    def _supervisors(self) -> list[tuple[int, int]]:
        records = (siblings.load(path) for path in (self.folder / "nodes").glob("*.json"))
        return [(record["pid"], record["start_time"]) for record in records if record is not None]

    def _lock_path(self, node: int) -> Path:
        return self.folder / "nodes" / f"{node}.lock"

    def _lock_is_held(self, node: int) -> bool:
        try:
            descriptor = os.open(self._lock_path(node), os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False


class FolderLock:
    """One writer at a time, across processes: `with FolderLock(path):`. The kernel lets go when its holder dies."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1

    def __enter__(self) -> None:
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)


def wait_gone(pid: int, started: int, seconds: float) -> bool:
    """Wait for this very process to end, without polling; False when it has not."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return True
    try:
        if not identity.is_alive(pid, started):
            return True
        watch = select.poll()
        watch.register(descriptor, select.POLLIN)
        return bool(watch.poll(max(0.0, seconds) * 1000))
    finally:
        os.close(descriptor)


def write_json(path: Path, data: object) -> None:
    """Write a file that readers see whole or not at all."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    temporary.write_text(json.dumps(data))
    temporary.replace(path)
