"""The recycle bin of a workspace: delete, restore and finally remove its files and folders.

A deleted file or folder is renamed into the console's own folder `bin/`, so runs neither see nor change it. It stays
for `KEPT_AFTER_DELETION` and counts against the quota meanwhile. The row is removed only after the files are, so every
file on the disk counts. Links, pipes and devices hold nothing to restore: they are removed at once.
"""

from __future__ import annotations

import os
import posixpath
import secrets
from contextlib import suppress
from pathlib import Path

from django.db import transaction
from django.db.models import QuerySet, Sum
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from console.accounts.models import Organization, User
from console.core.errors import NotFound
from storage import catalog, files, selectors, trees
from storage.errors import FileMissing, NameTaken
from storage.models import KEPT_AFTER_DELETION, DeletedFile, Workspace
from storage.paths import Kind, split_path
from storage.quota import Reservation
from storage.trees import Usage

MAX_NAMES = 100
"""How many names `restore` tries if the old one is taken."""


def delete(*, workspace: Workspace, path: str, user: User | None = None) -> DeletedFile | None:
    """Move a file or folder to the recycle bin; return its row, None for a link or pipe, which is removed at once.

    Raises FileMissing, UnsafePath, WrongKind.
    """
    root = selectors.workspace_folder(workspace)
    kind = files.stat(root=root, path=path).kind
    if kind not in {Kind.FILE, Kind.FOLDER}:
        catalog.delete_file(workspace=workspace, path=path)
        return None
    with transaction.atomic():
        item = DeletedFile.objects.create(
            workspace=workspace,
            path="/".join(split_path(path)),
            folder=secrets.token_hex(16),
            is_folder=kind is Kind.FOLDER,
            deleted_by=user,
            kept_until=timezone.now() + KEPT_AFTER_DELETION,
        )
        # After a crash between the rename and the commit, the file is in the bin without a row. It stays as long.
        files.move_out(root=root, path=path, target=folder_of(item))
    usage = measure(item)
    catalog.add_usage(workspace, Usage(-usage.size_bytes, -usage.entry_count))
    return item


def restore(*, item: DeletedFile, path: str = "") -> str:
    """Move a deleted file or folder back, to `path` or to where it was; return where it is now.

    If its old path is taken, it gets a free name beside it. Raises NotFound after the retention or if the workspace is
    deleted, NameTaken, TooLarge, UnsafePath, WrongKind.
    """
    workspace = item.workspace
    root = selectors.workspace_folder(workspace)
    target = path or _free_path(root, item.path)
    with Reservation(workspace.organization, label=workspace.name) as reservation:
        new_folders = max(0, files.missing_entries(root=root, path=target) - 1)
        reservation.count(entries=new_folders)
        with transaction.atomic():
            rows = DeletedFile.objects.select_for_update(of=("self",)).filter(
                pk=item.pk, kept_until__gt=timezone.now(), workspace__deleted_at=None
            )
            current = rows.first()
            if current is None:
                raise NotFound
            files.move_in(source=folder_of(item), root=root, path=target)
            current.delete()
            usage = Usage(current.size_bytes, current.entry_count + new_folders)
            catalog.add_usage(workspace, usage, reservation)
    return target


def remove(*, item: DeletedFile) -> None:
    """Remove a deleted file or folder now. Safe to repeat.

    The update ends the retention, so after an interruption garbage collection removes the files.
    """
    DeletedFile.objects.filter(pk=item.pk).update(kept_until=timezone.now())
    remove_files(item)


def empty(*, workspace: Workspace) -> int:
    """Remove everything in the workspace's recycle bin; return how many items that were."""
    items = list(items_of(workspace))
    for item in items:
        remove(item=item)
    return len(items)


def remove_files(item: DeletedFile) -> None:
    """Remove the files of a deleted item, then its row. Safe to repeat."""
    path = folder_of(item)
    if path.is_dir() and not path.is_symlink():
        trees.remove_tree(folder=path, scratch=catalog.scratch())
    else:
        path.unlink(missing_ok=True)
    DeletedFile.objects.filter(pk=item.pk).delete()


def measure(item: DeletedFile) -> Usage:
    """Measure a deleted item, which a run may still write to, and store its usage. Raises Unreadable."""
    path = folder_of(item)
    usage = Usage()
    with suppress(FileMissing, FileNotFoundError):
        usage = trees.measure(root=path).usage if item.is_folder else Usage(trees.size_of(os.lstat(path)), 1)
    DeletedFile.objects.filter(pk=item.pk).update(size_bytes=usage.size_bytes, entry_count=usage.entry_count)
    item.size_bytes, item.entry_count = usage.size_bytes, usage.entry_count
    return usage


def items_of(workspace: Workspace) -> QuerySet[DeletedFile]:
    """Return what is in a workspace's recycle bin and can be restored, the latest first."""
    return DeletedFile.objects.filter(workspace=workspace, kept_until__gt=timezone.now()).order_by("-id")


def item_of(workspace: Workspace, pk: int) -> DeletedFile:
    """Return an item of a workspace's recycle bin. Raises NotFound."""
    item = items_of(workspace).filter(pk=pk).first() if pk < selectors.KEY_END else None
    if item is None:
        raise NotFound
    return item


def bins_of(organization: Organization) -> QuerySet[Workspace]:
    """Return the workspaces that have something in their recycle bin, with `binned_bytes` and `binned_entries`."""
    return (
        selectors.workspaces_for(organization)
        .annotate(binned_bytes=Sum("deleted_files__size_bytes"), binned_entries=Sum("deleted_files__entry_count"))
        .filter(binned_entries__gt=0)
    )


def expired() -> QuerySet[DeletedFile]:
    """Return the items whose retention is over."""
    return DeletedFile.objects.filter(kept_until__lte=timezone.now())


def folder_of(item: DeletedFile) -> Path:
    """Return where a deleted file or folder is now."""
    return catalog.top_folder("bin") / item.folder


def _free_path(root: Path, path: str) -> str:
    """Return `path`, or a free name beside it: `train.py` becomes `train (restored).py`. Raises NameTaken."""
    stem, extension = posixpath.splitext(path)
    names = [path, f"{stem} (restored){extension}"]
    names += [f"{stem} (restored {number}){extension}" for number in range(2, MAX_NAMES)]
    for name in names:
        if files.missing_entries(root=root, path=name):
            return name
    raise NameTaken(_("Files with this name and its variants exist. Restore it to another path."))
