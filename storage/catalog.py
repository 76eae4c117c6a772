"""Create and change datasets, dataset versions, workspaces and their files: database rows and bytes together.

A creation first writes the bytes, then moves them into place by one rename, forces them to the disk, and writes the row
last. A deletion changes the row first (`storage.retention`). So a crash may leave bytes without a row, which garbage
collection removes, but never a row without bytes. Callers must have checked that the user may do this.
"""

from __future__ import annotations

import hashlib
import io
import secrets
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import F, Max
from django.db.models.functions import Greatest
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from console.accounts.models import Organization, User
from console.accounts.services import record_audit_event
from console.core.errors import CustomerError, InvalidInput, NotFound, Text
from storage import blobs, files, manifests, quota, selectors, trees
from storage.archive_readers import ArchiveLimits
from storage.archives import FolderTotals, unpack_archive
from storage.errors import BadArchive, FileMissing, NameTaken, TooLarge
from storage.files import CountedStream, Readable, SpaceCounter, WriteResult
from storage.models import NAME_PATTERN, NAME_VALIDATOR, Dataset, DatasetVersion, Workspace
from storage.paths import translate_os_errors
from storage.quota import Reservation, require_room_for
from storage.tree_copy import copy_tree
from storage.trees import Usage

FIRST_WORKSPACE = "main"
"""The name of the workspace that every organization gets."""
README = """# Your workspace

Runs see this folder as `$WORKSPACE` and may write in it; what they write stays. Put your training script here, and name
it when you start a training. It runs in the folder that contains it.

Datasets are at `$DATASETS_PATH/<name>`, read-only.
"""
"""The README in the first workspace."""
Fill = Callable[[Path, SpaceCounter], Usage]
"""A function that writes the first files of a workspace into an empty folder. It counts bytes and entries with the
counter before it writes them, and returns the usage. Unlike that count, the usage includes the folder itself."""
DESCRIPTION_LIMIT = 2000
"""The length of a description in characters. The message in `validate_texts` names it too."""


# --- Datasets ---------------------------------------------------------------------------------------------------------


def create_dataset(*, organization: Organization, user: User | None, name: str, description: str = "") -> Dataset:
    """Create a dataset without a version. Raises InvalidInput, NameTaken, TooMany."""
    validate_texts(name, description)
    with translate_name_conflict(), transaction.atomic():
        quota.lock(organization)
        require_room_for(organization, "datasets")
        dataset = Dataset.objects.create(organization=organization, name=name, description=description, created_by=user)
        record_audit_event(organization=organization, actor=user, action="dataset.created", target=name)
    return dataset


def publish_version(*, dataset: Dataset, user: User | None, stream: Readable) -> DatasetVersion:
    """Publish the .tar, .tar.gz or .zip archive in `stream` as the dataset's next version.

    Raises BadArchive, UnsafePath, TooLarge, StorageFull, and NotFound if the dataset was deleted meanwhile.
    """
    digest = hashlib.sha256()
    with (
        Reservation(dataset.organization, label=dataset.name) as reservation,
        temporary_folder() as folder,
        translate_os_errors(),
        (folder / "archive").open("xb+") as spool,
    ):
        counted = CountedStream(stream, reservation)
        files.copy(stream=counted, target=spool, limit_bytes=settings.MAX_UPLOAD_BYTES, digest=digest)
        return publish_archive(
            dataset=dataset, user=user, archive=spool, sha256=digest.hexdigest(), reservation=reservation
        )


def publish_archive(
    *,
    dataset: Dataset,
    user: User | None,
    archive: BinaryIO,
    sha256: str,
    reservation: Reservation,
    on_published: Callable[[DatasetVersion], None] | None = None,
) -> DatasetVersion:
    """Publish the open archive file `archive` as the dataset's next version. Raises as `publish_version`.

    `sha256` is that of the archive. `reservation` counts the unpacked files. `on_published` runs in the transaction
    that writes the version's row.
    """
    with temporary_folder() as folder:
        unpack_path = folder / "files"
        unpack_path.mkdir()
        reservation.count(entries=1)  # the folder
        limits = ArchiveLimits(reservation.left_bytes(), settings.MAX_ARCHIVE_FILES)
        unpack_result = unpack_archive(stream=archive, target=unpack_path, limits=limits, counter=reservation)
        return _publish(
            dataset,
            user=user,
            new_folder=unpack_path,
            totals=unpack_result,
            sha256=sha256,
            reservation=reservation,
            on_published=on_published,
        )


