"""Everything storage holds, made, published and deleted: rows and bytes together.

Hides where bytes lie and what a crash between a row and its bytes leaves. The one rule: bytes come first and by one
rename, then the row; a row goes first, then its bytes. So a crash leaves bytes that no row names, for the sweep, and
never a row without its bytes. Whoever calls has checked that the actor may.
"""

from __future__ import annotations

import hashlib
import io
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import F, Max, QuerySet
from django.db.models.functions import Greatest
from django.utils import timezone
from django.utils.translation import gettext_lazy as _
from django.utils.translation import gettext_noop

from console.accounts.errors import CustomerError, InvalidInput, NotFound, Text
from console.accounts.models import Organization, Quota, User
from console.accounts.services import record
from runtime.specs import Framework
from storage import files, selectors, trees
from storage.archives import Unpacked, unpack_archive
from storage.errors import BadArchive, FileMissing, NameTaken, TooLarge
from storage.files import Readable, Written
from storage.formats import Limits
from storage.models import NAME_PATTERN, NAME_VALIDATOR, Dataset, DatasetVersion, Image, Workspace
from storage.paths import explained

FIRST_WORKSPACE = "main"
README = """# Your workspace

Runs see this folder as `$WORKSPACE` and may write in it; what they write stays. Put the script to train with here, name
it when you start a training, and it runs in its own folder. Datasets are at `$DATASETS_PATH/<name>`, read-only.
"""
DESCRIPTION_LIMIT = 2000
TITLE_LIMIT = 100
REFERENCE = re.compile(
    r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:[0-9]{1,5})?(/[a-z0-9]+(([._]|__|-+)[a-z0-9]+)*)+"
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64})?"
)
"""`host/name:tag` or `host/name@sha256:...`, as the distribution specification writes it, always with the host."""
BUILTIN_IMAGES = (
    ("pytorch", "PyTorch", gettext_noop("PyTorch with torchvision and TensorBoard."), (Framework.PYTORCH,)),
    ("tensorflow", "TensorFlow", gettext_noop("TensorFlow with Keras and TensorBoard."), (Framework.TENSORFLOW,)),
    (
        "horovod",
        "Horovod",
        gettext_noop("Horovod with PyTorch and torchvision, over Gloo or MPI."),
        (Framework.HOROVOD, Framework.PYTORCH),
    ),
    (
        "horovod-tensorflow",
        "Horovod for TensorFlow",
        gettext_noop("Horovod with TensorFlow, over Gloo or MPI."),
        (Framework.HOROVOD, Framework.TENSORFLOW),
    ),
)
KEPT_AFTER_DELETION = timedelta(days=7)
"""How long the bytes of what was deleted stay: longer than a run that still reads them may last."""


# --- Datasets ---------------------------------------------------------------------------------------------------------


def create_dataset(*, organization: Organization, user: User | None, name: str, description: str = "") -> Dataset:
    """Name a dataset, still without a version. Raises InvalidInput, NameTaken."""
    _check(name, description)
    with _name_free(), transaction.atomic():
        dataset = Dataset.objects.create(organization=organization, name=name, description=description, created_by=user)
        record(organization=organization, actor=user, action="dataset.created", target=name)
    return dataset


def publish_version(*, dataset: Dataset, user: User | None, stream: Readable) -> DatasetVersion:
    """Publish the archive in `stream` (.tar, .tar.gz or .zip, told by its bytes) as the next version: all or nothing.

    Raises BadArchive, UnsafePath, TooLarge, StorageFull, NotFound when the dataset was deleted meanwhile.
    """
    room = room_left(dataset.organization)
    digest = hashlib.sha256()
    with _scratch_folder() as (made, spool_path):
        with explained(), spool_path.open("xb+") as spool:
            limit = min(settings.MAX_UPLOAD_BYTES, room)
            files.copy(stream=stream, target=spool, limit_bytes=limit, digest=digest)
            unpacked = unpack_archive(stream=spool, target=made, limits=_limits(room))
        return _publish(dataset, user, made, unpacked, digest.hexdigest())


def delete_dataset(*, dataset: Dataset, user: User | None = None) -> None:
    """Delete a dataset with its versions, at once; but runs that are open keep reading the bytes. Safe to repeat."""
    _delete(Dataset.objects.filter(pk=dataset.pk), dataset, user, "dataset.deleted")


