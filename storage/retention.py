"""Delete, restore and finally remove dataset versions, model versions and workspaces (items).

A deleted item disappears from lists at once. Its files stay for KEPT_AFTER_DELETION, and count against the quota. In
this time, its retention, members can restore the item, or remove its files. An item that an open job uses cannot be
deleted. A row is marked as removed only after its files are removed, so all files on the disk count against the
quota.

Three columns hold the state: `deleted_at`, `kept_until` (the end of the retention), and `removed_at` (when the files
were removed).
"""

from __future__ import annotations

from collections.abc import Sequence

from django.db import IntegrityError, transaction
from django.utils import timezone

from console.accounts.models import Organization, User
from console.accounts.services import record_audit_event
from console.core.errors import NotFound
from storage import in_use, manifests, quota, recycle_bin, selectors, trees
from storage.catalog import scratch
from storage.errors import NameTaken
from storage.in_use import ObjectIds
from storage.models import KEPT_AFTER_DELETION, Dataset, DatasetVersion, Model, ModelVersion, Workspace
from storage.selectors import Item


def delete_dataset(*, dataset: Dataset, user: User | None = None) -> None:
    """Delete a dataset with its versions. Safe to repeat. Raises InUse."""
    with transaction.atomic():
        quota.lock(dataset.organization)
        # The versions are locked too, because orders of organizations that share the dataset lock only their own quota.
        versions = selectors.versions_of(dataset).select_for_update().values_list("pk", flat=True)
        in_use.require_unused(
            ObjectIds(dataset_versions=list(versions)), viewer_organization_id=dataset.organization.pk
        )
        now = timezone.now()
        # Nothing is updated if the dataset was deleted already.
        if Dataset.objects.filter(pk=dataset.pk, deleted_at=None).update(deleted_at=now):
            selectors.versions_of(dataset).update(deleted_at=now, kept_until=now + KEPT_AFTER_DELETION)
            record_audit_event(
                organization=dataset.organization, actor=user, action="dataset.deleted", target=dataset.name
            )


def delete_version(*, version: DatasetVersion, user: User | None = None) -> None:
    """Delete one version of a dataset; the newest that remains is then its latest. Safe to repeat. Raises InUse."""
    organization = version.dataset.organization
    with transaction.atomic():
        quota.lock(organization)
        DatasetVersion.objects.select_for_update().get(pk=version.pk)  # as in `delete_dataset`
        in_use.require_unused(ObjectIds(dataset_versions=[version.pk]), viewer_organization_id=organization.pk)
        if _mark_deleted(version):
            _set_latest(version.dataset)
            record_audit_event(
                organization=organization, actor=user, action="dataset.version_deleted", target=str(version)
            )


def delete_model(*, model: Model, user: User | None = None) -> None:
    """Delete a model with its versions. Safe to repeat. Raises InUse."""
    with transaction.atomic():
        quota.lock(model.organization)
        versions = selectors.model_versions_of(model).values_list("pk", flat=True)
        in_use.require_unused(ObjectIds(model_versions=list(versions)), viewer_organization_id=model.organization.pk)
        now = timezone.now()
        # Nothing is updated if the model was deleted already.
        if Model.objects.filter(pk=model.pk, deleted_at=None).update(deleted_at=now):
            selectors.model_versions_of(model).update(deleted_at=now, kept_until=now + KEPT_AFTER_DELETION)
            record_audit_event(organization=model.organization, actor=user, action="model.deleted", target=model.name)


def delete_model_version(*, version: ModelVersion, user: User | None = None) -> None:
    """Delete one version of a model; if no other version remains, also the model. Safe to repeat. Raises InUse."""
    organization = version.model.organization
    with transaction.atomic():
        quota.lock(organization)
        in_use.require_unused(ObjectIds(model_versions=[version.pk]), viewer_organization_id=organization.pk)
        if _mark_deleted(version):
            _set_latest_model(version.model)
            record_audit_event(
                organization=organization, actor=user, action="model.version_deleted", target=str(version)
            )


def delete_workspace(*, workspace: Workspace, user: User | None = None) -> None:
    """Delete a workspace. Safe to repeat. Raises InUse."""
    with transaction.atomic():
        quota.lock(workspace.organization)
        in_use.require_unused(ObjectIds(workspaces=[workspace.pk]), viewer_organization_id=workspace.organization.pk)
        if _mark_deleted(workspace):
            record_audit_event(
                organization=workspace.organization, actor=user, action="workspace.deleted", target=workspace.name
            )


