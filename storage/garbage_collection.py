"""Remove files that no row names: those that crashes left, and those deleted long enough ago.

Files without a row also stay for `KEPT_AFTER_DELETION`, so that restoring an older copy of the database loses
nothing at once. Files that an open job uses stay as long as it does.
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
"""Age at which files in the scratch folder count as left by a crash: no request lasts longer."""

log = logging.getLogger(__name__)


def collect() -> int:
    """Remove unneeded files and measure workspaces; return how many folders were removed. Safe to repeat."""
    _complete_older_rows()
    _release_uploads()
    uploads.collect()
    direct_uploads.collect()
    removed = sum(_remove_files(item) for item in retention.expired())
    removed += sum(_remove_binned(item) for item in recycle_bin.expired())
    workspaces = Workspace.objects.filter(removed_at=None)
    orphans = [path for area in areas() for path in area.orphans(area.kept_for)]
    removed += sum(remove(path) for path in orphans)
    removed += sum(remove(path) for path in blobs.unused(selectors.root()))
    for workspace in workspaces.iterator():
        try:
            catalog.measure_workspace(workspace=workspace)
        except CustomerError:
            log.exception("The folder of workspace %s can't be measured", workspace.pk)
    for item in DeletedFile.objects.iterator():
        try:
            recycle_bin.measure(item)
        except CustomerError:
            log.exception("The deleted file %s can't be measured", item.pk)
    return removed


@dataclass(frozen=True)
class Area:
    """A folder of the storage root. Rows name its entries (`named`); other entries are removed after `kept_for`."""

    folder: Path
    kept_for: timedelta
    named: set[str]

    def orphans(self, age: timedelta = timedelta(0)) -> Iterator[Path]:
        """Yield the entries that no row names and that have not changed for `age`."""
        return _unchanged_since(self.folder, timezone.now() - age, keep=self.named)


def areas() -> list[Area]:
    """Return the areas, each with the names that its rows give at this moment."""
    root, kept_for = selectors.root(), KEPT_AFTER_DELETION
    versions = DatasetVersion.objects.filter(removed_at=None)
    models = ModelVersion.objects.filter(removed_at=None)
    workspaces = Workspace.objects.filter(removed_at=None)
    return [
        Area(catalog.scratch(), ABANDONED_AFTER, set()),
        Area(root / "datasets", kept_for, _with_manifests(_folders_of(versions))),
        Area(root / "models", kept_for, _folders_of(models)),
        Area(root / "workspaces", kept_for, _folders_of(workspaces)),
        Area(uploads.folder(), ABANDONED_AFTER, uploads.open_names()),
        Area(imports.folder(), ABANDONED_AFTER, imports.open_names()),
        Area(root / "bin", kept_for, _folders_of(DeletedFile.objects.all())),
    ]


def _complete_older_rows() -> None:
    """Complete the rows that an older version wrote while both ran during an upgrade."""
    for dataset in Dataset.objects.filter(deleted_at__isnull=False, versions__deleted_at=None).distinct():
        end = dataset.deleted_at + KEPT_AFTER_DELETION  # type: ignore[operator]  # filtered
        dataset.versions.filter(deleted_at=None).update(deleted_at=dataset.deleted_at, kept_until=end)
    older = Workspace.objects.filter(deleted_at__isnull=False, kept_until=None)
    older.update(kept_until=F("deleted_at") + KEPT_AFTER_DELETION)
    DatasetVersion.objects.filter(entry_count=0).update(entry_count=F("file_count") + 1)


def _release_uploads() -> None:
    """Release the quota of writes whose process died; their files are in the scratch folder."""
    abandoned = Allocation.objects.filter(updated_at__lt=timezone.now() - ABANDONED_AFTER)
    # Resumable uploads (`upload:`) keep their quota until they expire.
    abandoned.filter(kind=Allocation.Kinds.UPLOAD).exclude(key__startswith="upload:").delete()


def _folders_of(
    rows: QuerySet[DatasetVersion] | QuerySet[ModelVersion] | QuerySet[Workspace] | QuerySet[DeletedFile],
) -> set[str]:
    return set(rows.values_list("folder", flat=True))


def _with_manifests(folders: set[str]) -> set[str]:
    return folders | {manifests.path_of(Path(folder)).name for folder in folders}


def _remove_files(item: Item) -> bool:
    try:
        retention.remove_files(item)
    except (CustomerError, OSError):
        log.exception("The files of %r can't be removed", item)
        return False
    return True


def _remove_binned(item: DeletedFile) -> bool:
    try:
        recycle_bin.remove_files(item)
    except (CustomerError, OSError):
        log.exception("The deleted file %r can't be removed", item)
        return False
    return True


def _unchanged_since(folder: Path, limit: datetime, *, keep: set[str]) -> Iterator[Path]:
    """Yield the entries of `folder` that are not in `keep` and have not changed since `limit`."""
    if not folder.exists():
        return
    for path in folder.iterdir():
        status = path.lstat()
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