def _publish(dataset: Dataset, user: User | None, made: Path, unpacked: Unpacked, sha256: str) -> DatasetVersion:
    """Make what lies at `made` the next version."""
    if not unpacked.file_count:
        raise BadArchive(_("There are no files in it. Send at least one."))
    name = secrets.token_hex(16)
    final = _folder("datasets") / name
    trees.make_read_only(folder=made)
    made.chmod(0o755)  # to be moved a folder must be writable
    made.rename(final)
    final.chmod(0o555)
    try:
        with transaction.atomic():
            _require_room(dataset.organization, unpacked.size_bytes)
            current = Dataset.objects.select_for_update().filter(pk=dataset.pk, deleted_at=None).first()
            if current is None:
                raise NotFound
            last = current.versions.aggregate(last=Max("number"))["last"] or 0
            version = DatasetVersion.objects.create(
                dataset=dataset,
                number=last + 1,
                folder=name,
                size_bytes=unpacked.size_bytes,
                file_count=unpacked.file_count,
                sha256=sha256,
                created_by=user,
            )
            current.latest = dataset.latest = version
            current.save(update_fields=["latest"])
            record(
                organization=dataset.organization,
                actor=user,
                action="dataset.published",
                target=dataset.name,
                data={"version": version.number, "size_bytes": version.size_bytes, "sha256": sha256},
            )
    except CustomerError:  # of any other it isn't known whether the row was written: the sweep will see
        trees.remove_tree(folder=final, scratch=scratch())
        raise
    return version


# --- Workspaces -------------------------------------------------------------------------------------------------------


def create_workspace(*, organization: Organization, user: User | None, name: str, description: str = "") -> Workspace:
    """Make an empty workspace. Raises InvalidInput, NameTaken."""
    _check(name, description)
    folder = _folder("workspaces") / secrets.token_hex(16)
    folder.mkdir(mode=0o755)
    try:
        with _name_free(), transaction.atomic():
            workspace = Workspace.objects.create(
                organization=organization, name=name, description=description, folder=folder.name, created_by=user
            )
            record(organization=organization, actor=user, action="workspace.created", target=name)
    except CustomerError:
        folder.rmdir()
        raise
    return workspace


def ensure_first_workspace(*, organization: Organization, user: User | None) -> Workspace:
    """The workspace `main`, made with a short README where there is none. Safe to repeat, and for two at once."""
    with suppress(NotFound):
        return selectors.workspace_named(organization, FIRST_WORKSPACE)
    try:
        workspace = create_workspace(organization=organization, user=user, name=FIRST_WORKSPACE)
    except NameTaken:
        return selectors.workspace_named(organization, FIRST_WORKSPACE)
    with suppress(TooLarge):
        write_file(workspace=workspace, path="README.md", stream=io.BytesIO(README.encode()))
    return workspace


def delete_workspace(*, workspace: Workspace, user: User | None = None) -> None:
    """Delete a workspace: at once for everybody, but its open runs keep their files. Safe to repeat."""
    _delete(Workspace.objects.filter(pk=workspace.pk), workspace, user, "workspace.deleted")


def write_file(*, workspace: Workspace, path: str, stream: Readable) -> Written:
    """Make or replace a file of the workspace. Raises TooLarge and as `files.write`."""
    root = selectors.workspace_folder(workspace)
    replaced = 0
    with suppress(FileMissing):
        replaced = files.stat(root=root, path=path).size
    limit = min(settings.MAX_FILE_BYTES, room_left(workspace.organization) + replaced)
    written = files.write(root=root, path=path, stream=stream, scratch=scratch(), limit_bytes=limit)
    _grow(workspace, written.size - written.replaced_bytes)
    return written


def delete_file(*, workspace: Workspace, path: str) -> None:
    """Remove a file or folder of the workspace. Raises as `files.delete`."""
    freed = files.delete(root=selectors.workspace_folder(workspace), path=path, scratch=scratch())
    _grow(workspace, -freed)


def measure_workspace(*, workspace: Workspace) -> int:
    """Count the workspace's bytes anew: runs write there without asking."""
    size = trees.measure(root=selectors.workspace_folder(workspace))
    Workspace.objects.filter(pk=workspace.pk).update(size_bytes=size)
    return size


# --- Images -----------------------------------------------------------------------------------------------------------


