"""Read records of nodes: the failure that they describe and their latest timestamps. Pure.

`runtime.launcher.protocol` documents the fields of a cause. Customer code may have forged a pod's record, so
`is_well_formed` checks it before anything else reads it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from runtime.json_values import storable
from runtime.specs import Failure, FailureCode, Outcome

RecordData = Mapping[str, Any]
"""One node's record (`runtime.launcher.record.Record`), as decoded from JSON: its values are unchecked."""
Cause = Mapping[str, Any]
"""One cause in a record, also unchecked."""

_TIMES = ("started_at", "finished_at", "progress_at", "checkpoint_at")  # fields with Unix seconds or None
_MAX_TIME = 1 << 32
"""The latest time that is believed, in Unix seconds: in the year 2106. Later ones might not be valid dates."""
_MAX_INTEGER = 1 << 31
"""Integers must be smaller, so that databases can store them. Numbers of nodes, ranks and signals are far smaller."""
_MAX_CAUSE_LENGTH = 1 << 16
"""The longest cause that is accepted, as JSON. A usual cause, with its 20 last lines, has a few thousand characters. A
cause becomes a part of the final status, which must fit into a Job's 256 KiB of annotations."""


def is_well_formed(record: RecordData) -> bool:
    """Return whether the values in a record have the types and sizes that a supervisor writes.

    A valid signature does not prove that: in an image of their own, customers can find the key. One record that cannot
    be read would keep the run from ending.
    """
    causes = record.get("causes", [])
    return (
        all(record.get(name) is None or _is_seconds(record[name]) for name in _TIMES)
        and _is_integer(record.get("round", 0))
        and isinstance(causes, list)
        and all(isinstance(cause, Mapping) and _is_cause(cause) for cause in causes)
    )


def _is_cause(cause: Cause) -> bool:
    """Return whether the values in a cause have the types and sizes that a supervisor writes."""
    data, lines = cause.get("data") or {}, cause.get("last_lines") or []
    fields = {name: value for name, value in cause.items() if name not in {"data", "last_lines"}}
    return (
        cause.get("kind") in list(Outcome)  # in a set, a `kind` that is a list or an object would raise TypeError
        and _is_seconds(cause.get("at"))
        and all(cause.get(name) is None or _is_integer(cause[name]) for name in ("node", "rank", "exit_code"))
        and isinstance(cause.get("code", ""), str)
        and isinstance(lines, list)
        and isinstance(data, Mapping)
        and all(map(_is_plain, [*fields.values(), *lines, *data.values()]))
        and all(_is_seconds(data.get(name, 0.0)) for name in ("progress_at", "used_seconds", "seconds"))
        and len(json.dumps(cause)) <= _MAX_CAUSE_LENGTH
    )


def _is_seconds(value: object) -> bool:
    """Return whether this is a number from 0 to _MAX_TIME, which NaN is not."""
    return isinstance(value, int | float) and 0 <= value <= _MAX_TIME


def _is_plain(value: object) -> bool:
    """Return whether this is null, a boolean, a text or a finite number. Lists and objects could be nested deeply."""
    return value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and abs(value) < _MAX_INTEGER


def outcome_from(cause: Cause) -> Outcome:
    """Return the outcome that a cause implies. An unknown kind counts as a failure of the code.

    An error here would keep the run from ending, and in doubt a run is not free.
    """
    kind = cause["kind"]
    return Outcome(kind) if kind in list(Outcome) else Outcome.CODE_FAILED


def failure_from(cause: Cause) -> Failure:
    """Convert a cause in a record to a Failure."""
    cause = storable(cause)
    return Failure(
        message=str(cause.get("message") or _describe(cause)),
        code=_code(cause),
        data=dict(cause.get("data") or {}),
        node=cause.get("node"),
        rank=cause.get("rank"),
        exit_code=cause.get("exit_code"),
        signal=str(cause.get("signal") or ""),
        last_lines=tuple(str(line) for line in cause.get("last_lines") or ()),
    )


def latest(records: Iterable[RecordData], field: str) -> float | None:
    """Return the highest value of a timestamp among the records; None if no record has it."""
    return max((float(record[field]) for record in records if record.get(field) is not None), default=None)


def restarts(records: Iterable[RecordData]) -> int:
    """Return how often the ranks were restarted inside the run."""
    return max((int(record.get("round", 0)) for record in records), default=0)


def progress_at(records: Iterable[RecordData], hang_data: Mapping[str, Any] | None) -> float | None:
    """Return when the run last made progress. `hang_data` is the data of the cause if the run hung, else None.

    A hung run is billed up to this time. Output that ranks wrote while they were being ended does not count. Computing
    after the last progress counts as work, so `used_seconds` is added: the CPU time since then, divided by the run's
    cores.
    """
    recorded_at = latest(records, "progress_at")
    if recorded_at is None or hang_data is None:
        return recorded_at
    detected_progress_at = float(hang_data.get("progress_at", recorded_at))
    return min(recorded_at, detected_progress_at) + float(hang_data.get("used_seconds", 0.0))


def _code(cause: Cause) -> FailureCode:
    """Return the cause's own code if it is a known one, else the code that its kind implies."""
    code = cause.get("code")
    if code in set(FailureCode):
        return FailureCode(code)
    outcome = outcome_from(cause)
    if outcome is Outcome.CODE_FAILED:
        return FailureCode.RANK_KILLED if cause.get("signal") else FailureCode.RANK_EXITED
    return FailureCode(outcome)


def _describe(cause: Cause) -> str:
    """Return an English sentence for the failure of a rank."""
    rank = f"Rank {cause.get('rank')} on node {cause.get('node')}"
    data = cause.get("data") or {}
    if data.get("exception"):
        return f"{rank} raised {data['exception']}: {data.get('message') or ''}".removesuffix(": ")
    if cause.get("signal"):
        return f"{rank} was killed by {cause['signal']}."
    return f"{rank} exited with code {cause.get('exit_code')}."