def publish_file(
    *,
    dataset: Dataset,
    user: User | None,
    file: BinaryIO,
    name: str,
    sha256: str,
    reservation: Reservation,
    on_published: Callable[[DatasetVersion], None] | None = None,
) -> DatasetVersion:
    """Publish a copy of the open file `file` as the dataset's next version, in which its name is `name`.

    `sha256` is that of the file. `reservation` counts the copy. `on_published` runs in the transaction that writes the
    version's row. Raises as `publish_version`.
    """
    with temporary_folder() as folder, translate_os_errors():
        copy_path = folder / "files"
        copy_path.mkdir()
        reservation.count(entries=2)  # the folder and the file
        file.seek(0)
        with (copy_path / name).open("xb") as target:
            counted = CountedStream(file, reservation)
            size = files.copy(stream=counted, target=target, limit_bytes=settings.MAX_UPLOAD_BYTES)
        return _publish(
            dataset,
            user=user,
            new_folder=copy_path,
            totals=FolderTotals(size, file_count=1, entry_count=2),
            sha256=sha256,
            reservation=reservation,
            on_published=on_published,
        )


def publish_copy(*, dataset: Dataset, user: User | None, root: Path, path: str) -> DatasetVersion:
    """Publish a copy of the file or folder at `path` below `root` as the dataset's next version. Links are left out.

    Raises BadArchive, NotFound if the dataset was deleted meanwhile, and the errors of `tree_copy.copy_tree`.
    """
    with Reservation(dataset.organization, label=dataset.name) as reservation, temporary_folder() as folder:
        copy_path = folder / "files"
        copy_path.mkdir()
        copy_result = copy_tree(
            root=root, path=path, target=copy_path, counter=reservation, max_entries=settings.MAX_ARCHIVE_FILES
        )
        return _publish(
            dataset,
            user=user,
            new_folder=copy_path,
            totals=FolderTotals(copy_result.usage.size_bytes, copy_result.file_count, copy_result.usage.entry_count),
            sha256=copy_result.sha256,
            reservation=reservation,
        )


def _publish(
    dataset: Dataset,
    *,
    user: User | None,
    new_folder: Path,
    totals: FolderTotals,
    sha256: str,
    reservation: Reservation,
    on_published: Callable[[DatasetVersion], None] | None = None,
) -> DatasetVersion:
    """Move `new_folder` into place as the dataset's next version; return the version. `totals` has its size and counts.

    Also write its manifest and deduplicate its files. Raises BadArchive if there are no files, and NotFound if the
    dataset was deleted meanwhile.
    """
    if not totals.file_count:
        raise BadArchive(_("There are no files to publish. Add at least one."))
    new_manifest = manifests.path_of(new_folder)
    blobs_folder = blobs.folder_of(selectors.root(), dataset.organization_id)

    def deduplicate(folder_fd: int, name: bytes, file_sha256: str) -> None:
        blobs.deduplicate(blobs=blobs_folder, folder_fd=folder_fd, name=name, sha256=file_sha256)

    with translate_os_errors(), new_manifest.open("xb") as target:
        manifests.write(folder=new_folder, target=target, on_file=deduplicate)
    new_manifest.chmod(0o444)
    version_folder = move_into_place(new_folder, area="datasets")
    manifest = manifests.path_of(version_folder)
    new_manifest.rename(manifest)
    try:
        trees.flush_disk(folder=version_folder)
        with transaction.atomic():
            current = Dataset.objects.select_for_update().filter(pk=dataset.pk, deleted_at=None).first()
            if current is None:
                raise NotFound
            # Deleted versions count too, so that no number is used twice.
            last_number = current.versions.aggregate(last=Max("number"))["last"] or 0
            version = DatasetVersion.objects.create(
                dataset=dataset,
                number=last_number + 1,
                folder=version_folder.name,
                size_bytes=totals.size_bytes,
                file_count=totals.file_count,
                entry_count=totals.entry_count,
                sha256=sha256,
                created_by=user,
            )
            current.latest = dataset.latest = version  # of the locked row, and of the caller's object
            current.save(update_fields=["latest"])
            record_audit_event(
                organization=dataset.organization,
                actor=user,
                action="dataset.published",
                target=dataset.name,
                data={"version": version.number, "size_bytes": version.size_bytes, "sha256": sha256},
            )
            if on_published:
                on_published(version)
            reservation.release()
    except CustomerError:
        # After a CustomerError the row was surely not written. After any other error, such as a lost connection, it may
        # have been. Then the files stay, and garbage collection removes them if they have no row.
        trees.remove_tree(folder=version_folder, scratch=scratch())
        manifest.unlink(missing_ok=True)
        raise
    return version


