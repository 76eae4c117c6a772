"""Send the files of a folder to a workspace: only files whose bytes differ."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .client import Client
from .errors import ApiError, UnexpectedAnswer
from .folders import LocalFile, Scan
from .uploads import FileContent, Uploads

COMPARED_FILES = 500
"""Maximum files of one comparison. The console accepts 1000."""
COMPARED_BYTES = 1024**3
"""Maximum bytes of one comparison, half of the 2 GiB that the console reads for one."""
LARGE_BYTES = 8 * 1024**2
"""A file of at least this size is sent as a resumable upload."""
MAX_DEPTH = 64
"""Folders nested deeper in a workspace are not listed."""


@dataclass(frozen=True)
class Plan:
    """The changes of a sync: files to send, and paths in the workspace that the folder does not have."""

    changed: tuple[LocalFile, ...]
    unchanged_count: int
    extra: tuple[str, ...]

    @property
    def size(self) -> int:
        """Bytes to send."""
        return sum(each.size for each in self.changed)


def workspace_name(folder: Path) -> str:
    """Return a valid name of a workspace for a folder."""
    name = re.sub("[^a-z0-9_-]+", "-", folder.resolve().name.lower())[:63].strip("-_")
    return name or "workspace"


def ensure_workspace(client: Client, name: str) -> bool:
    """Create the workspace if there is none; return whether it is new."""
    try:
        client.workspace(name)
    except ApiError as error:
        if error.status != 404:
            raise
        client.create_workspace(name)
        return True
    return False


def plan(client: Client, workspace: str, scan: Scan, *, with_extra: bool) -> Plan:
    """Compare a folder with a workspace. `with_extra`: also find the paths that the folder does not have."""
    changed = list[LocalFile]()
    for batch in _batches(scan.files):
        descriptions = [{"path": each.path, "size": each.size, "sha256": each.sha256()} for each in batch]
        differing = set(client.differing_files(workspace, descriptions))
        changed += [each for each in batch if each.path in differing]
    extra = tuple(_extra_paths(client, workspace, scan)) if with_extra else ()
    return Plan(tuple(changed), len(scan.files) - len(changed), extra)


def send(
    client: Client, uploads: Uploads, workspace: str, plan: Plan, *, on_sent: Callable[[int], None] = lambda _size: None
) -> None:
    """Send the files of a plan. `on_sent` gets the bytes as they are sent."""
    for each in plan.changed:
        if each.size < LARGE_BYTES:
            client.write_file(workspace, each.path, each.file.read_bytes())
            on_sent(each.size)
        else:
            metadata = {"purpose": "workspace", "name": workspace, "path": each.path, "filename": each.file.name}
            uploads.send(FileContent(each.file), metadata, on_sent=on_sent)


def delete_extra(client: Client, workspace: str, plan: Plan) -> None:
    """Move the paths that the folder does not have to the workspace's recycle bin."""
    for path in plan.extra:
        client.delete_file(workspace, path)


def _batches(files: Sequence[LocalFile]) -> Iterator[list[LocalFile]]:
    """Yield the files in batches within COMPARED_FILES and COMPARED_BYTES; a larger file is a batch of its own."""
    batch, size = list[LocalFile](), 0
    for each in files:
        if batch and (len(batch) == COMPARED_FILES or size + each.size > COMPARED_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(each)
        size += each.size
    if batch:
        yield batch


def _extra_paths(client: Client, workspace: str, scan: Scan) -> Iterator[str]:
    """Yield the workspace's paths that the folder does not have; a folder without any local file is one path.

    Paths that the folder ignores are not yielded, so they stay in the workspace.
    """
    files = {each.path for each in scan.files}
    folders = {path[:index] for path in files for index, character in enumerate(path) if character == "/"}
    pending = [""]
    while pending:
        prefix = pending.pop()
        if prefix.count("/") > MAX_DEPTH:
            raise UnexpectedAnswer(f"The workspace {workspace} has more than {MAX_DEPTH} folders in each other.")
        for entry in client.workspace_entries(workspace, prefix.rstrip("/")):
            path, is_folder = f"{prefix}{entry.name}", entry.kind == "folder"
            if scan.ignore.matches(path, is_folder=is_folder) or path in scan.skipped:
                continue
            if is_folder and path in folders:
                pending.append(f"{path}/")
            elif is_folder or path not in files:
                yield path
