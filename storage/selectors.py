"""Queries on storage. All start from an organization or one of its objects, so no tenant sees another's data."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from django.conf import settings
from django.db import connection
from django.db.models import F, Func, Prefetch, Q, QuerySet

from console.accounts.models import Organization, Quota
from console.core.errors import NotFound
from storage.models import (
    NAME_PATTERN,
    Allocation,
    Dataset,
    DatasetVersion,
    DeletedFile,
    Image,
    Model,
    ModelVersion,
    Workspace,
)
from storage.trees import Usage


@dataclass(frozen=True)
class QuotaLimit:
    """How many objects of a kind an organization has and may have. The `resource` `files` counts all entries."""

    resource: str
    count: int
    max_count: int


Row = TypeVar("Row", Image, Dataset, Model, Workspace)
Item = DatasetVersion | ModelVersion | Workspace
"""The rows that have a folder, and can be deleted and restored. Datasets and models have none: their versions do."""
MAX_KEY, MAX_NUMBER = 2**63 - 1, 2**31 - 1
"""The largest primary key (bigint) and the largest version number (integer). URLs may contain larger numbers, which are
an error in PostgreSQL, so the selectors raise NotFound without a query."""


def images_for(organization: Organization) -> QuerySet[Image]:
    """Return the active images: the built-in ones and the organization's own."""
    return Image.objects.filter(Q(organization=organization) | Q(organization=None), is_active=True)


def image_named(organization: Organization, name: str) -> Image:
    """Return the active image with this name, built-in or the organization's own. Raises NotFound."""
    return _named(images_for(organization), name)


def datasets_for(organization: Organization) -> QuerySet[Dataset]:
    """Return the organization's datasets, each with its `latest` version (None if it has no version)."""
    return Dataset.objects.filter(organization=organization, deleted_at=None).select_related("latest")


def dataset_named(organization: Organization, name: str) -> Dataset:
    """Return the organization's own dataset with this name, with `latest` loaded. Raises NotFound.

    `sharing.usable_dataset_named` also finds datasets of others that the organization may read.
    """
    return _named(datasets_for(organization), name)


def versions_of(dataset: Dataset) -> QuerySet[DatasetVersion]:
    """Return the published versions that are not deleted, newest first."""
    return dataset.versions.filter(deleted_at=None).order_by("-number")


def latest_version(dataset: Dataset) -> DatasetVersion | None:
    """Return the version with the highest number that is not deleted; None if there is none."""
    return versions_of(dataset).first()


def models_for(organization: Organization) -> QuerySet[Model]:
    """Return the organization's models, each with its `latest` version."""
    return Model.objects.filter(organization=organization, deleted_at=None).select_related("latest")


def model_named(organization: Organization, name: str) -> Model:
    """Return a model with its `latest` version. Raises NotFound."""
    return _named(models_for(organization), name)


def model_versions_of(model: Model) -> QuerySet[ModelVersion]:
    """Return the versions that are not deleted, newest first."""
    return model.versions.filter(deleted_at=None).order_by("-number")


def model_versions_of_job(organization: Organization, job_pk: int) -> QuerySet[ModelVersion]:
    """Return the model versions that were published from a job's files and are not deleted, newest first."""
    rows = ModelVersion.objects.filter(model__organization=organization, job_pk=job_pk, deleted_at=None)
    return rows.select_related("model").order_by("-pk")


def models_to_choose(organization: Organization) -> QuerySet[Model]:
    """Return the organization's models for a form.

    Each has its name and the list `published`: its versions that are not deleted, newest first, with number and time.
    """
    versions = ModelVersion.objects.filter(deleted_at=None).only("model_id", "number", "published_at")
    published = Prefetch("versions", versions.order_by("-number"), to_attr="published")
    return models_for(organization).select_related(None).only("name").prefetch_related(published)


def model_version(model: Model, number: int | None = None) -> ModelVersion:
    """Return the version with this number, or the latest if `number` is None. Raises NotFound."""
    versions = model_versions_of(model)
    if number is not None:
        versions = versions.filter(number=number) if number <= MAX_NUMBER else versions.none()
    version = versions.first()
    if version is None:
        raise NotFound
    version.model = model
    return version


