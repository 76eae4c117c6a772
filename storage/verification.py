"""Compare the rows of storage with the files on the disk, and hash published files again (`manage.py verify_storage`).

Published versions never change, so a difference is damage: the disk is broken, or somebody has written to the storage
root. Files without a row are left by crashes, and garbage collection removes them later.
"""

from __future__ import annotations

import enum
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from storage import catalog, garbage_collection, manifests, recycle_bin, selectors, tree_copy, trees
from storage.errors import StorageError
from storage.models import DatasetVersion, DeletedFile, ModelVersion, Workspace
from storage.trees import Usage

MAX_LISTED = 20
"""How many differing files of one version a finding names, so that it can be read."""


class Level(enum.StrEnum):
    """How serious a finding is. Only a PROBLEM makes the check fail. A problem that was solved is REPAIRED."""

    PROBLEM = "problem"
    REPAIRED = "repaired"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """One result of the check. `size_bytes` is the size of the files that it is about; None if there are none."""

    level: Level
    subject: str
    text: str
    size_bytes: int | None = None


def verify(*, with_hashes: bool = True, repair: bool = False) -> Iterator[Finding]:
    """Check everything in the storage root, and yield the findings in the order of the checks.

    With `repair`, also remove files without a row that garbage collection should have removed, measure workspaces and
    recycle bins, and delete rows of recycle bins whose files are missing. Lost or damaged versions and workspaces
    cannot be repaired; an operator must restore them from a backup.
    """
    versions = DatasetVersion.objects.filter(removed_at=None).select_related("dataset__organization").order_by("pk")
    for version in versions.iterator():
        yield from _check_version(version, with_hashes=with_hashes)
    models = ModelVersion.objects.filter(removed_at=None).select_related("model__organization").order_by("pk")
    for model in models.iterator():
        yield from _check_model(model, with_hashes=with_hashes)
    for workspace in Workspace.objects.filter(removed_at=None).select_related("organization").order_by("pk").iterator():
        yield from _check_workspace(workspace, repair=repair)
    for item in DeletedFile.objects.select_related("workspace__organization").order_by("pk").iterator():
        yield from _check_deleted_file(item, repair=repair)
    yield from _check_orphans(repair=repair)


def _check_version(version: DatasetVersion, *, with_hashes: bool) -> Iterator[Finding]:
    """Compare a dataset version with its manifest."""
    subject, folder = f"dataset {version.dataset.organization.slug}/{version}", selectors.folder_of(version)
    if not folder.is_dir():
        yield Finding(Level.PROBLEM, subject, f"its folder is missing: {folder}")
        return
    manifest = manifests.path_of(folder)
    if not manifest.exists():
        yield Finding(Level.NOTE, subject, "no file hashes were recorded when it was published", version.size_bytes)
    elif with_hashes:
        with catalog.temporary_folder() as scratch:
            new = scratch / "manifest"
            try:
                with new.open("wb") as target:
                    manifests.write(folder=folder, target=target)
                differences = list(itertools.islice(manifests.differences(old=manifest, new=new), MAX_LISTED + 1))
            except OSError as error:
                yield Finding(Level.PROBLEM, subject, f"it cannot be read: {error}", version.size_bytes)
                return
        if differences:
            names = [f"{_shown(each.path)} is {each.change}" for each in differences[:MAX_LISTED]]
            more = ", and more" if len(differences) > MAX_LISTED else ""
            yield Finding(Level.PROBLEM, subject, f"its files differ: {', '.join(names)}{more}", version.size_bytes)


def _check_model(version: ModelVersion, *, with_hashes: bool) -> Iterator[Finding]:
    """Compare a model version, which has no manifest, with the SHA-256 of its list of files."""
    subject, folder = f"model {version.model.organization.slug}/{version}", selectors.folder_of(version)
    if not folder.is_dir():
        yield Finding(Level.PROBLEM, subject, f"its folder is missing: {folder}")
    elif with_hashes:
        with catalog.temporary_folder() as scratch:
            listing = scratch / "manifest"
            try:
                with listing.open("wb") as target:
                    manifests.write(folder=folder, target=target)
                sha256 = tree_copy.listing_sha256(manifests.read_digests(listing))
            except OSError as error:
                yield Finding(Level.PROBLEM, subject, f"it cannot be read: {error}", version.size_bytes)
                return
        if sha256 != version.sha256:
            yield Finding(Level.PROBLEM, subject, "its files are not those that were published", version.size_bytes)


def _check_workspace(workspace: Workspace, *, repair: bool) -> Iterator[Finding]:
    """Compare a workspace's stored usage with the disk; with `repair`, correct it."""
    subject, folder = f"workspace {workspace.organization.slug}/{workspace}", selectors.folder_of(workspace)
    if not folder.is_dir():
        yield Finding(Level.PROBLEM, subject, f"its folder is missing: {folder}")
        return
    before = Usage(workspace.size_bytes, workspace.entry_count)
    try:
        usage = catalog.measure_workspace(workspace=workspace) if repair else trees.measure(root=folder).usage
    except StorageError as error:
        yield Finding(Level.PROBLEM, subject, f"it cannot be measured: {error.message}", workspace.size_bytes)
        return
    if usage != before:  # no problem, because runs write without the console, which measures only every hour
        text = f"it has {usage.entry_count} entries; {before.size_bytes} bytes in {before.entry_count} were counted"
        yield Finding(Level.REPAIRED if repair else Level.NOTE, subject, text, usage.size_bytes)


def _check_deleted_file(item: DeletedFile, *, repair: bool) -> Iterator[Finding]:
    """Check that an item of a recycle bin exists; with `repair`, measure it or delete its row."""
    subject = f"recycle bin of {item.workspace.organization.slug}/{item.workspace}"
    if not os.path.lexists(recycle_bin.path_in_bin(item)):
        if repair:
            recycle_bin.remove_files(item)
        yield Finding(Level.REPAIRED if repair else Level.PROBLEM, subject, f"the files of {item} are missing")
    elif repair:
        recycle_bin.measure(item)


def _check_orphans(*, repair: bool) -> Iterator[Finding]:
    """Find files without a row. It is a problem if garbage collection should already have removed them."""
    for area in garbage_collection.areas():
        overdue = set(area.orphans(area.kept_for))
        for path in area.orphans():
            subject, size = f"{area.folder.name}/{_shown(path.name)}", _size_of(path)
            if path not in overdue:
                text = f"no row names it; garbage collection removes it {area.kept_for.days} days after its last change"
                yield Finding(Level.NOTE, subject, text, size)
            elif repair and garbage_collection.remove(path):
                yield Finding(Level.REPAIRED, subject, "no row named it; it was removed", size)
            else:
                yield Finding(Level.PROBLEM, subject, "no row names it, and garbage collection did not remove it", size)


def _size_of(path: Path) -> int:
    """Return the size of a file or folder in bytes; 0 if it cannot be measured."""
    try:
        if path.is_dir() and not path.is_symlink():
            return trees.measure(root=path).usage.size_bytes
        return path.lstat().st_size
    except (StorageError, OSError):
        return 0


def _shown(name: str) -> str:
    """Return a name in ASCII with escapes, because customers choose names, and a terminal obeys control characters."""
    return ascii(name)[1:-1]
