"""What a node's supervisor writes down: its record (`nodes/<node>.json`), its samples, and the bell that tells of both.

The one rule: the record on disk is the node's only word to the world. It is replaced whole, and its time of change is
the node's last sign of life. In a pod the customer's code can put anything in place of these files: nothing that is
found there, a pipe least of all, keeps the supervisor waiting.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional

SAMPLES_LIMIT_BYTES = 16 << 20
STACKS_LIMIT_BYTES = 256 << 10
_BELL_SECONDS = 0.02
LAST_TRIES = 60


class Verdict(NamedTuple):
    """What is wrong: an Outcome, a FailureCode, a sentence for logs, and what it is about (its own node: None)."""

    kind: str
    code: str
    message: str
    node: Optional[int] = None
    rank: Optional[int] = None
    data: Mapping[str, Any] = {}


class Record:
    """The record of one node of a run. `data` is what readers get; change it by the methods below, or `save` after.

    `about` comes first in it; `encode` makes of it what is written; `bell` is the file that is written to wake readers.
    """

    def __init__(
        self,
        folder: Path,
        bell: Optional[Path],
        *,
        node: int,
        address: str,
        about: Optional[Mapping[str, Any]] = None,
        encode: Optional[Callable[[Dict[str, Any]], bytes]] = None,
    ) -> None:
        self.folder = folder
        self._bell = bell
        self._encode = encode or _as_json
        self._path = folder / "nodes" / f"{node}.json"
        self._samples_path = folder / "nodes" / f"{node}.samples.jsonl"
        self._samples_room = SAMPLES_LIMIT_BYTES
        self._news = False
        self._ring_at = 0.0
        self._unsaved = False
        self.node = node
        self.data: Dict[str, Any] = {
            **(about or {}),
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
    def causes(self) -> List[Dict[str, Any]]:
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
                "data": dict(verdict.data),
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

    def finish(self, tries: int = LAST_TRIES, **last: Any) -> None:
        """The last record. Tried for a minute where the disk refuses: without it a local node counts as lost."""
        self.data.update(phase="ended", **last)
        for attempt in range(tries):
            if attempt:
                time.sleep(1)  # nobody tells when a disk takes something again
            self._write()
            if not self._unsaved:
                break
        self.ring()

    def add_sample(self, sample: Dict[str, Any]) -> None:
        """One more line of `samples`, while there is room for it."""
        line = json.dumps({name: value for name, value in sample.items() if name != "type"}).encode() + b"\n"
        self._samples_room -= len(line)
        if self._samples_room < 0:
            return
        with contextlib.suppress(OSError):
            _write_all(self._samples_path, os.O_CREAT | os.O_APPEND, line)
        self._news = True

    def add_stacks(self, rank: int, text: str) -> None:
        """Where a rank stood when the run was found hung."""
        with contextlib.suppress(OSError):
            path = self.folder / "logs" / f"stacks-{rank}.txt"
            _write_all(path, os.O_CREAT | os.O_TRUNC, text.encode("utf-8", "replace")[:STACKS_LIMIT_BYTES])

    def news(self) -> None:
        """Something changed that readers may want to see soon."""
        self._news = True

    def rest_the_bell(self, seconds: float) -> None:
        """Ring for nothing but the end for so long: a run that ends at once is then told of once."""
        self._ring_at = max(self._ring_at, time.monotonic() + seconds)

    def patience(self, now: float) -> float:
        """Seconds until the bell wants to be rung; a long time where there is nothing to tell."""
        return self._ring_at - now if self._news and self._bell is not None else 60.0

    def ring_if_due(self, now: float) -> None:
        """Ring for what has happened since, a few times a second at most."""
        if self._news and now >= self._ring_at:
            self.ring()

    def ring(self) -> None:
        """Wake those who watch."""
        self._news = False
        self._ring_at = time.monotonic() + _BELL_SECONDS
        if self._bell is not None:
            with contextlib.suppress(OSError):
                self._bell.write_bytes(b"!")

    def _write(self) -> None:
        temporary = self._path.with_name(".{}.{}".format(self.node, os.urandom(4).hex()))
        try:
            _write_all(temporary, os.O_CREAT | os.O_EXCL, self._encode(self.data))
            os.replace(temporary, self._path)
            self._unsaved = False
        except OSError:
            self._unsaved = True
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _as_json(data: Dict[str, Any]) -> bytes:
    return json.dumps(data).encode()


def open_file(path: Path, flags: int) -> int:
    """Open a file for writing, without following a link or waiting for a pipe's reader. Raises OSError."""
    return os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | flags, 0o660)


def _write_all(path: Path, flags: int, data: bytes) -> None:
    descriptor = open_file(path, flags)
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    finally:
        os.close(descriptor)