def workspaces_for(organization: Organization) -> QuerySet[Workspace]:
    """Return the organization's workspaces."""
    return Workspace.objects.filter(organization=organization, deleted_at=None)


def workspace_named(organization: Organization, name: str) -> Workspace:
    """Return the organization's workspace with this name. Raises NotFound."""
    return _named(workspaces_for(organization), name)


def kept_versions(organization: Organization) -> QuerySet[DatasetVersion]:
    """Return all dataset versions whose files are on the disk, also deleted ones that can be restored."""
    return DatasetVersion.objects.filter(dataset__organization=organization, removed_at=None).select_related(
        "dataset__organization"
    )


def kept_model_versions(organization: Organization) -> QuerySet[ModelVersion]:
    """Return all model versions whose files are on the disk, also deleted ones that can be restored."""
    return ModelVersion.objects.filter(model__organization=organization, removed_at=None).select_related(
        "model__organization"
    )


def kept_workspaces(organization: Organization) -> QuerySet[Workspace]:
    """Return all workspaces whose files are on the disk, also deleted ones that can be restored."""
    return Workspace.objects.filter(organization=organization, removed_at=None)


KEPT_ITEMS_BY_KIND: dict[str, Callable[[Organization], QuerySet[Any]]] = {
    DatasetVersion.kind: kept_versions,
    ModelVersion.kind: kept_model_versions,
    Workspace.kind: kept_workspaces,
}
"""The functions above, by the `kind` of their rows, which URLs of deleted items contain."""


def allocations(organization: Organization) -> QuerySet[Allocation]:
    """Return the organization's allocations: for uploads in progress and for results of runs."""
    return Allocation.objects.filter(organization=organization)


def binned_files(organization: Organization) -> QuerySet[DeletedFile]:
    """Return the files and folders in the recycle bins of all workspaces."""
    return DeletedFile.objects.filter(workspace__organization=organization)


def usage(organization: Organization) -> Usage:
    """Return the usage of everything that counts against the quota, also of deleted items that can be restored."""
    querysets = (select_kept(organization) for select_kept in KEPT_ITEMS_BY_KIND.values())
    return _total(*querysets, binned_files(organization), allocations(organization))


def usage_by_kind(organization: Organization) -> dict[str, Usage]:
    """Return the usage of datasets, models, workspaces, deleted items, uploads and runs. Their sum is `usage`."""
    querysets = [select_kept(organization) for select_kept in KEPT_ITEMS_BY_KIND.values()]
    datasets, models, workspaces = (_total(rows.filter(deleted_at=None)) for rows in querysets)
    allocated = allocations(organization)
    return {
        "datasets": datasets,
        "models": models,
        "workspaces": workspaces,
        "deleted": sum(
            (_total(rows.exclude(deleted_at=None)) for rows in querysets), _total(binned_files(organization))
        ),
        "uploads": _total(allocated.filter(kind=Allocation.Kinds.UPLOAD)),
        "runs": _total(allocated.filter(kind=Allocation.Kinds.RUN)),
    }


def deleted(organization: Organization) -> list[Item]:
    """Return the deleted items that can be restored, the largest first."""
    querysets = [select_kept(organization) for select_kept in KEPT_ITEMS_BY_KIND.values()]
    items = [item for rows in querysets for item in rows.exclude(deleted_at=None)]
    return sorted(items, key=lambda item: -item.size_bytes)


def deleted_item(organization: Organization, kind: str, pk: int) -> Item:
    """Return a deleted item whose files are on the disk. `kind`, from a URL, names its kind. Raises NotFound."""
    select_kept = KEPT_ITEMS_BY_KIND.get(kind)
    if select_kept is None or pk > MAX_KEY:
        raise NotFound
    item: Item | None = select_kept(organization).exclude(deleted_at=None).filter(pk=pk).first()
    if item is None:
        raise NotFound
    return item


def version_numbered(dataset: Dataset, number: int) -> DatasetVersion:
    """Return the dataset's version with this number, if it is not deleted. Raises NotFound."""
    version = versions_of(dataset).filter(number=number).first() if number <= MAX_NUMBER else None
    if version is None:
        raise NotFound
    return version


