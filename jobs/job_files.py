"""The files of a job by their paths: `outputs/…`, `checkpoints/…` and `logs/attempt-<number>/…`.

Outputs and checkpoints are shared by the job's attempts. Customers' code writes all of them, so they are opened through
`storage.files` only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from jobs.clusters import cluster
from jobs.models import Attempt, Job
from jobs.results import ClusterUnavailable, checkpoint_key
from runtime.errors import RuntimeFault
from storage import files
from storage.errors import FileMissing, UnsafePath, WrongKind
from storage.folder_archives import Source
from storage.paths import Kind, split_path

RESULTS = ("outputs", "checkpoints")
"""The top folders that the customer's code fills. Their files can be published as a dataset or a model."""
TOPS = (*RESULTS, "logs")
"""The folders at the top of a job's files."""
LOG_NAME = re.compile(r"rank-\d+\.log|stacks-\d+\.txt")
"""The files of an attempt's log folder that customers see: each rank's output, and its stacks when the run hung. The
other files there are the platform's own."""
_ATTEMPT_NAME = re.compile(r"attempt-([1-9]\d{0,5})")


class Location(NamedTuple):
    """A path for the functions of `storage.files`: the folder that holds it, and the path below that folder."""

    root: Path
    path: str


@dataclass(frozen=True)
class JobEntry:
    """A file or folder of a job. `size` is in bytes, 0 for a folder.

    Only a folder at the top or below `logs` may be listed before it exists. Its `modified` is then None.
    """

    path: str
    kind: Kind
    size: int
    modified: datetime | None

    @property
    def exists(self) -> bool:
        """Whether the run has created the file or folder."""
        return self.modified is not None


@dataclass(frozen=True)
class EntryPage:
    """A page of a folder's entries. `next` is the cursor `after` of the next page, None on the last page."""

    entries: tuple[JobEntry, ...]
    next: str | None = None


def resolve(job: Job, path: str) -> Location:
    """Return the location of a file or folder of a job, which need not exist.

    `path` begins with one of TOPS. "" and `logs` are not folders on a disk, so FileMissing is raised for them. Also
    raises UnsafePath, and ClusterUnavailable if the settings no longer name the cluster.
    """
    top, *below = split_path(path) or ("",)
    if top == "logs" and below:
        return _log_location(job, below)
    if top not in RESULTS:
        raise FileMissing
    attempt = job.attempts.last()
    shared_key = checkpoint_key(job.pk)  # of both folders that the attempts share: checkpoints and outputs
    try:
        backend = cluster(attempt.backend if attempt else job.node_spec.cluster)
        root = backend.output_folder(shared_key) if top == "outputs" else backend.checkpoint_folder(shared_key)
    except RuntimeFault:
        raise ClusterUnavailable from None
    return Location(root, "/".join(below))


def list_files(job: Job, path: str = "", *, limit: int, after: str = "") -> EntryPage:
    """Return at most `limit` entries of a folder, folders first. `after` is `next` of the previous page.

    A folder at the top that does not exist yet is returned as empty. Raises FileMissing, UnsafePath, WrongKind,
    InvalidInput, ClusterUnavailable.
    """
    parts = split_path(path)
    if not parts:
        return EntryPage(tuple(_folder_at(job, top) for top in TOPS))
    if parts == ("logs",):
        return EntryPage(tuple(_folder_at(job, f"logs/{name}") for name in _log_folders(job)))
    try:
        location = resolve(job, path)
        listing = files.list_folder(
            root=location.root,
            path=location.path,
            limit=limit,
            after=after,
            folders_first=True,
            is_listed=_filter_of(parts),
        )
    except FileMissing:
        if len(parts) > 1:
            raise
        return EntryPage(())
    folder = "/".join(parts)
    # Checked again, because a running job may have replaced an entry by a link since the folder was scanned.
    visible = (each for each in listing.entries if each.kind in {Kind.FILE, Kind.FOLDER})
    entries = tuple(JobEntry(f"{folder}/{each.name}", each.kind, each.size, each.modified) for each in visible)
    return EntryPage(entries, listing.next)


def read(job: Job, path: str) -> files.OpenFile:
    """Open a file of the job. Raises FileMissing, UnsafePath, WrongKind, Unreadable, ClusterUnavailable."""
    if not split_path(path) or path.strip("/") == "logs":
        raise WrongKind
    location = resolve(job, path)
    return files.read(root=location.root, path=location.path)


def archive_sources(job: Job, path: str = "") -> list[Source]:
    """Return what an archive of a file or folder contains, for `storage.folder_archives`. Raises as `read` does."""
    parts = split_path(path)
    if parts in {(), ("logs",)}:
        paths = [f"logs/{name}" for name in _log_folders(job)]
        if not parts:
            paths = [*RESULTS, *paths]
        existing_paths = [each for each in paths if _folder_at(job, each).exists]
        return [_source(job, each, name=each) for each in existing_paths]
    source = _source(job, path, name=parts[-1])
    kind = files.stat(root=source.root, path=source.path).kind  # raises FileMissing if there is nothing
    if kind is Kind.LINK:
        raise UnsafePath
    if kind is Kind.OTHER:
        raise WrongKind
    return [source]


def _source(job: Job, path: str, *, name: str) -> Source:
    """Return an archive's source for a path of the job. `name` is its name in the archive."""
    location = resolve(job, path)
    return Source(location.root, location.path, name, _filter_of(split_path(path)))


def _folder_at(job: Job, path: str) -> JobEntry:
    """Return the entry of a folder, which need not exist. `logs` has the latest time of its attempts' folders."""
    if path == "logs":
        times = (_folder_at(job, f"logs/{name}").modified for name in _log_folders(job))
        return JobEntry(path, Kind.FOLDER, 0, max(filter(None, times), default=None))
    try:
        location = resolve(job, path)
        modified = files.stat(root=location.root, path=location.path).modified
    except FileMissing:
        modified = None
    return JobEntry(path, Kind.FOLDER, size=0, modified=modified)


def _log_folders(job: Job) -> list[str]:
    """Return the names of the folders below `logs`, one for each attempt."""
    return [f"attempt-{number}" for number in job.attempts.values_list("number", flat=True)]


def _filter_of(parts: Sequence[str]) -> Callable[[os.DirEntry[str]], bool]:
    """Return the filter of a folder's entries that customers see: files and folders; of logs, LOG_NAME only."""
    return _is_log if parts[0] == "logs" else _is_file_or_folder


def _is_log(entry: os.DirEntry[str]) -> bool:
    return LOG_NAME.fullmatch(entry.name) is not None and entry.is_file(follow_symlinks=False)


def _is_file_or_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)


def _log_location(job: Job, below: list[str]) -> Location:
    """Return the location of an attempt's log folder, or of a file in it. `below`: the path's parts below `logs`."""
    number = _ATTEMPT_NAME.fullmatch(below[0])
    attempt: Attempt | None = job.attempts.filter(number=int(number[1])).first() if number else None
    if attempt is None or len(below) > 2 or (len(below) == 2 and not LOG_NAME.fullmatch(below[1])):
        raise FileMissing
    try:
        root = cluster(attempt.backend).run_folder(attempt.run_name)
    except RuntimeFault:
        raise ClusterUnavailable from None
    # The run's folder is the root, because on Kubernetes customers' code can replace `logs` by a link.
    return Location(root, "/".join(["logs", *below[1:]]))
