"""Read curves and progress from the output of runs.

There are three sources: rank 0's output, METRICS_FILE (JSON lines) and TensorBoard event files. Customers' code writes
all of them. Reads are therefore limited, parsing is lenient, links are not followed, and nothing here affects money.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import math
import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from celery import shared_task
from django.db import transaction
from django.db.models import F, Window
from django.db.models.functions import RowNumber
from django.utils import timezone

from console.core.enqueue import send
from jobs.clusters import cluster
from jobs.event_files import Scalar, open_regular, read_scalars
from jobs.models import Attempt, Job, MetricPoint
from jobs.points import add_epoch, count_finished_epochs, next_position
from jobs.pubsub import publish_state
from runtime.errors import BackendUnavailable, RunNotFound, RuntimeFault
from storage.errors import StorageError
from storage.paths import open_folder

logger = logging.getLogger(__name__)

MAX_READ_BYTES = 256 * 1024
"""How many bytes one read takes from each source: few enough that no run delays others much. The next read continues
after them. They can contain 12,000 points, which take half a second of CPU time."""
MAX_POINTS = 50_000
"""Points stored per job. At this limit every second point of each curve is deleted, and from then on only every second
point is stored. So curves keep their full length. Pages show only a thousand points per curve."""
DELETE_BATCH_SIZE = 5000
"""Points that one SQL statement deletes, because each is a parameter of the statement."""
MAX_CURVES = 50
"""Curves stored per job. Customers' code chooses the names and could create any number."""
MAX_STEP = 2**53
"""Steps and epochs must be smaller. Up to this number a float represents every whole number exactly."""
MAX_POSITION = 2**62
"""Positions on a curve must be smaller, so that they fit the column's 64 bits. Only a script that reports huge steps
and starts again at a low one, over and over, gets that far."""
READ_DELAY_SECONDS = 2.0
"""Assumed maximum time between the writing of a line and its read. The lines of one read get times that are evenly
spread over this time. If the last read was more recent, they are spread over the time since then. The exact times are
in a second file (`runtime.launcher.log_times`). Curves and estimates do not need them, so it is not read."""
MAX_LINE_LENGTH = 2000
"""Characters of an output line that are searched for metrics; lines with metrics are short."""
MAX_FINAL_READS = 320
"""Maximum reads of an ended run's output. 256 reads cover the largest log, of 64 MiB; the others are to spare."""
FINAL_READ_SECONDS = 5.0
"""How long the end of a run may wait until its output is read, because the ends of other runs wait behind it. Output of
the last second may have millions of points, which take minutes to read. `read_rest` reads what is left."""
MAX_FOLDER_NAME_LENGTH = 40
"""Characters of a folder in a curve's name. The other 60 of its 100 characters are for the separator and the tag."""
CURVE_NAME = re.compile(r"\w[\w ./:-]{0,99}")
"""Valid names of curves: up to 100 characters, the length of their column. Points with other names are ignored."""
RESERVED_KEYS = frozenset({"epoch", "epochs", "step", "steps", "time", "timestamp", "rank", "at"})
"""Keys of a METRICS_FILE record that are not curves."""