def restore(*, item: Item, user: User | None = None) -> None:
    """Restore a deleted workspace or version. With a version, its dataset or model is restored too, if deleted.

    Raises NotFound after the retention, NameTaken, and TooMany if the quota allows no more workspaces, datasets or
    models.
    """
    organization = owner_of(item)
    try:
        with transaction.atomic():
            quota.lock(organization)
            item.refresh_from_db()
            # After `kept_until`, garbage collection may already be removing the files.
            if item.removed_at or (item.kept_until and item.kept_until <= timezone.now()):
                raise NotFound
            if item.deleted_at is None:
                return
            if isinstance(item, Workspace):
                quota.require_room_for(organization, "workspaces")
            elif isinstance(item, ModelVersion):
                if item.model.deleted_at:
                    quota.require_room_for(organization, "models")
            elif item.dataset.deleted_at:
                quota.require_room_for(organization, "datasets")
            item.deleted_at = item.kept_until = None
            item.save(update_fields=["deleted_at", "kept_until"])
            if isinstance(item, ModelVersion):
                Model.objects.filter(pk=item.model_id).update(deleted_at=None)
                _set_latest_model(item.model)
            if isinstance(item, DatasetVersion):
                Dataset.objects.filter(pk=item.dataset_id).update(deleted_at=None)
                _set_latest(item.dataset)
            record_audit_event(
                organization=organization, actor=user, action=f"{_action_prefix(item)}.restored", target=str(item)
            )
    except IntegrityError:  # names are unique among undeleted objects, and a newer object has this name
        raise NameTaken from None


def remove(*, item: Item, user: User | None = None) -> None:
    """Remove the files of a deleted item now. Safe to repeat. Raises InUse, NotFound.

    A transaction first ends the retention. If this process then dies, garbage collection removes the files.
    """
    organization = owner_of(item)
    with transaction.atomic():
        quota.lock(organization)
        item.refresh_from_db()
        if item.deleted_at is None:
            raise NotFound
        in_use.require_unused(_ids_of(item), viewer_organization_id=organization.pk)
        now = timezone.now()
        if item.kept_until is None or item.kept_until > now:
            item.kept_until = now
            item.save(update_fields=["kept_until"])
            record_audit_event(
                organization=organization, actor=user, action=f"{_action_prefix(item)}.removed", target=str(item)
            )
    remove_files(item)  # outside the transaction, which locks the quota, because it can take minutes


def remove_files(item: Item) -> None:
    """Remove the files of a deleted item, and then mark it as removed. Safe to repeat."""
    folder = selectors.folder_of(item)
    trees.remove_tree(folder=folder, scratch=scratch())
    manifests.path_of(folder).unlink(missing_ok=True)  # only dataset versions have one
    if isinstance(item, Workspace):
        for file in item.deleted_files.all():
            recycle_bin.remove_files(file)
    type(item).objects.filter(pk=item.pk, removed_at=None).update(removed_at=timezone.now())


def expired() -> list[Item]:
    """Return the deleted items whose retention is over and that no open job uses."""
    rows: Sequence[Item] = [
        *DatasetVersion.objects.filter(kept_until__lte=timezone.now(), removed_at=None).select_related("dataset"),
        *ModelVersion.objects.filter(kept_until__lte=timezone.now(), removed_at=None).select_related("model"),
        *Workspace.objects.filter(kept_until__lte=timezone.now(), removed_at=None),
    ]
    return [item for item in rows if not in_use.jobs_using(_ids_of(item), viewer_organization_id=None)]


def owner_of(item: Item) -> Organization:
    """Return the organization that an item belongs to."""
    if isinstance(item, DatasetVersion):
        return item.dataset.organization
    return item.model.organization if isinstance(item, ModelVersion) else item.organization


def _mark_deleted(item: Item) -> bool:
    """Mark an item as deleted, which starts its retention; return False if it was deleted already."""
    now = timezone.now()
    rows = type(item).objects.filter(pk=item.pk, deleted_at=None)
    return bool(rows.update(deleted_at=now, kept_until=now + KEPT_AFTER_DELETION))


def _set_latest(dataset: Dataset) -> None:
    dataset.latest = selectors.latest_version(dataset)
    dataset.save(update_fields=["latest"])


def _set_latest_model(model: Model) -> None:
    """Set the model's latest version. A model without versions is deleted: only a publication creates models."""
    model.latest = selectors.model_versions_of(model).first()
    model.deleted_at = None if model.latest else timezone.now()
    model.save(update_fields=["latest", "deleted_at"])


def _ids_of(item: Item) -> ObjectIds:
    """Return the argument by which the functions of `in_use` look for an item.

    The kind `models`, as in URLs, stands for versions of models, and `versions` for those of datasets.
    """
    kind = {"versions": "dataset_versions", "models": "model_versions", "workspaces": "workspaces"}[item.kind]
    return ObjectIds(**{kind: [item.pk]})


def _action_prefix(item: Item) -> str:
    """Return the beginning of the names of an item's actions in the audit log."""
    return {"versions": "dataset.version", "models": "model.version", "workspaces": "workspace"}[item.kind]