def create_image(
    *,
    organization: Organization,
    name: str,
    title: str,
    frameworks: Sequence[str],
    reference: str,
    description: str = "",
    user: User | None = None,
) -> Image:
    """Offer the organization an image of its own registry. Raises InvalidInput, NameTaken."""
    wrong: dict[str, Text] = {}
    if not REFERENCE.fullmatch(reference):
        wrong["reference"] = _("Give host, name and tag, such as registry.example.com/team/train:1.2.")
    if not frameworks or not set(frameworks) <= set(Framework):
        wrong["frameworks"] = _("Choose at least one of pytorch, horovod and tensorflow.")
    if not title.strip() or len(title) > TITLE_LIMIT:
        wrong["title"] = _("Give a title of 1 to 100 characters.")
    _check(name, description, wrong)
    if Image.objects.filter(organization=None, name=name).exists():
        raise _taken()
    with _name_free(), transaction.atomic():
        image = Image.objects.create(
            organization=organization,
            name=name,
            title=title.strip(),
            description=description,
            frameworks=[framework.value for framework in Framework if framework in frameworks],
            reference=reference,
        )
        record(organization=organization, actor=user, action="image.created", target=name)
    return image


def ensure_builtin_images() -> list[Image]:
    """The images that this installation brings, in the catalogue. What an administrator changed in them stays."""
    return [
        Image.objects.get_or_create(
            organization=None,
            name=name,
            defaults={"title": str(title), "description": str(text), "frameworks": [one.value for one in frameworks]},
        )[0]
        for name, title, text, frameworks in BUILTIN_IMAGES
    ]


# --- Room and places --------------------------------------------------------------------------------------------------


def root() -> Path:
    """Where all bytes lie."""
    return selectors.root()


def scratch() -> Path:
    """Where unfinished things lie, on the same disk as the finished ones."""
    return _folder("scratch")


def storage_used(organization: Organization) -> int:
    """Bytes that count against the quota."""
    return selectors.storage_used(organization)


def room_left(organization: Organization) -> int:
    """Bytes that the organization may still store."""
    quota = Quota.objects.values_list("max_storage_bytes", flat=True).get(organization=organization)
    return max(0, quota - storage_used(organization))


def _require_room(organization: Organization, size: int) -> None:
    """Check again, with the quota's row locked: of two uploads that fit one by one, only one may fit together."""
    quota = Quota.objects.select_for_update().get(organization=organization)
    if storage_used(organization) + size > quota.max_storage_bytes:
        raise TooLarge


def _limits(room: int) -> Limits:
    return Limits(max_bytes=room, max_entries=settings.MAX_ARCHIVE_FILES)


def _folder(name: str) -> Path:
    folder = root() / name
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


@contextmanager
def _scratch_folder() -> Iterator[tuple[Path, Path]]:
    """A folder to fill and a path for a spool file, both gone afterwards unless moved away."""
    folder = scratch() / secrets.token_hex(16)
    made = folder / "files"
    made.mkdir(parents=True)
    try:
        yield made, folder / "archive"
    finally:
        trees.remove_tree(folder=folder, scratch=scratch())


def _grow(workspace: Workspace, more: int) -> None:
    Workspace.objects.filter(pk=workspace.pk).update(size_bytes=Greatest(F("size_bytes") + more, 0))


def _delete(
    rows: QuerySet[Dataset] | QuerySet[Workspace], item: Dataset | Workspace, user: User | None, action: str
) -> None:
    with transaction.atomic():
        if rows.filter(deleted_at=None).update(deleted_at=timezone.now()):
            record(organization=item.organization, actor=user, action=action, target=item.name)


def _check(name: str, description: str, wrong: dict[str, Text] | None = None) -> None:
    """Raises InvalidInput with all that is wrong, `wrong` being what the caller found."""
    wrong = dict(wrong or {})
    if not NAME_PATTERN.match(name):
        wrong["name"] = NAME_VALIDATOR.message
    if len(description) > DESCRIPTION_LIMIT or "\0" in description:
        wrong["description"] = _("Use at most 2000 characters of text.")
    if wrong:
        raise InvalidInput(fields=wrong)


@contextmanager
def _name_free() -> Iterator[None]:
    try:
        yield
    except IntegrityError:
        raise _taken() from None


def _taken() -> NameTaken:
    return NameTaken(fields={"name": NameTaken.message})
