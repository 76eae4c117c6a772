"""Explain a failed job: its diagnosis, who pays, files with a similar name, and what a new order would change.

The diagnosis of an attempt never changes, so it is cached after the first reading of the log.
"""

from __future__ import annotations

import difflib
import posixpath
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from django.core.cache import cache

from billing import selectors as billing
from console.core.errors import CustomerError
from jobs import diagnosis, run_specs, selectors
from jobs.diagnosis import Diagnosis, Fix
from jobs.models import Attempt, Job
from jobs.states import BILLED, EndReason, JobState
from storage import files
from storage import selectors as storage

CACHE_SECONDS = 24 * 3600
"""How long a diagnosis is kept. A page of a failed job is opened again within a day, if at all."""
LOG_BYTES = 32 * 1024
"""Bytes that are read from the end of the failing rank's output."""
MAX_ENTRIES = 200
"""Entries of a folder that are compared with a missing name."""
MAX_SIMILAR = 6
"""Similar names that are shown."""


@dataclass(frozen=True)
class Explanation:
    """Why a job failed, and what to do.

    `rank` and `node` are those that failed first; None if no rank failed. `folder` is the nearest
    folder of a missing file that exists, and `similar` are names in it, the most similar first. `changes` are fields of
    an order that would correct the failure. If the node spec changes, `spec_title` is its title and `hourly_minor` the
    price of a node and hour.
    """

    diagnosis: Diagnosis
    is_billed: bool
    rank: int | None = None
    node: int | None = None
    folder: str = ""
    similar: list[str] = field(default_factory=list)
    changes: dict[str, Any] = field(default_factory=dict)
    spec_title: str = ""
    hourly_minor: int | None = None


def explain(job: Job) -> Explanation | None:
    """Return why a job failed; None for a job that did not fail, and for a check. `job` comes from `selectors`."""
    if job.state != JobState.FAILED or job.builtin_script:
        return None
    attempt = next((each for each in reversed(job.attempts.all()) if each.failure), None)
    failure = (attempt and attempt.failure) or {}
    cause = _diagnosis(job, attempt)
    folder, similar = _similar_files(job, cause) if cause.cause == "missing_file" else ("", [])
    changes, title, hourly_minor = _changes(job, cause.fix)
    return Explanation(
        diagnosis=cause,
        is_billed=EndReason(job.reason) in BILLED and job.order.quote.ceiling_minor > 0,
        rank=failure.get("rank"),
        node=failure.get("node"),
        folder=folder,
        similar=similar,
        changes=changes,
        spec_title=title,
        hourly_minor=hourly_minor,
    )


def _diagnosis(job: Job, attempt: Attempt | None) -> Diagnosis:
    """Return the cached diagnosis of the failed attempt, or make it; None stands for a job that failed without one."""
    key = f"diagnosis-{job.pk}-{attempt.number if attempt else 0}"
    cached = cache.get(key)
    # Another version of the code may have stored it, with a cause that this version does not have.
    if isinstance(cached, Diagnosis) and cached.cause in diagnosis.CAUSES_BY_NAME:
        return cached
    failure = (attempt and attempt.failure) or {}
    log = ""
    if attempt and isinstance(failure.get("rank"), int):
        log = selectors.log(job, failure["rank"], -LOG_BYTES, attempt.number, limit=LOG_BYTES).text
    result = diagnosis.diagnose(diagnosis.evidence_of(job.reason, failure, log))
    cache.set(key, result, CACHE_SECONDS)
    return result


def _similar_files(job: Job, cause: Diagnosis) -> tuple[str, list[str]]:
    """Return the nearest existing folder of a missing file, and the names in it that are most similar to its name.

    The path was written by the customer's code. It is only used below the folders that the job mounts.
    """
    path = posixpath.normpath(cause.values.get("path", ""))
    if path.startswith(run_specs.DATASETS_TARGET):
        name, _slash, inside = path.removeprefix(run_specs.DATASETS_TARGET).strip("/").partition("/")
        versions = {version.dataset.name: version for version in run_specs.mounted_versions(job)}
        if name not in versions:
            return run_specs.DATASETS_TARGET, _most_similar(name, sorted(versions))
        return _nearest_folder(storage.version_folder(versions[name]), inside, f"{run_specs.DATASETS_TARGET}/{name}")
    if job.workspace.deleted_at:
        return "", []
    inside = path.removeprefix(run_specs.WORKSPACE_TARGET).strip("/")
    if not path.startswith("/"):
        inside = posixpath.normpath(posixpath.join(posixpath.dirname(job.code_path), path))
    elif not path.startswith(run_specs.WORKSPACE_TARGET):
        return "", []
    if inside.startswith(".."):
        return "", []
    return _nearest_folder(storage.workspace_folder(job.workspace), inside, run_specs.WORKSPACE_TARGET)


def _nearest_folder(root: Path, inside: str, shown_root: str) -> tuple[str, list[str]]:
    """Return the deepest existing folder on the way to a path below `root`, and its most similar names."""
    while True:
        inside, missing = posixpath.split(inside)
        try:
            listing = files.list_folder(root=root, path=inside, limit=MAX_ENTRIES)
        except CustomerError:
            if not inside:
                return "", []
            continue
        return posixpath.join(shown_root, inside).rstrip("/"), _most_similar(
            missing, [entry.name for entry in listing.entries]
        )


def _most_similar(name: str, names: list[str]) -> list[str]:
    # A cutoff below difflib's 0.6, because a wrong hint costs nothing. Names are cut, because it takes quadratic time.
    similar = difflib.get_close_matches(name[:100], [each[:100] for each in names], MAX_SIMILAR, cutoff=0.4)
    return similar + [each for each in names if each not in similar][: MAX_SIMILAR - len(similar)]


def _changes(job: Job, fix: Fix) -> tuple[dict[str, Any], str, int | None]:
    """Return the fields of an order that correct the failure; for another node spec its title and price per hour."""
    if fix is Fix.SMALLER_BATCH and job.batch_size > 1:
        return {"batch_size": job.batch_size // 2}, "", None
    if fix is Fix.LARGER_NODE or fix is Fix.GPU_NODE:
        offers = [
            offer
            for offer in billing.offered_specs(job.order.quote.currency)
            if offer.hourly_minor is not None
            and (
                (offer.spec.gpus > 0 if fix is Fix.GPU_NODE else offer.spec.memory_mib > job.node_spec.memory_mib)
                and offer.spec.gpus >= job.node_spec.gpus
            )
        ]
        if offers:
            offer = min(offers, key=lambda each: (each.spec.memory_mib, each.spec.pk))
            return {"node_spec": offer.spec.name}, offer.spec.title, round(offer.hourly_minor or 0)
        if job.batch_size > 1 and fix is Fix.LARGER_NODE:
            return {"batch_size": job.batch_size // 2}, "", None
    return {}, "", None