# A sequence that colors text in a terminal. It is removed, because its last letter `m` would join the word after it.
_COLOR = re.compile(r"\x1b\[[0-9;:]{0,32}m")
_NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
# `Epoch 3/10`, `epoch: 3`, `Epoch [3 of 10]`
EPOCH_LINE = re.compile(r"\bepochs?\b\W{0,3}(\d+)(?:\s*(?:/|of)\s*(\d+))?", re.IGNORECASE)
# `step 200`, `iter: 200`
STEP_LINE = re.compile(r"\b(?:step|iter|iteration|batch)\b\W{0,3}(\d+)", re.IGNORECASE)
# `train loss: 0.25`, `accuracy = 93.1 %`. The number of spaces is bounded; otherwise a line of spaces would take
# quadratic time.
VALUE_LINE = re.compile(
    r"\b((?:train|test|val|valid|validation|eval|average|avg)?[ _-]?(?:loss|accuracy|acc))\b\s{0,8}[:=]?\s{0,8}"
    rf"{_NUMBER}(\s*%)?",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Point:
    """One value read from a run.

    `number` counts the points of its curve in the attempt, from 0. `step` is as reported. `position` is the step, but
    continues to rise where a script starts again at 0 in each epoch (`points.next_position`).
    """

    name: str
    number: int
    step: int
    position: int
    value: float
    epoch: float | None
    at: datetime


class LineReport(NamedTuple):
    """What a line of output reports. `epoch` and `step` are None if it has none; `values` are by curve name."""

    epoch: float | None
    step: int | None
    values: dict[str, float]


class PointCollector:
    """Collects the points of one read, and updates the state of curves and epochs in the attempt's cursor.

    The keys of `cursor` are those that `ingest` lists.
    """

    def __init__(self, cursor: dict[str, Any]) -> None:
        self.points: list[Point] = []
        self._cursor = cursor

    @property
    def is_full(self) -> bool:
        """Whether there are as many points as a job may store, so that further points would not be stored."""
        return len(self.points) >= MAX_POINTS

    def add(self, name: str, step: int, value: float, epoch: float | None, at: datetime) -> None:
        """Add a point at its position. Ignore invalid names, steps and positions, and new curves beyond MAX_CURVES."""
        if not CURVE_NAME.fullmatch(name) or abs(step) >= MAX_STEP or self.is_full:
            return
        curves = self._cursor.setdefault("curves", {})
        if name not in curves and len(curves) >= MAX_CURVES:
            return
        position, state = next_position(curves.get(name), step, epoch)
        if abs(position) >= MAX_POSITION:
            return
        curves[name] = state
        counts = self._cursor.setdefault("counts", {})
        number = counts.get(name, 0)
        counts[name] = number + 1
        if number % self.kept_every == 0:
            self.points.append(Point(name, number, step, position, value, epoch, at))

    @property
    def kept_every(self) -> int:
        """Return n if only every nth point of a curve is stored; 1 if all are."""
        return int(self._cursor.get("kept_every", 1))

    def keep_fewer(self) -> None:
        """Drop every second point of this read. `add` then also stores only half as many points of each curve."""
        self._cursor["kept_every"] = 2 * self.kept_every
        self.points = [point for point in self.points if point.number % self.kept_every == 0]

    def report_epoch(self, epoch: float, at: datetime) -> None:
        """Store a reported epoch in the cursor. If it shows that another epoch is finished, store the time `at` too."""
        if not 0 <= epoch < MAX_STEP:
            return
        before = self._cursor.get("epochs")
        after = self._cursor["epochs"] = add_epoch(before, epoch)
        if count_finished_epochs(after) > count_finished_epochs(before):
            self._cursor["epoch_finished_at"] = at.timestamp()

    @property
    def finished_epochs(self) -> int:
        """Return how many epochs the attempt has finished."""
        return count_finished_epochs(self._cursor.get("epochs"))


def ingest(*, attempt: Attempt) -> bool:
    """Read an attempt's new output, and advance its cursor. Return whether there was new output.

    Safe to repeat and to run concurrently: files are read without a lock, and the result is stored only if no other
    process has moved the cursor meanwhile.

    Keys of the cursor:
    - `log` and `metrics`: byte offsets; `tensorboard`: byte offset by file
    - `line_begun`: an incomplete last line; `log_read_at`: time of the last read (Unix seconds)
    - `line` and `record`: how many lines with values, and records, were read so far; they replace missing steps
    - `epoch`: the last one in the log; `epochs`: `points.EpochState`; `epoch_finished_at`: Unix seconds
    - `curves`: `points.CurveState` by name; `counts`: points by name; `kept_every`: every nth is stored
    - `in_metrics_file`: curves in METRICS_FILE; `named`: curves in METRICS_FILE or event files
    - `reads_left`: how often `read_rest` may still read; only if the run ended before all of its output was read
    """
    try:
        folder = cluster(attempt.backend).run_folder(attempt.run_name)
    except RuntimeFault:
        return False  # the settings no longer name the cluster
    old_cursor = attempt.cursor
    cursor = copy.deepcopy(old_cursor)
    collector = PointCollector(cursor)
    # A script may report the same curve in several sources. It is then read only from the first that has it.
    _read_metrics_file(folder, cursor, collector)
    in_metrics_file = _add_names(cursor, "in_metrics_file", collector)
    _read_tensorboard(folder, cursor, collector, skipped=in_metrics_file)
    in_files = _add_names(cursor, "named", collector)
    _read_log(attempt, cursor, collector, skipped=in_files)
    if cursor == old_cursor:
        return False
    # Compare-and-set: the update changes the row only if its cursor is still the one that this read began with.
    rows_with_old_cursor = Attempt.objects.filter(pk=attempt.pk, cursor=old_cursor)
    if not collector.points and old_cursor.get("epochs") == cursor.get("epochs"):
        # Without a lock, because points and progress do not change.
        is_stored = bool(rows_with_old_cursor.update(cursor=cursor))
    else:
        with transaction.atomic():
            # Lock the job before the attempt, as `lifecycle` does.
            job = Job.objects.select_for_update().get(pk=attempt.job_id)
            is_stored = bool(rows_with_old_cursor.update(cursor=cursor))
            if is_stored:
                _store(job, attempt, collector)
                # If `_store` has halved the points, it has changed `cursor` after the update above.
                if cursor.get("kept_every") != old_cursor.get("kept_every"):
                    Attempt.objects.filter(pk=attempt.pk).update(cursor=cursor)
                publish_state(job.pk)
    # If another process was faster, continue from its cursor.
    attempt.cursor = cursor if is_stored else Attempt.objects.values_list("cursor", flat=True).get(pk=attempt.pk)
    return True


def _add_names(cursor: dict[str, Any], key: str, collector: PointCollector) -> frozenset[str]:
    """Add the names of the collected curves to `cursor[key]`. Return all names there, those of earlier reads too."""
    earlier_names = cursor.get(key, [])
    names = sorted({point.name for point in collector.points}.union(earlier_names))[:MAX_CURVES]
    if names != earlier_names:
        cursor[key] = names
    return frozenset(names)


def ingest_all(*, attempt: Attempt) -> bool:
    """Read the rest of an ended attempt's output, for about FINAL_READ_SECONDS. Return whether some is left unread.

    `read_rest` must then continue, which the cursor says too (`reads_left`). Errors are logged and do not stop the
    settlement that follows.
    """
    give_up_at = time.monotonic() + FINAL_READ_SECONDS
    reads_left = int(attempt.cursor.get("reads_left", MAX_FINAL_READS))
    try:
        while reads_left:
            reads_left = reads_left - 1 if ingest(attempt=attempt) else 0
            if time.monotonic() > give_up_at:
                break
    except Exception:
        logger.exception("The output of %s could not be read.", attempt.run_name)
        reads_left = 0
    if reads_left or "reads_left" in attempt.cursor:
        _store_reads_left(attempt, reads_left)
    return reads_left > 0


def _store_reads_left(attempt: Attempt, reads_left: int) -> None:
    """Store in the attempt's cursor how many reads are left for `read_rest`; 0: the output is read."""
    with transaction.atomic():
        # Another process may have moved the cursor.
        cursor = Attempt.objects.select_for_update().values_list("cursor", flat=True).get(pk=attempt.pk)
        cursor.pop("reads_left", None)
        if reads_left:
            cursor["reads_left"] = reads_left
        Attempt.objects.filter(pk=attempt.pk).update(cursor=cursor)
    attempt.cursor = cursor


@shared_task
def read_rest(attempt_pk: int) -> None:
    """Continue `ingest_all`. Each task reads for a few seconds and sends the next, so that other tasks get their turn.

    If the task is lost or the cluster does not answer, `reconciliation.delete_old_runs` sends it again.
    """
    attempt = Attempt.objects.filter(pk=attempt_pk).first()
    if attempt is None or not has_rest(attempt):
        return
    try:
        cluster(attempt.backend).describe(attempt.run_name)
    except BackendUnavailable:
        return  # `ingest` would take this for the end of the output
    except RunNotFound:
        pass  # `ingest_all` finds no output, and clears `reads_left`
    if ingest_all(attempt=attempt):
        send(read_rest, attempt_pk)


def has_rest(attempt: Attempt) -> bool:
    """Whether an attempt has ended before all of its output was read."""
    return attempt.finished_at is not None and "reads_left" in attempt.cursor


def epoch_finished_at(job: Job) -> datetime | None:
    """Return when the last finished epoch of the job's latest attempt ended; None if the attempt reported none."""
    cursor = Attempt.objects.filter(job=job).values_list("cursor", flat=True).last() or {}
    stamp = cursor.get("epoch_finished_at")
    return datetime.fromtimestamp(stamp, UTC) if stamp else None


def parse_line(line: str) -> LineReport:
    """Return what a line of output reports. Percentages become fractions."""
    line = _COLOR.sub("", line)
    epoch, step = _matched_number(EPOCH_LINE.search(line)), _matched_number(STEP_LINE.search(line))
    values: dict[str, float] = {}
    for match in VALUE_LINE.finditer(line):
        value = float(match[2]) / (100 if match[3] else 1)
        if math.isfinite(value):
            # If a line spells a name in two ways, the first value counts.
            values.setdefault(_canonical_name(match[1]), value)
    return LineReport(None if epoch is None else float(epoch), step, values)


def _matched_number(match: re.Match[str] | None) -> int | None:
    """Return the whole number that was matched; None without a match, or if the number is MAX_STEP or above."""
    number = int(match[1]) if match else None
    return number if number is not None and number < MAX_STEP else None


def _read_log(attempt: Attempt, cursor: dict[str, Any], collector: PointCollector, *, skipped: frozenset[str]) -> None:
    """Read new lines of rank 0's output. Curves in `skipped` are ignored, because another source has them."""
    try:
        chunk = cluster(attempt.backend).logs(attempt.run_name, 0, int(cursor.get("log", 0)), MAX_READ_BYTES)
    except RuntimeFault:
        return  # the cluster does not answer; the next read begins at the same offset
    # Without new text there is something to read only at the end: a last line without a line break.
    if not chunk.text and not (chunk.eof and cursor.get("line_begun")):
        return
    cursor["log"] = chunk.next_offset
    # A progress bar ends its lines with a carriage return.
    *lines, incomplete = (cursor.pop("line_begun", "") + chunk.text).replace("\r", "\n").split("\n")
    if chunk.eof:
        lines.append(incomplete)
    elif incomplete:
        # The next read may continue this line. Only the part that is searched is kept. PostgreSQL's JSON has no NUL.
        cursor["line_begun"] = incomplete.replace("\0", " ")[:MAX_LINE_LENGTH]
    now = timezone.now()
    interval_seconds = max(0.0, min(READ_DELAY_SECONDS, now.timestamp() - float(cursor.get("log_read_at", 0))))
    cursor["log_read_at"] = now.timestamp()
    for number, line in enumerate(lines, 1):
        if collector.is_full:
            return  # the remaining lines are dropped: the cursor is already after them
        at = now - timedelta(seconds=interval_seconds * (1 - number / len(lines)))
        epoch, step, values = parse_line(line[:MAX_LINE_LENGTH])
        if epoch is not None:
            cursor["epoch"] = epoch  # applies to later lines too, which may report values without an epoch
            collector.report_epoch(epoch, at)
        values = {name: value for name, value in values.items() if name not in skipped}
        if values:
            cursor["line"] = int(cursor.get("line", 0)) + 1
        for name, value in values.items():
            collector.add(name, cursor["line"] if step is None else step, value, cursor.get("epoch"), at)


def _read_metrics_file(run_folder: Path, cursor: dict[str, Any], collector: PointCollector) -> None:
    """Read new complete lines of METRICS_FILE."""
    offset = int(cursor.get("metrics", 0))
    data = _metrics_bytes(run_folder, offset)
    complete_bytes = data.rfind(b"\n") + 1  # up to the end of the last complete line
    if complete_bytes == 0 and len(data) < MAX_READ_BYTES:
        return
    # A line longer than MAX_READ_BYTES is no valid record, so this part of it is skipped.
    cursor["metrics"] = offset + (complete_bytes or len(data))
    for line in data[:complete_bytes].splitlines():
        if collector.is_full:
            return  # as in `_read_log`, the remaining lines are dropped
        _read_record(line, cursor, collector)


def _read_record(line: bytes, cursor: dict[str, Any], collector: PointCollector) -> None:
    """Read a line of METRICS_FILE. Invalid lines and values that are not numbers are ignored."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # RecursionError: deeply nested JSON
        return
    if not isinstance(record, dict):
        return
    # The bound excludes infinity, NaN, and whole numbers that are too large for a float.
    numbers = {
        name: float(value)
        for name, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    }
    epoch = numbers.get("epoch")
    cursor["record"] = int(cursor.get("record", 0)) + 1
    step = numbers.get("step", float(cursor["record"]))  # a record without a step counts as one step
    stamp = numbers.get("time", numbers.get("timestamp", 0.0))
    at = _reported_time(stamp)
    if epoch is not None:
        collector.report_epoch(epoch, at)
    for name, value in numbers.items():
        if name not in RESERVED_KEYS:
            collector.add(name, int(step), value, epoch, at)


def _read_tensorboard(
    run_folder: Path, cursor: dict[str, Any], collector: PointCollector, *, skipped: frozenset[str]
) -> None:
    """Read new scalars of TensorBoard's event files. Curves in `skipped` are ignored, because METRICS_FILE has them."""
    offsets = cursor.setdefault("tensorboard", {})
    for scalar in read_scalars(run_folder, ("run", "tensorboard"), offsets, MAX_READ_BYTES):
        name = _curve_name(scalar)
        if name not in skipped and math.isfinite(scalar.value):
            collector.add(name, scalar.step, scalar.value, epoch=None, at=_reported_time(scalar.wall_time))
    if not cursor["tensorboard"]:
        # Without event files the key must not stay, because `ingest` writes to the database if the cursor has changed.
        del cursor["tensorboard"]


def _curve_name(scalar: Scalar) -> str:
    """Return `folder/tag`, or the tag alone. Keras writes the same tags to the folders `train` and `validation`."""
    folder = re.sub(r"[^\w./:-]", "_", scalar.folder)[:MAX_FOLDER_NAME_LENGTH]
    return f"{folder}/{scalar.tag}" if folder else scalar.tag


def _reported_time(stamp: float) -> datetime:
    """Convert a reported time (Unix seconds). Return the current time if it is missing (0) or in the future."""
    now = timezone.now()
    return datetime.fromtimestamp(stamp, UTC) if 0 < stamp <= now.timestamp() else now


def _store(job: Job, attempt: Attempt, collector: PointCollector) -> None:
    """Store the points within the job's limits, and its progress. The caller has locked the job."""
    points = MetricPoint.objects.filter(job=job)
    stored_points = _make_room(job, collector) if collector.points else 0
    names = set(points.values_list("name", flat=True).distinct()) if collector.points else set()
    rows = []
    # The limits apply to all points and curves of the job. `PointCollector` knows only those of one attempt.
    for point in collector.points[: max(0, MAX_POINTS - stored_points)]:
        if point.name not in names and len(names) >= MAX_CURVES:
            continue
        names.add(point.name)
        rows.append(
            MetricPoint(
                job=job,
                attempt=attempt.number,
                name=point.name,
                step=point.step,
                position=point.position,
                epoch=point.epoch,
                value=point.value,
                at=point.at,
            )
        )
    MetricPoint.objects.bulk_create(rows, batch_size=1000)
    epoch = min(collector.finished_epochs, job.epochs)  # a script may run more epochs than were ordered
    # A retry that starts anew does not reduce the progress.
    # No condition on the state: the job may have ended, and `read_rest` stores what its run reported last.
    if epoch > job.epoch:
        Job.objects.filter(pk=job.pk, epoch__lt=epoch).update(epoch=epoch, progress=epoch / job.epochs)


def _make_room(job: Job, collector: PointCollector) -> int:
    """Delete every second point of each curve until the collected points fit. Return how many points are stored."""
    stored_points = MetricPoint.objects.filter(job=job).count()
    while stored_points + len(collector.points) > MAX_POINTS:
        collector.keep_fewer()
        numbered = MetricPoint.objects.filter(job=job).annotate(
            number=Window(RowNumber(), partition_by=[F("attempt"), F("name")], order_by=F("pk").asc())
        )
        surplus = [pk for pk, number in numbered.values_list("pk", "number") if number % 2 == 0]
        if not surplus:  # each curve has one point only
            break
        for start in range(0, len(surplus), DELETE_BATCH_SIZE):
            MetricPoint.objects.filter(pk__in=surplus[start : start + DELETE_BATCH_SIZE]).delete()
        stored_points -= len(surplus)
    return stored_points


def _canonical_name(name: str) -> str:
    """Return one name for all spellings of a curve: `Test Accuracy` and `test_acc` become `test_accuracy`."""
    words = re.split(r"[ _-]+", name.strip().lower())
    full = {"acc": "accuracy", "avg": "average", "val": "validation", "valid": "validation", "eval": "validation"}
    return "_".join(full.get(word, word) for word in words if word)


def _metrics_bytes(run_folder: Path, offset: int) -> bytes:
    """Read up to MAX_READ_BYTES of METRICS_FILE from `offset`. Return nothing for links, pipes and missing files."""
    with (
        contextlib.suppress(OSError, StorageError),  # the run's code has removed `run` or replaced it by a link
        open_folder(root=run_folder, parts=("run",)) as folder,
    ):
        if file := open_regular("metrics.jsonl", folder=folder):
            with file:
                file.seek(offset)
                return file.read(MAX_READ_BYTES)
    return b""