# --- Workspaces -------------------------------------------------------------------------------------------------------


def create_workspace(
    *,
    organization: Organization,
    user: User | None,
    name: str,
    description: str = "",
    fill: Fill | None = None,
    on_created: Callable[[Workspace], None] | None = None,
    allocation_key: str = "",
) -> Workspace:
    """Create a workspace with the files that `fill` writes; without `fill` it is empty.

    `on_created` is called in the transaction that writes the row. `allocation_key` is the `key` of the Reservation.
    Raises InvalidInput, NameTaken, TooLarge, TooMany, and what `fill` and `on_created` raise.
    """
    validate_texts(name, description)
    with Reservation(organization, label=name, key=allocation_key) as reservation, temporary_folder() as temporary:
        reservation.count(entries=1)
        new_folder = temporary / "files"
        new_folder.mkdir(mode=0o755)
        usage = fill(new_folder, reservation) if fill else Usage(0, 1)  # the empty folder itself
        folder = top_folder("workspaces") / secrets.token_hex(16)
        new_folder.rename(folder)
        try:
            if fill:
                trees.flush_disk(folder=folder)
            with translate_name_conflict(), transaction.atomic():
                quota.lock(organization)
                require_room_for(organization, "workspaces")
                workspace = Workspace.objects.create(
                    organization=organization,
                    name=name,
                    description=description,
                    folder=folder.name,
                    size_bytes=usage.size_bytes,
                    entry_count=usage.entry_count,
                    created_by=user,
                )
                record_audit_event(organization=organization, actor=user, action="workspace.created", target=name)
                if on_created:
                    on_created(workspace)
                reservation.release()
        except CustomerError:  # as in `_publish`: after any other error the files stay
            trees.remove_tree(folder=folder, scratch=scratch())
            raise
    return workspace


def ensure_first_workspace(*, organization: Organization, user: User | None) -> Workspace:
    """Return the workspace `main`; create it with a short README if it is missing. Safe to run concurrently."""
    with suppress(NotFound):
        return selectors.workspace_named(organization, FIRST_WORKSPACE)
    try:
        workspace = create_workspace(organization=organization, user=user, name=FIRST_WORKSPACE)
    except NameTaken:
        return selectors.workspace_named(organization, FIRST_WORKSPACE)
    with suppress(TooLarge):  # the quota has no room for it; the workspace then stays empty
        write_file(workspace=workspace, path="README.md", stream=io.BytesIO(README.encode()))
    return workspace


def write_file(
    *, workspace: Workspace, path: str, stream: Readable, expected_versions: Collection[str] | None = None
) -> WriteResult:
    """Create or replace a file of the workspace. Raises TooLarge and the errors of `files.write`.

    `files.write` explains `expected_versions`. A small file can be replaced even if the quota is used up, so that the
    editor can save a shorter text.
    """
    root = selectors.workspace_folder(workspace)
    spare_bytes = 0  # how many of the replaced bytes need no quota again: at most as many as the editor can show
    with suppress(FileMissing):
        spare_bytes = min(files.stat(root=root, path=path).size, files.TEXT_LIMIT)
    with Reservation(workspace.organization, label=workspace.name, spare_bytes=spare_bytes) as reservation:
        new_entries = files.missing_entries(root=root, path=path)
        reservation.count(entries=new_entries)
        limit = settings.MAX_FILE_BYTES
        counted = CountedStream(stream, reservation)
        result = files.write(
            root=root, path=path, stream=counted, scratch=scratch(), limit_bytes=limit,
            expected_versions=expected_versions, lock=None if expected_versions is None else _row_lock(workspace),
        )  # fmt: skip
        add_usage(workspace, Usage(result.size - result.replaced_bytes, new_entries), reservation)
    return result


