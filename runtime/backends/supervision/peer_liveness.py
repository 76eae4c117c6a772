"""Detect by their records whether the supervisors of a run's other nodes are alive.

Only for runs whose supervisors are all on this machine: a process can neither see nor kill those on other machines.

A supervisor updates its record's modification time as a heartbeat. If its process has ended, its node is lost. If the
record has not changed for `SILENCE_SECONDS`, the supervisor is frozen. The first process that notices this, another
supervisor or the console, creates the file `nodes/<node>.silent` and kills the supervisor; the kernel then ends the
node's processes. No third-party packages: the supervisor imports this.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from runtime import pids

SILENCE_SECONDS = 10.0
"""Time without a heartbeat after which a supervisor counts as frozen. A live one sends a heartbeat at least every
second; on a busy machine some may be late."""
_CHECK_SECONDS = 1.0
"""Interval between two checks of the other records, as long as the interval of heartbeats."""
_RECHECK_SECONDS = 2.5
"""How long `is_silent` waits for one more heartbeat. A supervisor may have been resumed just now, for example after the
machine's sleep. Such a supervisor survives, since this is more than two intervals of heartbeats. `PeerWatch` need not
wait, because its clock stops while the machine sleeps, and it measures anew after a late check of its own."""


class PeerWatch:
    """Watches the records of a run's other nodes.

    It measures silence by the monotonic clock, which stops while the machine sleeps.
    """

    def __init__(self, folder: Path, node: int, nodes: int) -> None:
        self._paths = {other_node: record_path(folder, other_node) for other_node in range(nodes) if other_node != node}
        self._watched_nodes = set(self._paths)
        """The nodes whose heartbeats are still awaited: all but those that have ended or were killed."""
        self._last_changes: dict[int, tuple[int, float]] = {}
        """By node: the modification time of its record (ns), and when that was first seen (monotonic)."""
        self._next_check_at = 0.0

    def kill_silent_peers(self, now: float) -> None:
        """Kill each supervisor that has been silent for too long, so that its node is found lost."""
        if now < self._next_check_at:
            return
        # A check that is this late shows that this process was itself stopped or starved. So it begins to measure anew.
        if self._next_check_at and now - self._next_check_at > SILENCE_SECONDS / 2:
            self._last_changes.clear()
        self._next_check_at = now + _CHECK_SECONDS
        for node in sorted(self._watched_nodes):
            path = self._paths[node]
            try:
                modified_at = path.stat().st_mtime_ns
            except OSError:
                continue  # The supervisor has not written its first record; `limits.START_SECONDS` covers that.
            last_modified_at, unchanged_since = self._last_changes.get(node, (0, now))
            if modified_at != last_modified_at:
                self._last_changes[node] = (modified_at, now)
            elif now - unchanged_since > SILENCE_SECONDS:
                record = load_record(path)
                if record is None:
                    continue
                if record["phase"] != "ended" and pids.is_alive(record["pid"], record["start_time"]):
                    kill_silent(path, record)
                self._watched_nodes.remove(node)

    def lost_peer(self) -> int | None:
        """Return a node whose supervisor has died or has recorded a cause; None if there is none.

        Call this while the launchers have not met: later, they detect lost nodes themselves.
        """
        for node, path in self._paths.items():
            record = load_record(path)
            if record is None:
                continue
            is_lost = record["phase"] != "ended" and not pids.is_alive(record["pid"], record["start_time"])
            if is_lost or record["causes"]:
                return node
        return None


def record_path(folder: Path, node: int) -> Path:
    """Return the path of a node's record."""
    return folder / "nodes" / f"{node}.json"


def read_record(path: Path) -> dict[str, Any] | None:
    """Return a node's record with two fields added; None if there is no record. Raises OSError if it cannot be read.

    `seen_at` is the time of the last heartbeat (Unix seconds). `silent`: the supervisor was killed because it sent no
    heartbeat.
    """
    try:
        record: dict[str, Any] = json.loads(path.read_bytes())
        record["seen_at"] = path.stat().st_mtime
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    record["silent"] = path.with_suffix(".silent").exists()
    return record


def load_record(path: Path) -> dict[str, Any] | None:
    """Return what `read_record` returns; None also if the record cannot be read, such as for an error of the disk."""
    try:
        return read_record(path)
    except OSError:
        return None


def is_silent(path: Path, record: dict[str, Any]) -> bool:
    """Return whether a node's live supervisor has sent no heartbeat for too long. May take `_RECHECK_SECONDS`.

    The record is checked twice, since after a machine's sleep this process may be resumed before the supervisor.
    """
    if record["phase"] == "ended" or time.time() - record["seen_at"] <= SILENCE_SECONDS:
        return False
    time.sleep(_RECHECK_SECONDS)  # no event can replace this wait, since it looks for the absence of a heartbeat
    try:
        return bool(path.stat().st_mtime == record["seen_at"])
    except OSError:
        return False


def kill_silent(path: Path, record: dict[str, Any]) -> None:
    """Record that this node was silent, and kill its supervisor; the kernel then ends the node's processes."""
    # Without this file the node counts as lost all the same, but nothing says that it was silent.
    with contextlib.suppress(OSError):
        os.close(os.open(path.with_suffix(".silent"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    pids.send(record["pid"], record["start_time"], signal.SIGKILL)
