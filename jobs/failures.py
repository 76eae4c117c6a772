"""Explain a failed job: why it failed, who pays, and how to correct it.

A correction is a new order with some fields changed. For a missing file there are suggestions instead: names in the
deepest folder of its path that exists. The diagnosis of an attempt never changes, so it is cached after the first
reading of the log.
"""

from __future__ import annotations

import difflib
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from billing import selectors as billing
from console.core import optional_cache
from console.core.errors import CustomerError
from jobs import run_specs, selectors
from jobs.diagnosis import CAUSES_BY_NAME, Diagnosis, Fix, diagnose, evidence_of
from jobs.models import Attempt, Job
from jobs.purchase import max_workers_per_node
from jobs.states import EndReason, JobState
from storage import files
from storage import selectors as storage

CACHE_SECONDS = 24 * 3600
"""How long a diagnosis is cached. Customers look at a failed job on the day of its failure, and rarely later."""
LOG_BYTES = 32 * 1024
"""Bytes that are read from the end of the failing rank's output. `diagnosis.MAX_LOG_LENGTH`, which limits characters,
is the same number: each character has at least one byte."""
MAX_COMPARED_ENTRIES = 200
"""Entries of a folder that are compared with a missing name. More would delay the page, and rarely help."""
MAX_COMPARED_LENGTH = 100
"""Characters of a name that are compared. The time of a comparison grows with the square of the length."""
MAX_SUGGESTIONS = 6
"""Names of existing files that are suggested for a missing one: they fit on one line."""
MIN_SIMILARITY = 0.4
"""Similarity from which a name counts as similar. Below difflib's 0.6, because a wrong suggestion does no harm."""


@dataclass(frozen=True)
class Explanation:
    """Why a job failed, and what to do.

    `rank` and `node` are the numbers of the rank and the node that failed first; None if no rank failed. For a missing
    file, `folder` is the deepest folder of its path that exists, and `suggestions` are names in that folder, the most
    similar ones first. `changes` are the fields of a new order that would correct the failure, by their API names. If
    they change the node spec, `spec_title` is the title of the new one and `hourly_minor` its price per node and hour.
    """

    diagnosis: Diagnosis
    is_billed: bool
    rank: int | None = None
    node: int | None = None
    folder: str = ""
    suggestions: list[str] = field(default_factory=list)
    changes: dict[str, Any] = field(default_factory=dict)
    spec_title: str = ""
    hourly_minor: int | None = None


class _Suggestions(NamedTuple):
    """Names of existing files in place of a missing one, and their folder."""

    folder: str = ""
    names: Sequence[str] = ()


class _Correction(NamedTuple):
    """The fields of an Explanation that describe a corrected order. Without `changes`, no order would help."""

    changes: Mapping[str, Any] = {}
    spec_title: str = ""
    hourly_minor: int | None = None


def explain(job: Job) -> Explanation | None:
    """Return why a job failed; None for a job that did not fail, and for a check or a notebook.

    A check and a notebook run a script of the platform, so their failures are not those of the customer's code.
    None too for a free estimate that used its whole minute: it has measured, and needs no correction. `job` was
    loaded with its related rows by `selectors.job_for` or `jobs_for`.
    """
    if job.state != JobState.FAILED or job.builtin_script:
        return None
    if job.reason == EndReason.TIME_LIMIT and selectors.measures_purchase(job):
        return None
    attempt = next((each for each in reversed(job.attempts.all()) if each.failure), None)
    failure = (attempt and attempt.failure) or {}
    diagnosis = _diagnosis(job, attempt)
    is_missing_file = diagnosis.cause == "missing_file"
    suggestions = _suggested_files(job, diagnosis.values.get("path", "")) if is_missing_file else _Suggestions()
    correction = _correction(job, diagnosis.fix)
    return Explanation(
        diagnosis=diagnosis,
        is_billed=selectors.cost_minor(job) > 0,
        rank=failure.get("rank"),
        node=failure.get("node"),
        folder=suggestions.folder,
        suggestions=list(suggestions.names),
        changes=dict(correction.changes),
        spec_title=correction.spec_title,
        hourly_minor=correction.hourly_minor,
    )


def _diagnosis(job: Job, attempt: Attempt | None) -> Diagnosis:
    """Return the diagnosis of a failed attempt, from the cache or from its log.

    `attempt` is None if no attempt has a failure, for example because the packages could not be installed.
    """
    key = f"diagnosis-{job.pk}-{attempt.number if attempt else 0}"
    cached = optional_cache.get(key)
    # Another version of the console may have cached it, with a cause that this version does not have.
    if isinstance(cached, Diagnosis) and cached.cause in CAUSES_BY_NAME:
        return cached
    failure = (attempt and attempt.failure) or {}
    log = ""
    has_log = attempt is not None and isinstance(failure.get("rank"), int)
    if attempt and has_log:
        log = selectors.log(job, failure["rank"], -LOG_BYTES, attempt.number, limit=LOG_BYTES).text
    diagnosis = diagnose(evidence_of(job.reason, failure, log))
    if log or not has_log:  # an empty log may only mean that the cluster does not answer now
        optional_cache.put(key, diagnosis, CACHE_SECONDS)
    return diagnosis


