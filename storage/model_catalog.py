"""Publish trained models: copies of files that a job wrote, as named and versioned folders that never change.

The bytes are moved into place before the row is written, as for datasets (`catalog`). So a crash leaves no row without
bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

from django.conf import settings
from django.db import transaction
from django.db.models import Max
from django.utils.translation import gettext_lazy as _

from console.accounts.models import Organization, User
from console.accounts.services import record_audit_event
from console.core.errors import CustomerError, InvalidInput
from storage import quota, trees
from storage.catalog import move_into_place, scratch, temporary_folder, validate_texts
from storage.models import Model, ModelVersion
from storage.quota import Reservation
from storage.tree_copy import CopyResult, copy_tree


class VersionName(TypedDict):
    """The name and number of a version of a dataset or model."""

    name: str
    version: int


class MetricSummary(TypedDict):
    """The values of one metric of the job, such as the loss."""

    last: float
    lowest: float
    highest: float


class Lineage(TypedDict):
    """How a model was made, at the time when the version was published. It is stored as JSON."""

    job: int
    """The job's id."""
    job_name: str
    path: str
    """The path of the published file or folder among the job's files, such as `outputs/best`."""
    framework: str
    image: str
    workspace: str
    code_path: str
    arguments: list[str]
    script_sha256: str
    """The SHA-256 of the script as the job ran it; empty if no snapshot of the script exists."""
    epochs: int
    lr: str
    batch_size: int
    datasets: list[VersionName]
    models: list[VersionName]
    from_checkpoint: int | None
    """The id of the job from whose checkpoint this job started; None if it started from none."""
    metrics: dict[str, MetricSummary]
    price_minor: int | None
    """The price paid for the job; None before it has ended."""
    currency: str


def publish_version(
    *,
    organization: Organization,
    user: User | None,
    name: str,
    root: Path,
    path: str,
    lineage: Lineage,
    description: str = "",
) -> ModelVersion:
    """Publish a copy of the file or folder at `path` below `root` as the next version of the model `name`.

    The first version also creates the model. A `description` that is not empty replaces the model's
    description. Raises InvalidInput, TooLarge, TooMany, StorageFull, and the errors of `tree_copy.copy_tree`.
    """
    validate_texts(name, description)
    with Reservation(organization, label=name) as reservation, temporary_folder() as unfinished:
        folder = unfinished / "files"
        folder.mkdir()
        copy_result = copy_tree(
            root=root, path=path, target=folder, counter=reservation, max_entries=settings.MAX_ARCHIVE_FILES
        )
        if not copy_result.file_count:
            raise InvalidInput(fields={"path": _("This folder contains no files. Choose one that does.")})
        version_folder = move_into_place(folder, area="models")
        try:
            trees.flush_disk(folder=version_folder)
            with transaction.atomic():
                quota.lock(organization)  # deletions lock it too, so they wait for this publication
                model = _get_or_create_model(organization, user, name, description)
                version = _create_version(model, user, version_folder, copy_result, lineage)
                reservation.release()  # in the transaction that counts the version, so that no byte counts twice
        except CustomerError:
            # As in `catalog._publish`: after any other error the row may have been written, and the files stay.
            trees.remove_tree(folder=version_folder, scratch=scratch())
            raise
    return version


def _get_or_create_model(organization: Organization, user: User | None, name: str, description: str) -> Model:
    """Return the model of this name; create it if it does not exist. The caller must have locked the quota."""
    model = Model.objects.filter(organization=organization, name=name, deleted_at=None).first()
    if model is None:
        quota.require_room_for(organization, "models")
        model = Model.objects.create(organization=organization, name=name, description=description, created_by=user)
        record_audit_event(organization=organization, actor=user, action="model.created", target=name)
    elif description:
        model.description = description  # `_create_version` saves it
    return model


def _create_version(
    model: Model, user: User | None, folder: Path, copy_result: CopyResult, lineage: Lineage
) -> ModelVersion:
    """Write the row of a model's next version, and make it the latest. The caller must have locked the quota."""
    # Deleted versions count too, because lineages may still name them.
    aggregates: dict[str, Any] = model.versions.aggregate(last=Max("number"))
    version = ModelVersion.objects.create(
        model=model,
        number=(aggregates["last"] or 0) + 1,
        folder=folder.name,
        size_bytes=copy_result.usage.size_bytes,
        file_count=copy_result.file_count,
        entry_count=copy_result.usage.entry_count,
        sha256=copy_result.sha256,
        job_pk=lineage["job"],
        lineage=lineage,
        created_by=user,
    )
    model.latest = version
    model.save(update_fields=["latest", "description"])
    record_audit_event(
        organization=model.organization,
        actor=user,
        action="model.published",
        target=model.name,
        data={"version": version.number, "job": lineage["job"], "size_bytes": version.size_bytes},
    )
    return version
