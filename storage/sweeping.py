"""Bytes that nothing names any more, removed: what crashes left, and what was deleted long enough ago.

The one rule: bytes go only when no row has named them for `catalog.KEPT_AFTER_DELETION`. So neither a run that still
reads what was deleted, nor a database brought back from an older copy, loses anything at once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from django.db.models import Q
from django.utils import timezone

from console.accounts.errors import CustomerError
from storage import catalog, selectors, trees
from storage.models import DatasetVersion, Workspace

UNFINISHED = timedelta(days=1)
"""No request lasts longer, so what is older in the scratch folder has lost its maker."""

log = logging.getLogger(__name__)


def sweep() -> int:
    """Remove what nothing needs, measure workspaces anew; how many folders went. Safe to repeat, and at any time."""
    before = timezone.now() - catalog.KEPT_AFTER_DELETION
    kept = Q(deleted_at=None) | Q(deleted_at__gt=before)
    workspaces = Workspace.objects.filter(kept)
    versions = DatasetVersion.objects.filter(Q(dataset__deleted_at=None) | Q(dataset__deleted_at__gt=before))
    gone = [
        *_older(catalog.scratch(), timezone.now() - UNFINISHED, keep=set()),
        *_older(selectors.root() / "datasets", before, keep=set(versions.values_list("folder", flat=True))),
        *_older(selectors.root() / "workspaces", before, keep=set(workspaces.values_list("folder", flat=True))),
    ]
    removed = sum(_remove(path) for path in gone)
    for workspace in Workspace.objects.filter(deleted_at=None).iterator():
        try:
            catalog.measure_workspace(workspace=workspace)
        except CustomerError:
            log.exception("The folder of workspace %s can't be measured", workspace.pk)
    return removed


def _older(folder: Path, moment: datetime, *, keep: set[str]) -> Iterator[Path]:
    """What lies in `folder`, is not in `keep`, and has not changed since `moment`."""
    if not folder.exists():
        return
    for path in folder.iterdir():
        status = path.lstat()
        changed = datetime.fromtimestamp(max(status.st_mtime, status.st_ctime), UTC)
        if path.name not in keep and changed < moment:
            yield path


def _remove(path: Path) -> bool:
    try:
        if path.is_dir() and not path.is_symlink():
            trees.remove_tree(folder=path, scratch=catalog.scratch())
        else:
            path.unlink(missing_ok=True)
    except (CustomerError, OSError):
        log.exception("%s can't be removed", path)
        return False
    return True