def place_file(
    *, workspace: Workspace, path: str, source: Path, on_placed: Callable[[], None], allocation_key: str = ""
) -> None:
    """Move the complete file `source` into the workspace. Raises TooLarge and the errors of `files.place`.

    The caller has reserved quota for the file. `on_placed`, which is called in the transaction that counts the file in
    the workspace, must release this quota. `allocation_key` is the `key` of the Reservation of new folders.
    """
    root = selectors.workspace_folder(workspace)
    with Reservation(workspace.organization, label=workspace.name, key=allocation_key) as reservation:
        new_entries = files.missing_entries(root=root, path=path)
        reservation.count(entries=max(0, new_entries - 1))  # only new folders: the caller has reserved the file
        result = files.place(root=root, path=path, source=source)
        add_usage(workspace, Usage(result.size - result.replaced_bytes, new_entries), reservation, on_placed)


def unpack_into_workspace(
    *, workspace: Workspace, path: str, archive: BinaryIO, on_unpacked: Callable[[], None], allocation_key: str = ""
) -> None:
    """Unpack the open archive file `archive` into a folder of the workspace. Files with the same names are replaced.

    `on_unpacked` is called in the transaction that counts the files. `allocation_key` is the `key` of the Reservation.
    Raises as `publish_version` and `files.merge`.
    """
    root = selectors.workspace_folder(workspace)
    with (
        Reservation(workspace.organization, label=workspace.name, key=allocation_key) as reservation,
        temporary_folder() as folder,
    ):
        unpack_path = folder / "files"
        unpack_path.mkdir()
        new_entries = files.missing_entries(root=root, path=path)
        reservation.count(entries=new_entries)
        limits = ArchiveLimits(reservation.left_bytes(), settings.MAX_ARCHIVE_FILES)
        unpack_result = unpack_archive(stream=archive, target=unpack_path, limits=limits, counter=reservation)
        trees.flush_disk(folder=unpack_path)
        replaced_usage = files.merge(root=root, path=path, source=unpack_path)
        # `- 1`, because `unpack_result` counts also the temporary folder, which was not moved.
        added = Usage(
            unpack_result.size_bytes - replaced_usage.size_bytes,
            new_entries + unpack_result.entry_count - 1 - replaced_usage.entry_count,
        )
        add_usage(workspace, added, reservation, on_unpacked)


def make_folder(*, workspace: Workspace, path: str) -> bool:
    """Create a folder of the workspace; return whether it is new.

    Raises TooLarge and the errors of `files.make_folder`.
    """
    root = selectors.workspace_folder(workspace)
    with Reservation(workspace.organization, label=workspace.name) as reservation:
        new_entries = files.missing_entries(root=root, path=path)
        reservation.count(entries=new_entries)
        is_new = files.make_folder(root=root, path=path)
        add_usage(workspace, Usage(0, new_entries), reservation)
    return is_new


def move_file(*, workspace: Workspace, source: str, target: str) -> None:
    """Rename a file or folder of the workspace. Raises TooLarge and the errors of `files.move`."""
    root = selectors.workspace_folder(workspace)
    with Reservation(workspace.organization, label=workspace.name) as reservation:
        # Only new folders: the moved entry counts already.
        new_entries = max(0, files.missing_entries(root=root, path=target) - 1)
        reservation.count(entries=new_entries)
        files.move(root=root, source=source, target=target)
        add_usage(workspace, Usage(0, new_entries), reservation)


