"""Models: published by copying, immutable, deleted and restored as dataset versions are."""

import stat

import pytest

from console.accounts.models import AuditEvent, Quota
from console.core.errors import InvalidInput, NotFound
from storage import catalog, garbage_collection, in_use, model_catalog, retention, selectors
from storage.errors import InUse, NameTaken, TooLarge, TooMany
from storage.models import Model, ModelVersion
from storage.trees import ENTRY_BYTES
from tests.factories.storage import ModelVersionFactory

pytestmark = pytest.mark.django_db
LINEAGE = {"job": 7, "path": "outputs"}


def publish(owner, root, name="digits", **changes):
    values = {"path": "", "lineage": LINEAGE} | changes
    return model_catalog.publish_version(
        organization=owner.organization, user=owner.user, name=name, root=root, **values
    )


def stored():
    """Return the names of all model folders and of what is unfinished."""
    folder = selectors.root() / "models"
    return [path.name for path in (*catalog.scratch().iterdir(), *(folder.iterdir() if folder.exists() else ()))]


@pytest.fixture
def outputs(root):
    """What a job has written."""
    (root / "best").mkdir()
    (root / "best" / "weights.pt").write_bytes(b"12345")
    return root


def test_publish_copies_the_files_read_only(owner, outputs):
    first = publish(owner, outputs, description="Reads digits")
    (outputs / "best" / "weights.pt").write_bytes(b"changed")
    second = publish(owner, outputs, path="best")
    folder = selectors.model_folder(first)
    assert (folder / "best" / "weights.pt").read_bytes() == b"12345"
    assert (selectors.model_folder(second) / "weights.pt").read_bytes() == b"changed"
    for path in (folder, *folder.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o555 if path.is_dir() else 0o444)
    assert (first.number, first.size_bytes, first.file_count, first.entry_count) == (1, 5, 1, 3)
    assert (second.number, second.lineage, second.job_pk) == (2, LINEAGE, 7)
    model = selectors.model_named(owner.organization, "digits")
    assert (model.latest, model.description) == (second, "Reads digits")
    assert stored() == [first.folder, second.folder] or stored() == [second.folder, first.folder]
    counted = (5 + 7) + (3 + 2) * ENTRY_BYTES  # of the first and of the second version
    assert selectors.usage(owner.organization).counted_bytes == counted
    assert selectors.usage_by_kind(owner.organization)["models"].counted_bytes == counted
    actions = list(AuditEvent.objects.order_by("id").values_list("action", flat=True))
    assert actions == ["model.created", "model.published", "model.published"]


def test_what_is_refused_leaves_nothing(owner, outputs):
    (outputs / "empty").mkdir()
    for changes, error in (
        ({"name": "No Name"}, InvalidInput),
        ({"path": "empty"}, InvalidInput),
        ({"description": "x\0"}, InvalidInput),
    ):
        with pytest.raises(error):
            publish(owner, outputs, **changes)
    a_byte_too_few = 3 * ENTRY_BYTES + 4
    Quota.objects.filter(organization=owner.organization).update(max_storage_bytes=a_byte_too_few)
    with pytest.raises(TooLarge):
        publish(owner, outputs)
    assert stored() == []
    assert not Model.objects.exists()
    assert selectors.storage_used(owner.organization) == 0


def test_the_quota_limits_the_number_of_models(owner, outputs):
    Quota.objects.filter(organization=owner.organization).update(max_models=1)
    first = publish(owner, outputs)
    assert publish(owner, outputs).number == 2
    with pytest.raises(TooMany):
        publish(owner, outputs, "another")
    retention.delete_model(model=first.model)
    publish(owner, outputs, "another")
    first.refresh_from_db()
    with pytest.raises(TooMany):
        retention.restore(item=first)
    assert len(stored()) == 3


def test_a_version_is_deleted_and_restored_with_its_model(owner, outputs):
    first, second = publish(owner, outputs), publish(owner, outputs)
    model = selectors.model_named(owner.organization, "digits")
    retention.delete_model_version(version=second, user=owner.user)
    assert selectors.model_named(owner.organization, "digits").latest == first
    retention.delete_model_version(version=first, user=owner.user)
    with pytest.raises(NotFound):  # a model without versions is not found
        selectors.model_named(owner.organization, "digits")
    assert {item.pk for item in selectors.deleted(owner.organization)} == {first.pk, second.pk}
    retention.restore(item=selectors.deleted_item(owner.organization, "models", first.pk), user=owner.user)
    assert selectors.model_named(owner.organization, "digits").latest == first
    assert publish(owner, outputs).number == 3  # the number of a deleted version is never used again
    retention.delete_model(model=model, user=owner.user)
    again = publish(owner, outputs)
    assert again.number == 1
    with pytest.raises(NameTaken):
        retention.restore(item=selectors.deleted_item(owner.organization, "models", first.pk), user=owner.user)


def test_files_of_a_deleted_version_are_removed_early_or_after_the_retention(owner, outputs):
    first, second = publish(owner, outputs), publish(owner, outputs)
    retention.delete_model(model=first.model, user=owner.user)
    retention.remove(item=selectors.deleted_item(owner.organization, "models", first.pk), user=owner.user)
    assert stored() == [second.folder]
    ModelVersion.objects.filter(pk=second.pk).update(kept_until=second.published_at)
    assert garbage_collection.collect() == 1
    assert stored() == []
    assert selectors.storage_used(owner.organization) == 0


def test_a_model_in_use_is_not_deleted(owner, monkeypatch):
    version = ModelVersionFactory(model__organization=owner.organization)
    used = lambda objects, **_viewer: ["#1 train.py"] if version.pk in objects.model_versions else []
    monkeypatch.setattr(in_use, "_finders", [used])
    for delete in (
        lambda: retention.delete_model(model=version.model),
        lambda: retention.delete_model_version(version=version),
    ):
        with pytest.raises(InUse, match="#1 train"):
            delete()
    assert selectors.model_named(owner.organization, version.model.name).latest == version
