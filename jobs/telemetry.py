"""What runs write, read into rows: log lines and metrics files become curves, progress and an ETA.

Hides three sources merged into one: rank 0's output, METRICS_FILE (JSON lines), TensorBoard event files. The one
rule: everything read here was written by a customer's code, so it is bounded, parsed leniently, never followed out of
the run's folder, and never decides about money.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from django.db import transaction
from django.utils import timezone

from jobs.backend import cluster
from jobs.bell import publish_state
from jobs.models import Attempt, Job, MetricPoint
from jobs.tensorboard import open_regular, read_scalars
from runtime.errors import RuntimeFault

logger = logging.getLogger(__name__)

MOST_BYTES = 1024 * 1024
"""Read of each source at a time; what is left comes with the next look."""
MOST_POINTS = 50_000
"""Points kept for each job."""
MOST_NAMES = 50
MOST_STEP = 2**53
LONGEST_LINE = 2000
"""Of a line of output no more is looked at: what tells a metric is short."""
LOOKS_AT_THE_END = 80
"""An ended run is read to its end, but for no more looks than this: it covers the largest log there can be."""
NAME = re.compile(r"[A-Za-z][\w ./:-]{0,99}")
RESERVED = frozenset({"epoch", "epochs", "step", "steps", "time", "timestamp", "rank", "at"})

_NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
EPOCH_LINE = re.compile(r"\bepochs?\b\W{0,3}(\d+)(?:\s*(?:/|of)\s*(\d+))?", re.IGNORECASE)
STEP_LINE = re.compile(r"\b(?:step|iter|iteration|batch)\b\W{0,3}(\d+)", re.IGNORECASE)
# The number of spaces is bounded: without that a line of nothing else would take time by the square of its length.
VALUE_LINE = re.compile(
    r"\b((?:train|test|val|valid|validation|eval|average|avg)?[ _-]?(?:loss|accuracy|acc))\b\s{0,8}[:=]?\s{0,8}"
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

    Gives whether anything was new, and notes on the attempt how far it was read. Safe to repeat, and for two at once:
    files are read without a lock, and what was read counts only if nobody else has moved the cursor meanwhile.
    """
    try:
        folder = cluster(attempt.backend).run_folder(attempt.run_name)
    except RuntimeFault:
        return False
    before = attempt.cursor
    cursor = copy.deepcopy(before)
    reading = Reading([])
    _read_metrics_file(folder / "run" / "metrics.jsonl", cursor, reading)
    _read_tensorboard(folder / "run" / "tensorboard", cursor, reading)
    # What a curve's name says in a file is taken from there; lines of output are read for the rest.
    if named := {point.name for point in reading.points} - set(cursor.get("named", ())):
        cursor["named"] = sorted(named | set(cursor.get("named", ())))[:MOST_NAMES]
    _read_log(attempt, cursor, reading)
    if cursor == before:
        return False
    read = Attempt.objects.filter(pk=attempt.pk, cursor=before)
    if not reading.points and not reading.epoch:
        is_mine = bool(read.update(cursor=cursor))
    else:
        with transaction.atomic():
            # First the job, then the attempt, as everybody who locks both.
            job = Job.objects.select_for_update().get(pk=attempt.job_id)
            is_mine = bool(read.update(cursor=cursor))
            if is_mine:
                _keep(job, attempt, reading)
                publish_state(job.pk)
    attempt.cursor = cursor if is_mine else Attempt.objects.values_list("cursor", flat=True).get(pk=attempt.pk)
    return True


def ingest_all(*, attempt: Attempt) -> None:
    """Read an ended attempt to its end. A fault in what it wrote is logged, and never keeps a run from its end."""
    try:
        for _look in range(LOOKS_AT_THE_END):
            if not ingest(attempt=attempt):
                return
    except Exception:
        # What code wrote decides nothing about the run, so nothing about it may stop the run from being settled.
        logger.exception("What %s wrote could not be taken in.", attempt.run_name)


def parse_line(line: str) -> tuple[float | None, int | None, dict[str, float]]:
    """The epoch, step and values that a line of output tells in the usual spellings."""
    epoch = EPOCH_LINE.search(line)
    step = STEP_LINE.search(line)
    epoch_number, step_number = _bounded(epoch), _bounded(step)
    values: dict[str, float] = {}
    for match in VALUE_LINE.finditer(line):
        value = float(match[2]) / (100 if match[3] else 1)
        if math.isfinite(value):
            values.setdefault(_canonical(match[1]), value)
    return None if epoch_number is None else float(epoch_number), step_number, values


def _bounded(match: re.Match[str] | None) -> int | None:
    """The whole number a pattern found; None where it is larger than any step or epoch."""
    number = int(match[1]) if match else None
    return number if number is not None and number < MOST_STEP else None


def _read_log(attempt: Attempt, cursor: dict[str, Any], reading: Reading) -> None:
    try:
        chunk = cluster(attempt.backend).logs(attempt.run_name, 0, int(cursor.get("log", 0)), MOST_BYTES)
    except RuntimeFault:
        return
    if not chunk.text and not (chunk.eof and cursor.get("line_begun")):
        return
    cursor["log"] = chunk.next_offset
    # A progress bar ends its lines with a carriage return.
    *lines, begun = (cursor.pop("line_begun", "") + chunk.text).replace("\r", "\n").split("\n")
    if chunk.eof:
        lines.append(begun)
    elif begun:
        # It may still be written. Whoever writes a line longer than any that is looked at need not be remembered whole.
        cursor["line_begun"] = begun.replace("\0", " ")[:LONGEST_LINE]
    now = timezone.now()
    for line in lines:
        if len(reading.points) >= MOST_POINTS:
            return
        epoch, step, values = parse_line(line[:LONGEST_LINE])
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
        if len(reading.points) >= MOST_POINTS:
            return
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
    if epoch is not None:
        reading.epoch = max(reading.epoch, epoch)
    cursor["record"] = int(cursor.get("record", 0)) + 1
    step = numbers.get("step", float(cursor["record"]))
    stamp = numbers.get("time", numbers.get("timestamp", 0.0))
    at = _moment(stamp)
    for name, value in numbers.items():
        if name not in RESERVED and NAME.fullmatch(name) and abs(step) < MOST_STEP:
            reading.points.append(Point(name, int(step), value, epoch, at))


def _read_tensorboard(folder: Path, cursor: dict[str, Any], reading: Reading) -> None:
    for scalar in read_scalars(folder, cursor.setdefault("tensorboard", {}), MOST_BYTES):
        if NAME.fullmatch(scalar.tag) and math.isfinite(scalar.value) and len(reading.points) < MOST_POINTS:
            at = _moment(scalar.wall_time)
            reading.points.append(Point(scalar.tag, scalar.step, scalar.value, None, at))
    if not cursor["tensorboard"]:
        del cursor["tensorboard"]


def _moment(stamp: float) -> datetime:
    """A time that code told, in Unix seconds; now, where that can't be."""
    now = timezone.now()
    return datetime.fromtimestamp(stamp, UTC) if 0 < stamp <= now.timestamp() else now


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
    file = open_regular(path)
    if file is None:
        return b""
    with file:
        file.seek(offset)
        return file.read(MOST_BYTES)