def delete_file(*, workspace: Workspace, path: str) -> None:
    """Remove a file or folder of the workspace for good. Raises as `files.delete`."""
    removed_usage = files.delete(root=selectors.workspace_folder(workspace), path=path, scratch=scratch())
    add_usage(workspace, Usage(-removed_usage.size_bytes, -removed_usage.entry_count))


def measure_workspace(*, workspace: Workspace) -> Usage:
    """Measure the workspace, because runs write to it without the console; store and return its usage.

    Code that moves folders during the measurement can hide some, and some may be unreadable. The measurement is then
    incomplete, and the stored usage does not decrease.
    """
    measurement = trees.measure(root=selectors.workspace_folder(workspace))
    rows = Workspace.objects.filter(pk=workspace.pk)
    size, entries = measurement.usage.size_bytes, measurement.usage.entry_count
    if measurement.is_complete:
        rows.update(size_bytes=size, entry_count=entries, measured_at=timezone.now())
    else:
        rows.update(size_bytes=Greatest(F("size_bytes"), size), entry_count=Greatest(F("entry_count"), entries))
    workspace.refresh_from_db(fields=["size_bytes", "entry_count", "measured_at"])
    return Usage(workspace.size_bytes, workspace.entry_count)


def add_usage(
    workspace: Workspace,
    added: Usage,
    reservation: Reservation | None = None,
    on_added: Callable[[], None] | None = None,
) -> None:
    """In one transaction, add to the workspace's stored usage, release the reservation and call `on_added`."""
    with transaction.atomic():
        if on_added:
            on_added()
        # Not below the usage of an empty workspace: files that a run wrote are subtracted, but were never added.
        Workspace.objects.filter(pk=workspace.pk).update(
            size_bytes=Greatest(F("size_bytes") + added.size_bytes, 0),
            entry_count=Greatest(F("entry_count") + added.entry_count, 1),
        )
        if reservation:
            reservation.release()


# --- Folders ----------------------------------------------------------------------------------------------------------


def scratch() -> Path:
    """Return the folder that holds all unfinished writes. It is in the storage root, so one rename finishes a write."""
    return top_folder("scratch")


def top_folder(name: str) -> Path:
    """Return the folder `name` in the storage root; create it if it is missing."""
    folder = selectors.root() / name
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def move_into_place(finished_folder: Path, *, area: str) -> Path:
    """Move a finished folder from `scratch` to the top folder `area`, and return its new path.

    It gets a random name, and becomes read-only.
    """
    target = top_folder(area) / secrets.token_hex(16)
    trees.make_read_only(folder=finished_folder)
    finished_folder.chmod(0o755)  # a folder can be moved only if it is writable
    finished_folder.rename(target)
    target.chmod(0o555)
    return target


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a new folder in `scratch` for one unfinished write; remove it afterwards with everything still in it."""
    folder = scratch() / secrets.token_hex(16)
    folder.mkdir()
    try:
        yield folder
    finally:
        trees.remove_tree(folder=folder, scratch=scratch())


@contextmanager
def _row_lock(workspace: Workspace) -> Iterator[None]:
    """Lock the workspace's row for the block. If two writes expect the same version, only the first then succeeds."""
    with transaction.atomic():
        Workspace.objects.select_for_update().get(pk=workspace.pk)
        yield


def validate_texts(name: str | None, description: str, errors: dict[str, Text] | None = None) -> None:
    """Validate a name, unless it is None, and a description. Raises InvalidInput, also with the caller's `errors`."""
    errors = dict(errors or {})
    if name is not None and not NAME_PATTERN.match(name):
        errors["name"] = NAME_VALIDATOR.message
    if len(description) > DESCRIPTION_LIMIT or "\0" in description:
        errors["description"] = _("Use at most 2000 characters of text.")
    if errors:
        raise InvalidInput(fields=errors)


@contextmanager
def translate_name_conflict() -> Iterator[None]:
    """Raise NameTaken in place of an IntegrityError, by which the database refuses a name that exists."""
    try:
        yield
    except IntegrityError:
        raise name_taken_error() from None


def name_taken_error() -> NameTaken:
    """Return the error for a name that exists."""
    return NameTaken(fields={"name": NameTaken.message})
