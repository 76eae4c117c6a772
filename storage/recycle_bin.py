"""The recycle bin of a workspace: delete, restore and finally remove its files and folders.

A deleted file or folder is renamed into the folder `bin/` in the storage root, to which runs have no access. It stays
there for KEPT_AFTER_DELETION, and counts against the quota. Its row is deleted only after its files are removed, so
all files on the disk count. Links, pipes and devices have no content to restore, so they are removed at once.
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
"""How many names `restore` tries if the old one is taken. Each costs some system calls."""


def delete(*, workspace: Workspace, path: str, user: User | None = None) -> DeletedFile | None:
    """Move a file or folder to the recycle bin, and return its row. Remove any other entry at once, and return None.

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
        # After a crash between the rename and the commit, the file is in the bin without a row. Garbage collection
        # keeps it for KEPT_AFTER_DELETION too, so that an administrator can restore it.
        files.move_out(root=root, path=path, target=path_in_bin(item))
    # Outside the transaction, because measuring can take minutes. Garbage collection measures the item and the
    # workspace again, also after a crash here.
    usage = measure(item)
    catalog.add_usage(workspace, Usage(-usage.size_bytes, -usage.entry_count))
    return item


def restore(*, item: DeletedFile, path: str = "") -> str:
    """Move a deleted file or folder back into the workspace, and return its new path.

    This is `path` if it is given, else its old path, or a free name in the same folder if the old path is taken. Raises
    NameTaken, TooLarge, UnsafePath and WrongKind; and NotFound after `kept_until` or if the workspace is deleted.
    """
    workspace = item.workspace
    root = selectors.workspace_folder(workspace)
    target = path or _free_path(root, item.path)
    with Reservation(workspace.organization, label=workspace.name) as reservation:
        # The missing entries are missing folders of the path and the item itself, which counts already, in the bin.
        new_folders = max(0, files.missing_entries(root=root, path=target) - 1)
        reservation.count(entries=new_folders)
        with transaction.atomic():
            rows = DeletedFile.objects.select_for_update(of=("self",)).filter(
                pk=item.pk, kept_until__gt=timezone.now(), workspace__deleted_at=None
            )
            current = rows.first()
            if current is None:
                raise NotFound
            files.move_in(source=path_in_bin(item), root=root, path=target)
            current.delete()
            usage = Usage(current.size_bytes, current.entry_count + new_folders)
            catalog.add_usage(workspace, usage, reservation)
    return target


def remove(*, item: DeletedFile) -> None:
    """Remove a deleted file or folder now. Safe to repeat.

    The row is changed first. If this process then dies, garbage collection removes the files.
    """
    DeletedFile.objects.filter(pk=item.pk).update(kept_until=timezone.now())
    remove_files(item)


def empty(*, workspace: Workspace) -> int:
    """Remove everything in the workspace's recycle bin; return the number of items."""
    items = list(items_of(workspace))
    for item in items:
        remove(item=item)
    return len(items)


def remove_files(item: DeletedFile) -> None:
    """Remove the files of an item in a recycle bin, and then its row. Safe to repeat."""
    path = path_in_bin(item)
    if path.is_dir() and not path.is_symlink():
        trees.remove_tree(folder=path, scratch=catalog.scratch())
    else:
        path.unlink(missing_ok=True)
    DeletedFile.objects.filter(pk=item.pk).delete()


def measure(item: DeletedFile) -> Usage:
    """Measure an item in a recycle bin; store and return its usage, which is empty if its files are missing.

    Call it from time to time, because a run that has a deleted file open may still write to it. If the measurement is
    incomplete, the stored usage does not decrease. Raises Unreadable.
    """
    path = path_in_bin(item)
    usage = Usage()
    with suppress(FileMissing, FileNotFoundError):
        if item.is_folder:
            # `at_least` counts only if the measurement is incomplete.
            usage = trees.measure(root=path).at_least(Usage(item.size_bytes, item.entry_count))
        else:
            usage = Usage(trees.size_of(os.lstat(path)), 1)
    DeletedFile.objects.filter(pk=item.pk).update(size_bytes=usage.size_bytes, entry_count=usage.entry_count)
    item.size_bytes, item.entry_count = usage.size_bytes, usage.entry_count
    return usage


def items_of(workspace: Workspace) -> QuerySet[DeletedFile]:
    """Return the items in a workspace's recycle bin that can be restored, the latest first."""
    return DeletedFile.objects.filter(workspace=workspace, kept_until__gt=timezone.now()).order_by("-id")


def item_of(workspace: Workspace, pk: int) -> DeletedFile:
    """Return the item with this id in a workspace's recycle bin. Raises NotFound."""
    item = items_of(workspace).filter(pk=pk).first() if pk <= selectors.MAX_KEY else None
    if item is None:
        raise NotFound
    return item


def bins_of(organization: Organization) -> QuerySet[Workspace]:
    """Return the workspaces whose recycle bin is not empty, with its usage as `binned_bytes` and `binned_entries`."""
    return (
        selectors.workspaces_for(organization)
        .annotate(binned_bytes=Sum("deleted_files__size_bytes"), binned_entries=Sum("deleted_files__entry_count"))
        .filter(binned_entries__gt=0)
    )


def expired() -> QuerySet[DeletedFile]:
    """Return the items whose `kept_until` has passed, so that their files are to be removed."""
    return DeletedFile.objects.filter(kept_until__lte=timezone.now())


def path_in_bin(item: DeletedFile) -> Path:
    """Return the path of a deleted file or folder in `bin/`."""
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
