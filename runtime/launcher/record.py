"""The files that a node's supervisor writes: its record (`nodes/<node>.json`), samples, stacks, and the change file.

Other processes know the node's state only from the record. The record is replaced as a whole, and its modification time
is the node's heartbeat. In a pod, customer code can replace these files. They are therefore opened without following
links, and without waiting for a pipe's reader.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional

SAMPLES_LIMIT_BYTES = 16 << 20
"""Maximum size of a node's file of samples; later samples are dropped. Samples of 500 bytes, one every ten seconds,
reach it after four days."""
STACKS_LIMIT_BYTES = 256 << 10
"""Maximum size of a rank's stacks: twice `telemetry.stacks.MAX_TEXT_LENGTH`, since a character may have several
bytes."""
_MIN_NOTIFY_SECONDS = 0.02
"""Minimum interval between notifications. An event that changes several files, such as the end of a rank, then wakes
readers once."""
FINAL_WRITE_TRIES = 60
"""Tries to write the last record, one each second. Within a minute, a full disk may have room again."""
RESERVED_BYTES = 256 << 10
"""Disk space that is reserved for the last record. No record needs as much, even with all its last lines."""


class Verdict(NamedTuple):
    """The reason why a node must end.

    `kind` and `code` are as in `protocol.new_cause`, and `message` is a sentence for logs. `node` is the node at fault
    (None: this one), and `rank` the rank at fault, if it was one rank.
    """

    kind: str
    code: str
    message: str
    node: Optional[int] = None
    rank: Optional[int] = None
    data: Mapping[str, Any] = {}


class Record:
    """The record of one node. Change `data` by the methods below, or call `save` after a change.

    `pod.main` documents the fields of `data`. `folder` is the run's, `address` the node's. `first_fields` are further
    fields, which not every backend has; they come first for people who read the file. `encode` converts the data to
    bytes. Each write to `change_file`, if there is one, wakes the readers: processes of the console, which watch that
    file.
    """

    def __init__(
        self,
        folder: Path,
        change_file: Optional[Path],
        *,
        node: int,
        address: str,
        first_fields: Optional[Mapping[str, Any]] = None,
        encode: Optional[Callable[[Dict[str, Any]], bytes]] = None,
    ) -> None:
        self.folder = folder
        self._change_file = change_file
        self._encode = encode or _as_json
        self._path = folder / "nodes" / f"{node}.json"
        self._reserved_path = folder / "nodes" / f".{node}.spare"
        self._samples_path = folder / "nodes" / f"{node}.samples.jsonl"
        self._samples_free_bytes = SAMPLES_LIMIT_BYTES
        self._has_changed = False  # since the last notification
        self._next_notification_at = 0.0  # the earliest time of the next one (monotonic)
        self._is_unsaved = False  # `data` has changed since it was last written
        self.node = node
        self.data: Dict[str, Any] = {
            **(first_fields or {}),
            "node": node,
            "phase": "starting",
            "address": address,
            "started_at": None,
            "finished_at": None,
            "exit_code": None,
            "detail": "",
            "causes": [],
            "round": 0,
            "members": [],
            "progress_at": None,
            "checkpoint_at": None,
        }

    # Contents

    @property
    def phase(self) -> str:
        """`starting`, `running`, `stopping` or `ended`."""
        return str(self.data["phase"])

    @property
    def has_started(self) -> bool:
        """Whether the ranks have run. With MPI: whether a rank of any node has."""
        return self.data["started_at"] is not None

    @property
    def causes(self) -> List[Dict[str, Any]]:
        """The causes that this node knows; `causes.first_cause` finds the first."""
        return list(self.data["causes"])

    def add_cause(self, verdict: Verdict) -> None:
        """Add a cause, with the current time."""
        self.data["causes"].append(
            {
                "kind": verdict.kind,
                "code": verdict.code,
                "at": time.time(),
                "node": self.node if verdict.node is None else verdict.node,
                "rank": verdict.rank,
                "message": verdict.message,
                "data": dict(verdict.data),
            }
        )

    def add_detail(self, sentence: str) -> None:
        """Add a sentence that helps to understand the node's end but names no cause of it."""
        self.data["detail"] = f"{self.data['detail']} {sentence}".strip()

    def note_progress(self, at: float) -> None:
        """Note a sign of progress at this time (Unix seconds). Readers see it with the next write."""
        at = min(at, time.time())  # never in the future
        if at > (self.data["progress_at"] or 0.0):
            self.data["progress_at"] = at
            self._is_unsaved = True

    def note_checkpoint(self, at: float) -> None:
        """Note the modification time of the newest checkpoint file (Unix seconds; 0: there is none)."""
        # The code can set any modification time. One in the future counts as the last valid one, or else as now.
        if at > time.time():
            at = self.data["checkpoint_at"] or time.time()
        if at and at != self.data["checkpoint_at"]:
            self.data["checkpoint_at"] = at
            self._is_unsaved = True

    # Writing and notifying

    def create(self) -> None:
        """Write the first record, without notifying readers."""
        self._write()

    def reserve_space(self) -> None:
        """Reserve the disk space of the last record, so that it can be written even if the code fills the disk."""
        with contextlib.suppress(OSError):  # without the reserve, `finish` waits until the disk has room
            _write_all(self._reserved_path, os.O_CREAT | os.O_EXCL, bytes(RESERVED_BYTES))

    def save(self) -> None:
        """Write the record and notify readers. If the disk refuses, the next `heartbeat` tries again."""
        self._write()
        self._has_changed = True

    def heartbeat(self) -> None:
        """Update the record's modification time, even if the disk accepts no data."""
        if self._is_unsaved:
            self._write()
        with contextlib.suppress(OSError):  # there is no file if no write has succeeded yet
            os.utime(self._path)

    def finish(self, max_tries: int = FINAL_WRITE_TRIES, **last_fields: Any) -> None:
        """Write the last record, with `last_fields`. If the disk refuses, try again each second, `max_tries` in all.

        A node without a last record counts as lost.
        """
        self.data.update(phase="ended", **last_fields)
        for attempt in range(max_tries):
            if attempt:
                time.sleep(1)  # there is no event for free disk space
            self._write()
            if self._is_unsaved:
                self._write_into_reserved()
            if not self._is_unsaved:
                break
            self.heartbeat()  # without it, this supervisor would count as frozen
        with contextlib.suppress(OSError):
            os.unlink(self._reserved_path)
        self.notify()

    def add_sample(self, sample: Dict[str, Any]) -> None:
        """Append a sample, up to the limit of the file. A sample that cannot be written is missing in the charts."""
        line = json.dumps({name: value for name, value in sample.items() if name != "type"}).encode() + b"\n"
        self._samples_free_bytes -= len(line)
        if self._samples_free_bytes < 0:
            return
        with contextlib.suppress(OSError):
            _write_all(self._samples_path, os.O_CREAT | os.O_APPEND, line)
        self._has_changed = True

    def add_stacks(self, rank: int, text: str) -> None:
        """Write a rank's stacks, as of when the run was found to hang. If that fails, the console shows none."""
        with contextlib.suppress(OSError):
            path = self.folder / "logs" / f"stacks-{rank}.txt"
            _write_all(path, os.O_CREAT | os.O_TRUNC, text.encode("utf-8", "replace")[:STACKS_LIMIT_BYTES])

    def note_change(self) -> None:
        """Note that readers should be notified soon."""
        self._has_changed = True

    def delay_notification(self, seconds: float) -> None:
        """Delay notifications for `seconds`, but not the one of the end. A short run then wakes readers only once."""
        self._next_notification_at = max(self._next_notification_at, time.monotonic() + seconds)

    def timeout(self, now: float) -> float:
        """Return the seconds until the next notification is due."""
        # 60 stands for "no notification is due"; the caller's other timers are shorter.
        return self._next_notification_at - now if self._has_changed and self._change_file is not None else 60.0

    def notify_if_due(self, now: float) -> None:
        """Notify readers of changes since the last notification, if one is due."""
        if self._has_changed and now >= self._next_notification_at:
            self.notify()

    def notify(self) -> None:
        """Wake the readers."""
        self._has_changed = False
        self._next_notification_at = time.monotonic() + _MIN_NOTIFY_SECONDS
        if self._change_file is not None:
            with contextlib.suppress(OSError):  # reconciliation then finds the change, a few seconds later
                self._change_file.write_bytes(b"!")

    def _write(self) -> None:
        """Replace the record by a rename. If the disk refuses, mark it as unsaved."""
        temporary = self._path.with_name(".{}.{}".format(self.node, os.urandom(4).hex()))
        try:
            _write_all(temporary, os.O_CREAT | os.O_EXCL, self._encode(self.data))
            os.replace(temporary, self._path)
            self._is_unsaved = False
        except OSError:
            self._is_unsaved = True
            with contextlib.suppress(OSError):
                os.unlink(temporary)

    def _write_into_reserved(self) -> None:
        """Write the record into the reserved file, which needs no free disk space."""
        data = self._encode(self.data)
        if len(data) > RESERVED_BYTES:
            return
        with contextlib.suppress(OSError):
            descriptor = open_file(self._reserved_path, 0)
            try:
                if os.write(descriptor, data) != len(data):
                    return
                os.ftruncate(descriptor, len(data))
            finally:
                os.close(descriptor)
            os.replace(self._reserved_path, self._path)
            self._is_unsaved = False


def _as_json(data: Dict[str, Any]) -> bytes:
    return json.dumps(data).encode()


def open_file(path: Path, flags: int) -> int:
    """Open a file for writing without following a link or waiting for a pipe's reader. Raises OSError.

    The group may write to a new file too, since a pod's storage is shared by its group.
    """
    return os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | flags, 0o660)


def _write_all(path: Path, flags: int, data: bytes) -> None:
    descriptor = open_file(path, flags)
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    finally:
        os.close(descriptor)
