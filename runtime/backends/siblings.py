"""The other nodes of a run, as one node's supervisor sees them: by their records alone.

The one rule: a supervisor shows that it lives by its record's time of change. One whose process is gone is lost; one
whose record has not changed for `SILENCE_SECONDS` is frozen, and whoever finds that writes it down and kills it, which
takes its node's processes along (the kernel does that). Standard library only: the supervisor imports this.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from runtime.backends import identity

SILENCE_SECONDS = 10.0
_LOOK_SECONDS = 1.0
_SECOND_LOOK_SECONDS = 2.5
"""Longer than twice the time between two signs of life, or a supervisor that has just been woken is killed."""


class Siblings:
    """Watches the other nodes' records.

    Silence is measured by this process's own clock, which stands still while the machine sleeps.
    """

    def __init__(self, folder: Path, node: int, nodes: int) -> None:
        self._paths = {other: record_path(folder, other) for other in range(nodes) if other != node}
        self._seen: dict[int, tuple[int, float]] = {}
        self._look_at = 0.0

    def end_silent_ones(self, now: float) -> None:
        """Kill each sibling that has been silent for too long; its launchers' peers then find it lost."""
        if now < self._look_at:
            return
        # Where this process itself was stopped or starved, the others get their time again.
        if self._look_at and now - self._look_at > SILENCE_SECONDS / 2:
            self._seen.clear()
        self._look_at = now + _LOOK_SECONDS
        for node, path in list(self._paths.items()):
            try:
                changed = path.stat().st_mtime_ns
            except OSError:
                continue  # It has not said its first word; whether it ever will is another's question.
            known, since = self._seen.get(node, (0, now))
            if changed != known:
                self._seen[node] = (changed, now)
            elif now - since > SILENCE_SECONDS:
                record = load(path)
                if record is None:
                    continue
                if record["phase"] != "ended" and identity.is_alive(record["pid"], record["start_time"]):
                    end_silent(path, record)
                del self._paths[node]

    def lost_one(self) -> int | None:
        """A sibling that is gone or has failed: until the launchers met, only this tells that one won't come."""
        for node, path in self._paths.items():
            record = load(path)
            if record is None:
                continue
            gone = record["phase"] != "ended" and not identity.is_alive(record["pid"], record["start_time"])
            if gone or record["causes"]:
                return node
        return None


def record_path(folder: Path, node: int) -> Path:
    """Where a node's record lies."""
    return folder / "nodes" / f"{node}.json"


def load(path: Path) -> dict[str, Any] | None:
    """A node's record, with `seen_at`, its last sign of life, and `silent`; None where there is none to be read."""
    try:
        record: dict[str, Any] = json.loads(path.read_bytes())
        record["seen_at"] = path.stat().st_mtime
    except (OSError, ValueError):
        return None
    record["silent"] = path.with_suffix(".silent").exists()
    return record


def is_silent(path: Path, record: dict[str, Any]) -> bool:
    """Whether a node that should live has said nothing for too long.

    Looked at twice: a machine that was asleep wakes its supervisors and its readers in any order.
    """
    if record["phase"] == "ended" or time.time() - record["seen_at"] <= SILENCE_SECONDS:
        return False
    time.sleep(_SECOND_LOOK_SECONDS)  # what is asked is whether nothing happens in that time
    try:
        return bool(path.stat().st_mtime == record["seen_at"])
    except OSError:
        return False


def end_silent(path: Path, record: dict[str, Any]) -> None:
    """Write down that this node was silent, and end its supervisor; the kernel ends what that one holds."""
    with contextlib.suppress(OSError):
        os.close(os.open(path.with_suffix(".silent"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    identity.send(record["pid"], record["start_time"], signal.SIGKILL)
