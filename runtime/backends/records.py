"""Read records of nodes: the failure that they describe and their latest timestamps. Pure.

`runtime.launcher.protocol` documents the fields of a cause. A pod's record is written beside customer code, so this
module converts every value and expects any key to be missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from runtime.specs import Failure, FailureCode, Outcome

RecordData = Mapping[str, Any]
"""One node's record (`runtime.launcher.record.Record`), as decoded from JSON: its values are unchecked."""
Cause = Mapping[str, Any]
"""One cause in a record, also unchecked."""


def failure_from(cause: Cause) -> Failure:
    """Convert a cause in a record to a Failure."""
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

    A hung run is billed up to this time. Output that ranks wrote while they were being ended does not count. CPU time
    that they used after their last progress (`used_seconds`) counts as work and is added.
    """
    recorded_at = latest(records, "progress_at")
    if recorded_at is None or hang_data is None:
        return recorded_at
    hung_since = float(hang_data.get("progress_at", recorded_at))
    return min(recorded_at, hung_since) + float(hang_data.get("used_seconds", 0.0))


def _code(cause: Cause) -> FailureCode:
    """Return the cause's own code if it is a known one, else the code that its kind implies."""
    code = cause.get("code")
    if code in set(FailureCode):
        return FailureCode(code)
    if cause["kind"] == Outcome.CODE_FAILED:
        return FailureCode.RANK_KILLED if cause.get("signal") else FailureCode.RANK_EXITED
    return FailureCode(cause["kind"])


def _describe(cause: Cause) -> str:
    """Return an English sentence for the failure of a rank."""
    rank = f"Rank {cause.get('rank')} on node {cause.get('node')}"
    data = cause.get("data") or {}
    if data.get("exception"):
        return f"{rank} raised {data['exception']}: {data.get('message') or ''}".removesuffix(": ")
    if cause.get("signal"):
        return f"{rank} was killed by {cause['signal']}."
    return f"{rank} exited with code {cause.get('exit_code')}."
