"""Send the files of a folder to a workspace, but only those whose bytes differ."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .client import Client
from .errors import ApiError, UnexpectedAnswer
from .folders import LocalFile, Scan
from .uploads import FileContent, Uploads

MAX_COMPARED_FILES = 500
"""Maximum number of files in one comparison. The console accepts 1000; half of that keeps a request fast."""
MAX_COMPARED_BYTES = 1024**3
"""Maximum size of the files of one comparison: half of the 2 GiB that the console reads to compare."""
LARGE_BYTES = 8 * 1024**2
"""A file of at least this size is sent as a resumable upload, which takes several requests. Smaller files are sent
again as a whole after an interruption."""
MAX_DEPTH = 64
"""How deep the folders of a workspace may be nested: far deeper than in real projects. Without a limit, a faulty
console could name folders without end."""


@dataclass(frozen=True)
class Plan:
    """The changes of a sync: `changed` are the files to send, `extra` the workspace's paths that the folder lacks."""

    changed: tuple[LocalFile, ...]
    unchanged_count: int
    extra: tuple[str, ...]
    is_new: bool = False
    """Whether the workspace must be created."""

    @property
    def size(self) -> int:
        """Return the size of the files to send, in bytes."""
        return sum(file.size for file in self.changed)


def workspace_name(folder: Path) -> str:
    """Return the folder's name in the characters that the name of a workspace may have."""
    # The console accepts names of at most 63 characters that begin and end with a letter or digit.
    name = re.sub("[^a-z0-9_-]+", "-", folder.resolve().name.lower())[:63].strip("-_")
    return name or "workspace"


def workspace_exists(client: Client, name: str) -> bool:
    """Return whether the workspace exists."""
    try:
        client.workspace(name)
    except ApiError as error:
        if error.status != 404:
            raise
        return False
    return True


def plan(client: Client, workspace: str, scan: Scan, *, with_extra: bool) -> Plan:
    """Compare a folder with a workspace. With `with_extra`, also find the workspace's paths that the folder lacks.

    A workspace that does not exist yet is `is_new` in the plan.
    """
    if not workspace_exists(client, workspace):
        return Plan(scan.files, 0, (), is_new=True)
    changed = list[LocalFile]()
    for batch in _split_into_batches(scan.files):
        descriptions = [{"path": file.path, "size": file.size, "sha256": file.sha256()} for file in batch]
        differing_paths = set(client.differing_files(workspace, descriptions))
        changed += [file for file in batch if file.path in differing_paths]
    extra = tuple(_find_extra_paths(client, workspace, scan)) if with_extra else ()
    return Plan(tuple(changed), len(scan.files) - len(changed), extra)


def send(
    client: Client, uploads: Uploads, workspace: str, plan: Plan, *, on_sent: Callable[[int], None] = lambda _size: None
) -> None:
    """Send the files of a plan, to a workspace that is created if it does not exist.

    `on_sent` is called several times, each time with the number of bytes sent since the last call. After an
    interruption it is negative: see `Uploads.send`.
    """
    if plan.is_new:
        client.create_workspace(workspace)
    # `local.path` is the path in the workspace, `local.file` the one on this machine.
    for local in plan.changed:
        if local.size < LARGE_BYTES:
            client.write_file(workspace, local.path, local.file.read_bytes())
            on_sent(local.size)
        else:
            metadata = {"purpose": "workspace", "name": workspace, "path": local.path, "filename": local.file.name}
            uploads.send(FileContent(local.file), metadata, on_sent=on_sent)


def delete_extra(client: Client, workspace: str, plan: Plan) -> None:
    """Move the plan's extra paths to the workspace's recycle bin."""
    for path in plan.extra:
        client.delete_file(workspace, path)


def _split_into_batches(files: Sequence[LocalFile]) -> Iterator[list[LocalFile]]:
    """Yield the files in batches within MAX_COMPARED_FILES and MAX_COMPARED_BYTES. A larger file is its own batch."""
    batch, size = list[LocalFile](), 0
    for file in files:
        if batch and (len(batch) == MAX_COMPARED_FILES or size + file.size > MAX_COMPARED_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(file)
        size += file.size
    if batch:
        yield batch


def _find_extra_paths(client: Client, workspace: str, scan: Scan) -> list[str]:
    """Return the workspace's paths that the folder on this machine lacks.

    A folder of which nothing stays counts as one path. Paths that the rules of `scan` leave out stay in the workspace.
    """
    files = {file.path for file in scan.files}
    folders = {str(parent) for path in files for parent in PurePosixPath(path).parents}

    def extra_below(prefix: str) -> tuple[list[str], bool]:
        """Return the extra paths below a folder, and whether anything in it stays."""
        if prefix.count("/") > MAX_DEPTH:
            raise UnexpectedAnswer(f"The folders of the workspace {workspace} are nested more than {MAX_DEPTH} deep.")
        extra, stays = list[str](), False
        for entry in client.workspace_entries(workspace, prefix.rstrip("/")):
            path, is_folder = f"{prefix}{entry.name}", entry.kind == "folder"
            if scan.ignore.matches(path, is_folder=is_folder) or path in scan.skipped or path in files:
                stays = True
            elif is_folder:
                extra_inside, stays_inside = extra_below(f"{path}/")
                stays_here = stays_inside or path in folders
                extra += extra_inside if stays_here else [path]
                stays |= stays_here
            else:
                extra.append(path)
        return extra, stays

    return extra_below("")[0]