def _suggested_files(job: Job, path: str) -> _Suggestions:
    """Return names in the deepest existing folder of a missing file's path. Empty if it is in no mounted folder.

    The path was written by the customer's code. It is only used below the folders that the job mounts.
    """
    path = posixpath.normpath(path)
    if (relative_path := _path_below(run_specs.DATASETS_PATH, path)) is not None:
        folders = {each.dataset.name: storage.version_folder(each) for each in run_specs.mounted_dataset_versions(job)}
        return _suggest_in_mounts(run_specs.DATASETS_PATH, folders, relative_path)
    if (relative_path := _path_below(run_specs.MODELS_PATH, path)) is not None:
        folders = {each.model.name: storage.model_folder(each) for each in run_specs.mounted_model_versions(job)}
        return _suggest_in_mounts(run_specs.MODELS_PATH, folders, relative_path)
    # The working directory of a run is the folder of its script, so relative paths begin there.
    script_folder = posixpath.join(run_specs.WORKSPACE_PATH, posixpath.dirname(job.code_path))
    relative_path = _path_below(run_specs.WORKSPACE_PATH, posixpath.normpath(posixpath.join(script_folder, path)))
    if relative_path is None or job.workspace.deleted_at:
        return _Suggestions()
    return _suggest_in_deepest_folder(storage.workspace_folder(job.workspace), relative_path, run_specs.WORKSPACE_PATH)


def _path_below(mount: str, path: str) -> str | None:
    """Make an absolute path relative to `mount`. Return "" for the mount itself; None for a path outside of it."""
    if path == mount:
        return ""
    return path.removeprefix(f"{mount}/") if path.startswith(f"{mount}/") else None


def _suggest_in_mounts(mount: str, folders: dict[str, Path], path: str) -> _Suggestions:
    """Return suggestions for `path` below `mount`. The run sees each folder of `folders` at `mount`/name.

    `folders` are those of datasets or models, by name.
    """
    name, _slash, path_in_folder = path.partition("/")
    if name not in folders:
        return _Suggestions(mount, _most_similar(name, sorted(folders)))
    return _suggest_in_deepest_folder(folders[name], path_in_folder, f"{mount}/{name}")


def _suggest_in_deepest_folder(root: Path, path: str, mount: str) -> _Suggestions:
    """Return suggestions for the first missing name of `path`, in the deepest folder of it that exists.

    `path` is relative to the folder `root`, which the run sees at `mount`.
    """
    while True:
        path, missing_name = posixpath.split(path)
        try:
            listing = files.list_folder(root=root, path=path, limit=MAX_COMPARED_ENTRIES)
        except CustomerError:  # the folder is missing too or cannot be listed, so its parent is tried
            if not path:
                return _Suggestions()
            continue
        folder = posixpath.join(mount, path).rstrip("/")
        return _Suggestions(folder, _most_similar(missing_name, [entry.name for entry in listing.entries]))


def _most_similar(name: str, existing: list[str]) -> list[str]:
    """Return at most MAX_SUGGESTIONS of the existing names: those similar to `name` first, then others in their order.

    The others are listed too, because they show what the folder contains.
    """
    by_compared_part = {each[:MAX_COMPARED_LENGTH]: each for each in existing}
    similar = difflib.get_close_matches(
        name[:MAX_COMPARED_LENGTH], list(by_compared_part), MAX_SUGGESTIONS, cutoff=MIN_SIMILARITY
    )
    suggestions = [by_compared_part[each] for each in similar]
    return [*suggestions, *(each for each in existing if each not in suggestions)][:MAX_SUGGESTIONS]


def _correction(job: Job, fix: Fix) -> _Correction:
    """Return the changes that would correct a failed job's order."""
    if fix in {Fix.LARGER_NODE, Fix.GPU_NODE}:
        # Only the node spec changes in the new order, so it must also have enough GPUs and room for as many processes.
        offers = [
            offer
            for offer in billing.offered_specs(job.order.quote.currency)
            if offer.hourly_minor is not None
            and offer.spec.gpus >= job.node_spec.gpus
            and max_workers_per_node(offer.spec) >= job.workers_per_node
            and (offer.spec.gpus > 0 if fix is Fix.GPU_NODE else offer.spec.memory_mib > job.node_spec.memory_mib)
        ]
        if offers:
            # The cheapest of the node specs that suffice; of equally cheap ones, the smallest.
            offer = min(offers, key=lambda each: (each.hourly_minor, each.spec.memory_mib, each.spec.pk))
            return _Correction({"node_spec": offer.spec.name}, offer.spec.title, round(offer.hourly_minor or 0))
    # If no larger node spec is on offer, a smaller batch helps too: it needs less memory.
    if fix in {Fix.LARGER_NODE, Fix.SMALLER_BATCH} and job.batch_size > 1:
        return _Correction({"batch_size": job.batch_size // 2})
    return _Correction()
