"""Remove files that are not needed: those deleted long enough ago, and those that no database row names.

A crash may leave files without a row. They stay for KEPT_AFTER_DELETION too, because an operator may restore an older
copy of the database, which has rows for files that were deleted since. Unfinished writes that no row names stay for
ABANDONED_AFTER only. Files that an open job uses stay until the job has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from django.db.models import F, QuerySet
from django.utils import timezone

from console.core.errors import CustomerError
from storage import (
    blobs,
    catalog,
    direct_uploads,
    imports,
    manifests,
    recycle_bin,
    retention,
    selectors,
    trees,
    uploads,
)
from storage.models import (
    KEPT_AFTER_DELETION,
    Allocation,
    Dataset,
    DatasetVersion,
    DeletedFile,
    ModelVersion,
    Workspace,
)
from storage.selectors import Item

ABANDONED_AFTER = timedelta(days=1)
"""After this age, unfinished writes and their reservations count as left by a crash: no request lasts that long."""

log = logging.getLogger(__name__)


def collect() -> int:
    """Remove unneeded files, and measure workspaces and recycle bins. Safe to repeat.

    Return how many files and folders were removed.
    """
    _complete_rows_of_older_version()
    _release_abandoned_reservations()
    uploads.collect()
    direct_uploads.collect()
    removed_count = sum(_remove_files(item) for item in retention.expired())
    removed_count += sum(_remove_binned(item) for item in recycle_bin.expired())
    orphans = [path for area in areas() for path in area.orphans(area.kept_for)]
    removed_count += sum(remove(path) for path in orphans)
    removed_count += sum(remove(path) for path in blobs.unused(selectors.root()))
    for workspace in Workspace.objects.filter(removed_at=None).iterator():
        try:
            catalog.measure_workspace(workspace=workspace)
        except CustomerError:
            log.exception("The folder of workspace %s can't be measured", workspace.pk)
    for item in DeletedFile.objects.iterator():
        try:
            recycle_bin.measure(item)
        except CustomerError:
            log.exception("The deleted file %s can't be measured", item.pk)
    return removed_count


@dataclass(frozen=True)
class Area:
    """A folder of the storage root. Entries are removed after `kept_for`, unless their name is in `needed_names`."""

    folder: Path
    kept_for: timedelta
    needed_names: set[str]

    def orphans(self, min_age: timedelta = timedelta(0)) -> Iterator[Path]:
        """Yield the entries that no row names and that have not changed for `min_age`."""
        return _unchanged_since(self.folder, timezone.now() - min_age, keep=self.needed_names)


def areas() -> list[Area]:
    """Return all areas. Their needed names are those in the database at this moment; `scratch` has none."""
    root, kept_for = selectors.root(), KEPT_AFTER_DELETION
    versions = DatasetVersion.objects.filter(removed_at=None)
    models = ModelVersion.objects.filter(removed_at=None)
    workspaces = Workspace.objects.filter(removed_at=None)
    return [
        Area(catalog.scratch(), ABANDONED_AFTER, set()),
        Area(root / "datasets", kept_for, _with_manifests(_folders_of(versions))),
        Area(root / "models", kept_for, _folders_of(models)),
        Area(root / "workspaces", kept_for, _folders_of(workspaces)),
        Area(uploads.folder(), ABANDONED_AFTER, uploads.needed_file_names()),
        Area(imports.folder(), ABANDONED_AFTER, imports.needed_file_names()),
        Area(root / "bin", kept_for, _folders_of(DeletedFile.objects.all())),
    ]


def _complete_rows_of_older_version() -> None:
    """Fill in columns that an older version of Trainyard left empty. During an upgrade both versions may write rows."""
    for dataset in Dataset.objects.filter(deleted_at__isnull=False, versions__deleted_at=None).distinct():
        end = dataset.deleted_at + KEPT_AFTER_DELETION  # type: ignore[operator]  # filtered
        dataset.versions.filter(deleted_at=None).update(deleted_at=dataset.deleted_at, kept_until=end)
    older = Workspace.objects.filter(deleted_at__isnull=False, kept_until=None)
    older.update(kept_until=F("deleted_at") + KEPT_AFTER_DELETION)
    DatasetVersion.objects.filter(entry_count=0).update(entry_count=F("file_count") + 1)


def _release_abandoned_reservations() -> None:
    """Release the quota of writes whose process died. Their files in the scratch folder are removed as orphans."""
    abandoned = Allocation.objects.filter(updated_at__lt=timezone.now() - ABANDONED_AFTER)
    # Resumable uploads (`upload:`) keep their quota until they expire.
    abandoned.filter(kind=Allocation.Kinds.UPLOAD).exclude(key__startswith="upload:").delete()


def _folders_of(
    rows: QuerySet[DatasetVersion] | QuerySet[ModelVersion] | QuerySet[Workspace] | QuerySet[DeletedFile],
) -> set[str]:
    return set(rows.values_list("folder", flat=True))


def _with_manifests(folders: set[str]) -> set[str]:
    """Return the names of folders and of their manifests, which are files beside them."""
    return folders | {manifests.path_of(Path(folder)).name for folder in folders}


def _remove_files(item: Item) -> bool:
    """Remove the files of a deleted item; return whether that worked."""
    try:
        retention.remove_files(item)
    except (CustomerError, OSError):
        log.exception("The files of %r can't be removed", item)
        return False
    return True


def _remove_binned(item: DeletedFile) -> bool:
    """Remove a file from a recycle bin; return whether that worked."""
    try:
        recycle_bin.remove_files(item)
    except (CustomerError, OSError):
        log.exception("The deleted file %r can't be removed", item)
        return False
    return True


def _unchanged_since(folder: Path, limit: datetime, *, keep: set[str]) -> Iterator[Path]:
    """Yield the entries of `folder` that are not in `keep` and have not changed since `limit`.

    A rename counts as a change, although it sets only `st_ctime`: an old file may just have been moved here.
    """
    if not folder.exists():
        return
    for path in folder.iterdir():
        try:
            status = path.lstat()
        except FileNotFoundError:  # a request has removed its own entry meanwhile
            continue
        changed = datetime.fromtimestamp(max(status.st_mtime, status.st_ctime), UTC)
        if path.name not in keep and changed < limit:
            yield path


def remove(path: Path) -> bool:
    """Remove a file or folder that no row names; return whether that worked."""
    try:
        if path.is_dir() and not path.is_symlink():
            trees.remove_tree(folder=path, scratch=catalog.scratch())
        else:
            path.unlink(missing_ok=True)
    except (CustomerError, OSError):
        log.exception("%s can't be removed", path)
        return False
    return True