def lock_versions(version_ids: Collection[int]) -> int:
    """Lock dataset versions against deletion until the transaction ends; return how many exist and are not deleted.

    The query is in SQL, because Django does not offer FOR SHARE. With it several orders can lock a version at once.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT id FROM storage_datasetversion WHERE id = ANY(%s) AND deleted_at IS NULL ORDER BY id FOR SHARE",
            [list(version_ids)],
        )
        return len(cursor.fetchall())


def storage_used(organization: Organization) -> int:
    """Return the bytes that count against the quota."""
    return usage(organization).counted_bytes


def quota_left(organization: Organization) -> int:
    """Return how many more bytes the organization may store; 0 if its quota of bytes or of files is used up."""
    remaining = remaining_quota(Quota.objects.get(organization=organization))
    return remaining.size_bytes if remaining.entry_count else 0


def remaining_quota(quota: Quota) -> Usage:
    """Return how many more bytes and entries the quota allows. Each entry also takes ENTRY_BYTES of the bytes."""
    if quota.stops_writes:  # the organization has not paid for its storage
        return Usage(0, 0)
    used = usage(quota.organization)
    # The usage may exceed the quota: runs write without a check, and an administrator can lower the quota.
    return Usage(max(0, quota.max_storage_bytes - used.counted_bytes), max(0, quota.max_files - used.entry_count))


def counts(organization: Organization) -> dict[str, int]:
    """Return the numbers of datasets, models and workspaces, which the quota limits. Deleted ones do not count."""
    return {
        "datasets": datasets_for(organization).count(),
        "models": models_for(organization).count(),
        "workspaces": workspaces_for(organization).count(),
    }


def limits(organization: Organization, used: Usage) -> list[QuotaLimit]:
    """Return the limits of the quota other than bytes. `used` is the organization's usage."""
    quota = organization.quota
    numbers = {"files": used.entry_count, **counts(organization)}
    return [QuotaLimit(name, count, getattr(quota, f"max_{name}")) for name, count in numbers.items()]


def root() -> Path:
    """Return the storage root. It has a folder for each kind of files, and `scratch/` for unfinished writes.

    The kinds are `datasets/`, `models/`, `workspaces/`, `uploads/`, `imports/`, `bin/` (recycle bins) and `.blobs/`.
    All must be on one disk, because a finished write is renamed out of `scratch/`.
    """
    return Path(settings.TRAINYARD_STORAGE_ROOT).absolute()


def workspace_folder(workspace: Workspace) -> Path:
    """Return the folder of a workspace's files."""
    return root() / "workspaces" / workspace.folder


def version_folder(version: DatasetVersion) -> Path:
    """Return the read-only folder of a version's files."""
    return root() / "datasets" / version.folder


def model_folder(version: ModelVersion) -> Path:
    """Return the read-only folder of a model version's files."""
    return root() / "models" / version.folder


def folder_of(item: Item) -> Path:
    """Return the folder of a version's or workspace's files."""
    if isinstance(item, DatasetVersion):
        return version_folder(item)
    return model_folder(item) if isinstance(item, ModelVersion) else workspace_folder(item)


def _named(rows: QuerySet[Row], name: str) -> Row:
    """Return the row with this name. Raises NotFound."""
    # Invalid names, which come from URLs, are not looked up: PostgreSQL refuses NUL characters.
    row = rows.filter(name=name).first() if NAME_PATTERN.match(name) else None
    if row is None:
        raise NotFound
    return row


def _total(*querysets: QuerySet[Any]) -> Usage:
    """Return the sum of the usage of all rows, in one query."""
    # Not `Sum`, with which Django would group by id: without a group, SQL adds up all rows of a table.
    columns = [Func(F(name), function="SUM") for name in ("size_bytes", "entry_count")]
    sums = [rows.order_by().values_list(*columns) for rows in querysets]
    totals = sums[0].union(*sums[1:], all=True)
    return sum((Usage(int(size or 0), int(entries or 0)) for size, entries in totals), Usage(0, 0))
