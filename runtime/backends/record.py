"""What a node's supervisor writes down: its record (`nodes/<node>.json`), its samples, and the bell that tells of both.

The one rule: the record on disk is the node's only word to the world. It is replaced whole, and its time of change is
the node's last sign of life. Standard library only: the supervisor imports this.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.backends import identity

SAMPLES_LIMIT_BYTES = 16 << 20
STACKS_LIMIT_BYTES = 256 << 10
_BELL_SECONDS = 0.02
_LAST_TRIES = 60


@dataclass(frozen=True)
class Verdict:
    """What is wrong: an Outcome, a FailureCode, a sentence for logs, and what it is about (its own node: None)."""

    kind: str
    code: str
    message: str
    node: int | None = None
    rank: int | None = None
    data: dict[str, Any] = field(default_factory=dict)


class Record:
    """The record of one node of a run. `data` is what readers get; change it by the methods below, or `save` after."""

    def __init__(self, folder: Path, bell: Path, *, node: int, address: str) -> None:
        self.folder = folder
        self._bell = bell
        self._path = folder / "nodes" / f"{node}.json"
        self._samples_path = folder / "nodes" / f"{node}.samples.jsonl"
        self._samples_room = SAMPLES_LIMIT_BYTES
        self._news = False
        self._ring_at = 0.0
        self._unsaved = False
        self.node = node
        self.data: dict[str, Any] = {
            "node": node,
            "phase": "starting",
            "address": address,
            "pid": os.getpid(),
            "start_time": identity.start_time(os.getpid()),
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

    # What happened

    @property
    def phase(self) -> str:
        """starting, running, stopping or ended."""
        return str(self.data["phase"])

    @property
    def started(self) -> bool:
        """Whether the ranks have run."""
        return self.data["started_at"] is not None

    @property
    def causes(self) -> list[dict[str, Any]]:
        """Everything that went wrong as this node knows it; `runtime.launcher.report.first_cause` finds the first."""
        return list(self.data["causes"])

    def add_cause(self, verdict: Verdict) -> None:
        """One more thing that went wrong, now."""
        self.data["causes"].append(
            {
                "kind": verdict.kind,
                "code": verdict.code,
                "at": time.time(),
                "node": self.node if verdict.node is None else verdict.node,
                "rank": verdict.rank,
                "message": verdict.message,
                "data": verdict.data,
            }
        )

    def add_detail(self, sentence: str) -> None:
        """Something worth knowing that is no cause."""
        self.data["detail"] = f"{self.data['detail']} {sentence}".strip()

    def progress(self, at: float) -> None:
        """A sign of progress. Nobody is woken for it: it is read with the next thing that happens."""
        at = min(at, time.time())
        if at > (self.data["progress_at"] or 0.0):
            self.data["progress_at"] = at
            self._unsaved = True

    def checkpoint(self, at: float) -> None:
        """The newest file among the checkpoints is from this moment."""
        if at and at != self.data["checkpoint_at"]:
            self.data["checkpoint_at"] = min(at, time.time())
            self._unsaved = True

    # Telling

    def begin(self) -> None:
        """The first record: that there is a supervisor is no news to anybody."""
        self._write()

    def save(self) -> None:
        """Write the record, and tell of it. A disk that refuses is asked again at the next `beat`."""
        self._write()
        self._news = True

    def beat(self) -> None:
        """A sign of life: the record's time of change."""
        if self._unsaved:
            self._write()
            return
        with contextlib.suppress(OSError):
            os.utime(self._path)

    def finish(self, **last: Any) -> None:
        """The last record. Tried for a minute where the disk refuses: without it the node counts as lost."""
        self.data.update(phase="ended", **last)
        for _attempt in range(_LAST_TRIES):
            self._write()
            if not self._unsaved:
                break
            time.sleep(1)
        self.ring()

    def add_sample(self, sample: dict[str, Any]) -> None:
        """One more line of `samples`, while there is room for it."""
        line = json.dumps({name: value for name, value in sample.items() if name != "type"}).encode() + b"\n"
        self._samples_room -= len(line)
        if self._samples_room < 0:
            return
        with contextlib.suppress(OSError), self._samples_path.open("ab") as file:
            file.write(line)
        self._news = True

    def add_stacks(self, rank: int, text: str) -> None:
        """Where a rank stood when the run was found hung."""
        with contextlib.suppress(OSError):
            path = self.folder / "logs" / f"stacks-{rank}.txt"
            path.write_bytes(text.encode("utf-8", "replace")[:STACKS_LIMIT_BYTES])

    def news(self) -> None:
        """Something changed that readers may want to see soon."""
        self._news = True

    def patience(self, now: float) -> float:
        """Seconds until the bell wants to be rung; a long time where there is nothing to tell."""
        return self._ring_at - now if self._news else 60.0

    def ring_if_due(self, now: float) -> None:
        """Ring for what has happened since, a few times a second at most."""
        if self._news and now >= self._ring_at:
            self.ring()

    def ring(self) -> None:
        """Wake those who watch."""
        self._news = False
        self._ring_at = time.monotonic() + _BELL_SECONDS
        with contextlib.suppress(OSError):
            self._bell.write_bytes(b"!")

    def _write(self) -> None:
        temporary = self._path.with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps(self.data))
            temporary.replace(self._path)
            self._unsaved = False
        except OSError:
            self._unsaved = True
