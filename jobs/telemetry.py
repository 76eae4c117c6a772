"""What runs write, read into rows: log lines and metrics files become curves, progress and an ETA.

Hides three sources merged into one: rank 0's output, METRICS_FILE (JSON lines), TensorBoard event files. The one
rule: everything read here was written by a customer's code, so it is bounded, parsed leniently, never followed out of
the run's folder, and never decides about money.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import stat
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from django.db import transaction
from django.utils import timezone

from jobs.backend import cluster
from jobs.bell import publish_state
from jobs.models import Attempt, Job, MetricPoint
from jobs.tensorboard import read_scalars
from runtime.errors import RuntimeFault

logger = logging.getLogger(__name__)

MOST_BYTES = 1024 * 1024
"""Read of each source at a time; what is left comes with the next look."""
MOST_POINTS = 50_000
"""Points kept for each job."""
MOST_NAMES = 50
NAME = re.compile(r"^[A-Za-z][\w ./:-]{0,99}$")
RESERVED = frozenset({"epoch", "epochs", "step", "steps", "time", "timestamp", "rank", "at"})

_NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
EPOCH_LINE = re.compile(r"\bepochs?\b\W{0,3}(\d+)(?:\s*(?:/|of)\s*(\d+))?", re.IGNORECASE)
STEP_LINE = re.compile(r"\b(?:step|iter|iteration|batch)\b\W{0,3}(\d+)", re.IGNORECASE)
VALUE_LINE = re.compile(
    r"\b((?:train|test|val|valid|validation|eval|average|avg)?[ _-]?(?:loss|accuracy|acc))\b\s*[:=]?\s*"
    rf"{_NUMBER}(\s*%)?",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Point:
    """One value read from a run."""

    name: str
    step: int
    value: float
    epoch: float | None
    at: datetime


@dataclass
class Reading:
    """What one look found."""

    points: list[Point]
    epoch: float = 0.0


def ingest(*, attempt: Attempt) -> bool:
    """Read what an attempt wrote since the last look.

    Gives whether anything was new. Safe to repeat, and for two at once.
    """
    try:
        folder = cluster().run_folder(attempt.run_name)
    except RuntimeFault:
        return False
    with transaction.atomic():
        attempt = Attempt.objects.select_for_update().get(pk=attempt.pk)
        job = Job.objects.get(pk=attempt.job_id)
        cursor = dict(attempt.cursor)
        reading = Reading([])
        _read_metrics_file(folder / "run" / "metrics.jsonl", cursor, reading)
        _read_tensorboard(folder / "run" / "tensorboard", cursor, reading)
        # What a curve's name says in a file is taken from there; lines of output are read for the rest.
        if named := {point.name for point in reading.points} - set(cursor.get("named", ())):
            cursor["named"] = sorted(named | set(cursor.get("named", ())))[:MOST_NAMES]
        _read_log(attempt, cursor, reading)
        if cursor == attempt.cursor:
            return False
        attempt.cursor = cursor
        attempt.save(update_fields=["cursor"])
        _keep(job, attempt, reading)
        publish_state(job.pk)
    return True


def parse_line(line: str) -> tuple[float | None, int | None, dict[str, float]]:
    """The epoch, step and values that a line of output tells in the usual spellings."""
    epoch = EPOCH_LINE.search(line)
    step = STEP_LINE.search(line)
    values: dict[str, float] = {}
    for match in VALUE_LINE.finditer(line):
        value = float(match[2]) / (100 if match[3] else 1)
        if math.isfinite(value):
            values.setdefault(_canonical(match[1]), value)
    return float(epoch[1]) if epoch else None, int(step[1]) if step else None, values


def _read_log(attempt: Attempt, cursor: dict[str, Any], reading: Reading) -> None:
    offset = int(cursor.get("log", 0))
    try:
        chunk = cluster().logs(attempt.run_name, 0, offset, MOST_BYTES)
    except RuntimeFault:
        return
    text = chunk.text
    if not chunk.eof and (cut := text.rfind("\n")) >= 0:
        # The last line may still be written: leave it for the next look.
        cursor["log"] = offset + len(text[: cut + 1].encode("utf-8", "replace"))
        text = text[: cut + 1]
    elif chunk.eof or len(text) >= MOST_BYTES // 4:
        cursor["log"] = chunk.next_offset
    else:
        return
    now = timezone.now()
    for line in text.splitlines():
        epoch, step, values = parse_line(line[:2000])
        if epoch is not None:
            cursor["epoch"] = epoch
            reading.epoch = max(reading.epoch, epoch)
        values = {name: value for name, value in values.items() if name not in cursor.get("named", ())}
        if values:
            cursor["line"] = int(cursor.get("line", 0)) + 1
        for name, value in values.items():
            reading.points.append(Point(name, step or cursor["line"], value, cursor.get("epoch"), now))


def _read_metrics_file(path: Path, cursor: dict[str, Any], reading: Reading) -> None:
    offset = int(cursor.get("metrics", 0))
    data = _read_hostile(path, offset)
    cut = data.rfind(b"\n") + 1
    if cut == 0 and len(data) < MOST_BYTES:
        return
    cursor["metrics"] = offset + (cut or len(data))
    for line in data[:cut].splitlines():
        _read_record(line, cursor, reading)


def _read_record(line: bytes, cursor: dict[str, Any], reading: Reading) -> None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return
    if not isinstance(record, dict):
        return
    numbers = {
        name: float(value)
        for name, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    }
    epoch = numbers.get("epoch")
    if epoch is not None and math.isfinite(epoch):
        reading.epoch = max(reading.epoch, epoch)
    cursor["record"] = int(cursor.get("record", 0)) + 1
    step = numbers.get("step", float(cursor["record"]))
    stamp = numbers.get("time", numbers.get("timestamp", 0.0))
    now = timezone.now()
    at = datetime.fromtimestamp(stamp, UTC) if 0 < stamp <= now.timestamp() else now
    for name, value in numbers.items():
        if name not in RESERVED and NAME.match(name) and math.isfinite(value) and abs(step) < 2**53:
            reading.points.append(Point(name, int(step), value, epoch, at))


def _read_tensorboard(folder: Path, cursor: dict[str, Any], reading: Reading) -> None:
    for scalar in read_scalars(folder, cursor.setdefault("tensorboard", {}), MOST_BYTES):
        if NAME.match(scalar.tag) and math.isfinite(scalar.value):
            at = datetime.fromtimestamp(scalar.wall_time, UTC) if scalar.wall_time > 0 else timezone.now()
            reading.points.append(Point(scalar.tag, scalar.step, scalar.value, None, at))
    if not cursor["tensorboard"]:
        del cursor["tensorboard"]


def _keep(job: Job, attempt: Attempt, reading: Reading) -> None:
    kept = MetricPoint.objects.filter(job=job).count() if reading.points else 0
    names = (
        set(MetricPoint.objects.filter(job=job).values_list("name", flat=True).distinct()) if reading.points else set()
    )
    rows = []
    for point in reading.points[: max(0, MOST_POINTS - kept)]:
        if point.name not in names and len(names) >= MOST_NAMES:
            continue
        names.add(point.name)
        rows.append(
            MetricPoint(
                job=job,
                attempt=attempt.number,
                name=point.name,
                step=point.step,
                epoch=point.epoch,
                value=point.value,
                at=point.at,
            )
        )
    MetricPoint.objects.bulk_create(rows, ignore_conflicts=True, batch_size=1000)
    epoch = min(int(reading.epoch), job.epochs)
    if epoch > job.epoch and not job.is_ended:
        Job.objects.filter(pk=job.pk, epoch__lt=epoch).update(epoch=epoch, progress=epoch / job.epochs)


def _canonical(name: str) -> str:
    """`Test Accuracy` and `test_acc` are one curve."""
    words = re.split(r"[ _-]+", name.strip().lower())
    longer = {"acc": "accuracy", "avg": "average", "val": "validation", "valid": "validation", "eval": "validation"}
    return "_".join(longer.get(word, word) for word in words if word)


def _read_hostile(path: Path, offset: int) -> bytes:
    """Up to MOST_BYTES of a regular file from `offset`; nothing of a link, a pipe, or a file that is not there."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    file: BinaryIO
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return b""
        file.seek(offset)
        return file.read(MOST_BYTES)
