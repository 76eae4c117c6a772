"""Copy files and folders within a workspace, and copy workspaces. Links, pipes and devices are left out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from django.conf import settings
from django.utils.translation import gettext_lazy as _

from storage import catalog, files, selectors
from storage.errors import NameTaken, SourceChanged, TooLarge, WrongKind
from storage.files import SpaceCounter
from storage.models import Workspace
from storage.paths import Kind, split_path
from storage.quota import Reservation
from storage.tree_copy import copy_tree
from storage.trees import Usage

MAX_COPY_BYTES = 4 * 1024**3
"""How much one request copies at most, which takes about ten seconds and holds a thread that serves pages. The message
in `_LimitedCounter` names it too."""


@dataclass
class _LimitedCounter:
    """A counter that also refuses more than MAX_COPY_BYTES."""

    counter: SpaceCounter
    counted_bytes: int = 0

    def count(self, *, size_bytes: int = 0, entries: int = 0) -> None:
        """Count what is about to be written. Raises TooLarge."""
        self.counted_bytes += size_bytes
        if self.counted_bytes > MAX_COPY_BYTES:
            raise TooLarge(_("A copy may have at most 4 GiB. Copy a smaller folder, or write the copy in a run."))
        self.counter.count(size_bytes=size_bytes, entries=entries)


def copy_entry(*, workspace: Workspace, source: str, target: str) -> int:
    """Copy a file or folder of the workspace to a free path; return how many entries were left out.

    Raises NameTaken, TooLarge, FileMissing, UnsafePath, WrongKind, SourceChanged.
    """
    root = selectors.workspace_folder(workspace)
    if not split_path(source):
        raise WrongKind(_("This is the whole workspace. Create a new workspace as a copy of it instead."))
    is_file = files.stat(root=root, path=source).kind is Kind.FILE
    missing_entries = files.missing_entries(root=root, path=target)
    if not missing_entries:
        raise NameTaken(_("A file or folder with this name already exists. Choose another name or delete it first."))
    with (
        Reservation(workspace.organization, label=workspace.name) as reservation,
        catalog.temporary_folder() as scratch,
    ):
        unfinished = scratch / "files"
        unfinished.mkdir(mode=0o755)
        new_parents = missing_entries - 1
        reservation.count(entries=new_parents)
        copy_result = copy_tree(
            root=root,
            path=source,
            target=unfinished,
            counter=_LimitedCounter(reservation),
            max_entries=settings.MAX_ARCHIVE_FILES,
        )
        # A copied file has two entries, itself and the folder `unfinished`. Any other number shows that a folder has
        # replaced the file since `stat`.
        if is_file and copy_result.usage.entry_count != 2:
            raise SourceChanged
        finished = next(unfinished.iterdir()) if is_file else unfinished
        files.move_in(source=finished, root=root, path=target)
        # `copy_result.usage` includes the folder `unfinished`, which was moved only if a folder was copied.
        copied_entries = copy_result.usage.entry_count - (1 if is_file else 0)
        added = Usage(copy_result.usage.size_bytes, new_parents + copied_entries)
        catalog.add_usage(workspace, added, reservation)
    return copy_result.skipped_count


def copy_fill(workspace: Workspace) -> catalog.Fill:
    """Return a function that fills a new workspace with a copy of this one."""

    def fill(folder: Path, counter: SpaceCounter) -> Usage:
        return copy_tree(
            root=selectors.workspace_folder(workspace),
            path="",
            target=folder,
            counter=_LimitedCounter(counter),
            max_entries=settings.MAX_ARCHIVE_FILES,
        ).usage

    return fill
