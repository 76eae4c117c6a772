"""What storage holds, read. The one rule: every query begins at an organization, so no tenant sees another's."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from django.conf import settings
from django.db.models import Q, QuerySet, Sum

from console.accounts.errors import NotFound
from console.accounts.models import Organization
from console.operations.kept import Kept, given
from storage.models import NAME_PATTERN, Dataset, DatasetVersion, Image, Workspace

Row = TypeVar("Row", Image, Dataset, Workspace)


def images_for(organization: Organization) -> QuerySet[Image]:
    """The images on offer: the built-in ones, and the organization's own."""
    return Image.objects.filter(Q(organization=organization) | Q(organization=None), is_active=True)


def image_named(organization: Organization, name: str) -> Image:
    """One of the images on offer. Raises NotFound."""
    return _the(_IMAGE, organization, name)


def datasets_for(organization: Organization) -> QuerySet[Dataset]:
    """The datasets, each with its `latest` version (None before the first is published)."""
    return Dataset.objects.filter(organization=organization, deleted_at=None).select_related("latest")


def dataset_named(organization: Organization, name: str) -> Dataset:
    """One dataset, with its `latest` version. Raises NotFound."""
    return _the(_DATASET, organization, name)


def versions_of(dataset: Dataset) -> QuerySet[DatasetVersion]:
    """The published versions, newest first."""
    return dataset.versions.order_by("-number")


def latest_version(dataset: Dataset) -> DatasetVersion | None:
    """The version published last; None before the first."""
    return versions_of(dataset).first()


def workspaces_for(organization: Organization) -> QuerySet[Workspace]:
    """The workspaces."""
    return Workspace.objects.filter(organization=organization, deleted_at=None)


def workspace_named(organization: Organization, name: str) -> Workspace:
    """One workspace. Raises NotFound."""
    return _the(_WORKSPACE, organization, name)


def storage_used(organization: Organization) -> int:
    """Bytes that count against the quota: every version of every dataset, and workspaces as last measured."""
    versions = DatasetVersion.objects.filter(dataset__organization=organization, dataset__deleted_at=None)
    in_datasets = versions.aggregate(total=Sum("size_bytes"))["total"] or 0
    in_workspaces = workspaces_for(organization).aggregate(total=Sum("size_bytes"))["total"] or 0
    return int(in_datasets + in_workspaces)


def root() -> Path:
    """Where all bytes lie: `datasets/`, `workspaces/`, and `scratch/` for what is not finished. One disk."""
    return Path(settings.TRAINYARD_STORAGE_ROOT).absolute()


def workspace_folder(workspace: Workspace) -> Path:
    """Where a workspace's files lie."""
    return root() / "workspaces" / workspace.folder


def version_folder(version: DatasetVersion) -> Path:
    """Where a version's files lie, read-only."""
    return root() / "datasets" / version.folder


_IMAGE = Kept(lambda: images_for(given("organization")).filter(name=given("name")))
_DATASET = Kept(lambda: datasets_for(given("organization")).filter(name=given("name")))
_WORKSPACE = Kept(lambda: workspaces_for(given("organization")).filter(name=given("name")))


def _the(rows: Kept[Row], organization: Organization, name: str) -> Row:
    row = rows.first(organization=organization, name=name) if NAME_PATTERN.match(name) else None
    if row is None:
        raise NotFound
    return row
