"""Datasets, workspaces and images: names, publishing, quotas and limits, deletion, crashes."""

import hashlib
import io
import stat
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from django.db import transaction

from console.accounts.models import AuditEvent, Quota
from console.core.errors import NotFound
from storage import (
    archives,
    catalog,
    files,
    garbage_collection,
    images,
    model_catalog,
    retention,
    selectors,
    trees,
    workspace_templates,
)
from storage.errors import BadArchive, NameTaken, StorageFull, TooLarge, TooMany, UnsafePath
from storage.models import Dataset, DatasetVersion, Image, ModelVersion
from storage.quota import Reservation
from storage.trees import ENTRY_BYTES, Measurement, Usage
from tests.crashes import Crash
from tests.factories.storage import ImageFactory
from tests.racing import together
from tests.storage.archives import member, tar_of, tar_with, zip_of
from tests.storage.refusals import refused_fields

pytestmark = pytest.mark.django_db
FILES = {"raw/a": b"12345", "b": b"6789"}
ARCHIVE = tar_of(FILES, compressed=True)
WRONG_NAMES = ["", "A", "a b", "-a", "a-", "a/b", "..", "a\n", "é", "a" * 64, "a\0"]


def leftovers():
    """Return the entries of the scratch folder."""
    return [path.name for path in catalog.scratch().iterdir()]


def published(kind="dataset"):
    """Return the entries of the folder of published versions."""
    folder = selectors.root() / f"{kind}s"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def new_dataset(owner, name="mnist"):
    return catalog.create_dataset(organization=owner.organization, user=owner.user, name=name)


def new_workspace(owner, name="work"):
    return catalog.create_workspace(organization=owner.organization, user=owner.user, name=name)


def publish(dataset, data=ARCHIVE):
    return catalog.publish_version(dataset=dataset, user=dataset.created_by, stream=io.BytesIO(data))


@pytest.fixture
def publisher(owner, root):
    """`publisher(kind)` returns two functions, which publish and return the latest version of a dataset or model."""
    (root / "x").write_text("x")
    ours = {"organization": owner.organization, "user": owner.user, "name": "mnist"}

    def create(kind):
        if kind == "model":
            publish_next = partial(model_catalog.publish_version, **ours, root=root, path="", lineage={"job": 1})
            return publish_next, lambda: selectors.model_named(owner.organization, "mnist").latest
        dataset = new_dataset(owner)
        publish_next = lambda: publish(Dataset.objects.get(pk=dataset.pk))
        return publish_next, lambda: selectors.dataset_named(owner.organization, "mnist").latest

    return create


def test_invalid_names_are_reported_at_their_field(owner):
    ours = {"organization": owner.organization, "user": owner.user}
    for name in WRONG_NAMES:
        for make in (catalog.create_dataset, catalog.create_workspace):
            assert refused_fields(make, **ours, name=name) == ["name"], name
    assert refused_fields(catalog.create_dataset, **ours, name="A", description="x\0") == ["description", "name"]
    assert not (selectors.root() / "workspaces").exists()


def test_names_are_unique_per_organization_while_not_deleted(owner, stranger):
    for make, delete in (
        (new_dataset, lambda first: retention.delete_dataset(dataset=first, user=owner.user)),
        (new_workspace, lambda first: retention.delete_workspace(workspace=first, user=owner.user)),
    ):
        first = make(owner, "same")
        with pytest.raises(NameTaken) as refused:
            make(owner, "same")
        assert set(refused.value.fields) == {"name"}
        make(stranger, "same")
        delete(first)
        make(owner, "same")
    assert len(list((selectors.root() / "workspaces").iterdir())) == 3  # also that of the deleted workspace


def test_a_published_version_is_read_only_and_the_next_one_leaves_it_as_it_is(owner):
    dataset = new_dataset(owner)
    version = publish(dataset)
    assert (version.number, version.size_bytes, version.file_count) == (1, 9, 2)
    assert version.sha256 == hashlib.sha256(ARCHIVE).hexdigest()
    folder = selectors.version_folder(version)
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    for path in (folder, *folder.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o555 if path.is_dir() else 0o444)
    assert "mnist" not in str(folder)
    assert leftovers() == []
    for name in ("datasets", "scratch"):
        assert stat.S_IMODE((selectors.root() / name).stat().st_mode) == 0o700
    second = publish(dataset, tar_of({"b": b"new"}))
    assert second.number == 2
    assert selectors.dataset_named(owner.organization, "mnist").latest == dataset.latest == second
    assert (folder / "b").read_bytes() == b"6789"
    for _ in range(2):  # the second time changes nothing
        retention.delete_dataset(dataset=dataset, user=owner.user)
    actions = list(AuditEvent.objects.order_by("id").values_list("action", flat=True))
    assert actions == ["dataset.created", "dataset.published", "dataset.published", "dataset.deleted"]


def test_a_refused_archive_leaves_nothing(owner, settings):
    settings.MAX_ARCHIVE_FILES = 5
    Quota.objects.filter(organization=owner.organization).update(max_storage_bytes=60_000)
    dataset = new_dataset(owner)
    for data, error in (
        (b"", BadArchive),
        (tar_of({}), BadArchive),
        (tar_with(member("folder", b"5")), BadArchive),  # of type 5, a folder
        (tar_of({"../x": b""}), UnsafePath),
        (tar_of(dict.fromkeys("abcdef", b"")), TooLarge),
        (tar_of({"x": b"x" * 80_000}), TooLarge),
    ):
        with pytest.raises(error):
            publish(dataset, data)
        assert leftovers() == published() == []
    retention.delete_dataset(dataset=dataset)  # while an upload runs that began before
    with pytest.raises(NotFound):
        publish(dataset)
    assert leftovers() == published() == list(dataset.versions.all()) == []


STEPS = [
    ("dataset", files, "copy"),
    ("dataset", catalog, "unpack_archive"),
    ("dataset", archives, "detect_format"),
    ("dataset", archives._Writer, "create_links"),
    ("dataset", trees, "make_read_only"),
    ("dataset", Path, "rename"),
    ("dataset", Reservation, "release"),
    ("dataset", DatasetVersion.objects, "create"),
    ("dataset", Dataset, "save"),
    ("dataset", catalog, "record_audit_event"),
    ("model", model_catalog, "copy_tree"),
    ("model", model_catalog, "move_into_place"),
    ("model", ModelVersion.objects, "create"),
]
"""The steps of publishing a version, and where each is called from."""


@pytest.mark.parametrize(("kind", "place", "step"), STEPS, ids=[f"{kind}-{step}" for kind, _place, step in STEPS])
def test_a_crash_leaves_no_row_and_only_files_that_are_collected(publisher, monkeypatch, kind, place, step):
    publish_next, latest = publisher(kind)
    first = publish_next()
    kept = published(kind)
    real = getattr(place, step)

    def crash(*args, **kwargs):
        real(*args, **kwargs)
        raise Crash

    with monkeypatch.context() as broken:
        broken.setattr(trees, "remove_tree", lambda **_kwargs: 0)  # a dead process cleans nothing up
        broken.setattr(place, step, crash)
        with pytest.raises(Crash), transaction.atomic():
            publish_next()
    assert latest() == first
    assert list(type(first).objects.all()) == [first]
    assert leftovers()
    for limit in ("ABANDONED_AFTER", "KEPT_AFTER_DELETION"):
        monkeypatch.setattr(garbage_collection, limit, timedelta(0))
    garbage_collection.collect()
    assert leftovers() == []
    assert published(kind) == kept
    assert publish_next().number == 2


def test_no_row_is_written_before_the_bytes_are_on_the_disk(owner, monkeypatch, root):
    dataset, workspace, archive = new_dataset(owner), new_workspace(owner), io.BytesIO(ARCHIVE)
    (root / "file").write_text("x")
    ours = {"organization": owner.organization, "user": owner.user, "name": "another"}
    before = selectors.usage(owner.organization)

    def refuse(*, folder):
        assert any(folder.iterdir())
        raise StorageFull

    monkeypatch.setattr(trees, "flush_disk", refuse)
    for write in (
        lambda: publish(dataset),
        lambda: model_catalog.publish_version(**ours, root=root, path="", lineage={"job": 1}),
        lambda: catalog.create_workspace(**ours, fill=workspace_templates.template_fill("charlm")),
        lambda: catalog.unpack_into_workspace(workspace=workspace, path="", archive=archive, on_unpacked=pytest.fail),
    ):
        with pytest.raises(StorageFull):
            write()
    assert selectors.usage(owner.organization) == before
    assert published() == leftovers() == []


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("kind", ["dataset", "model"])
def test_concurrent_publishing_gives_different_numbers(publisher, kind):
    publish_next, latest = publisher(kind)
    assert sorted(together(*[lambda: publish_next().number] * 4)) == [1, 2, 3, 4]
    assert latest().number == 4


@pytest.mark.django_db(transaction=True)
def test_concurrent_uploads_cannot_exceed_the_quota(owner):
    version_bytes = 1000 + 2 * ENTRY_BYTES
    room_for_two = version_bytes * 5 // 2
    Quota.objects.filter(organization=owner.organization).update(max_storage_bytes=room_for_two)
    datasets = [new_dataset(owner, f"d{number}") for number in range(4)]
    data = tar_of({"x": b"x" * 1000}, compressed=True)
    results = together(*[lambda dataset=dataset: publish(dataset, data) for dataset in datasets])
    kept = sum(isinstance(result, DatasetVersion) for result in results)
    assert kept in {1, 2}  # 1 if an upload that was refused later had reserved too much
    assert sum(isinstance(result, TooLarge) for result in results) == 4 - kept
    assert len(published()) == 2 * kept  # each with its manifest
    assert leftovers() == []
    assert selectors.storage_used(owner.organization) == kept * version_bytes


@pytest.mark.django_db(transaction=True)
def test_concurrent_writes_cannot_exceed_the_number_of_files(owner):
    workspace = new_workspace(owner)
    quota = Quota.objects.filter(organization=owner.organization)
    quota.update(max_files=8)  # the workspace's folder counts 1, the archive 4, each of the six files 1
    dataset, data = new_dataset(owner), tar_of(dict.fromkeys("abc", b"x"))
    write = lambda path: lambda: catalog.write_file(workspace=workspace, path=path, stream=io.BytesIO(b"x"))
    results = together(*(write(path) for path in "abcdef"), lambda: publish(dataset, data))
    used = selectors.usage(owner.organization).entry_count
    assert used == 1 + sum(
        4 if isinstance(result, DatasetVersion) else not isinstance(result, TooLarge) for result in results
    )
    assert used <= 8
    quota.update(max_files=used)
    assert selectors.quota_left(owner.organization) == 0, "no run can start"
    for refused in (write("new"), lambda: new_workspace(owner, "second"), lambda: publish(dataset, data)):
        with pytest.raises(TooLarge):
            refused()
    present = next(path for path in "abcdef" if (selectors.workspace_folder(workspace) / path).exists())
    catalog.write_file(workspace=workspace, path=present, stream=io.BytesIO(b"longer"))  # no new file
    assert leftovers() == []


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("kind", "create"), [("datasets", new_dataset), ("workspaces", new_workspace)])
def test_concurrent_creations_cannot_exceed_a_limit(owner, kind, create):
    Quota.objects.filter(organization=owner.organization).update(**{f"max_{kind}": 2})
    results = together(*[lambda name=f"n{number}": create(owner, name) for number in range(4)])
    assert [type(result) for result in results if isinstance(result, Exception)] == [TooMany] * 2
    assert selectors.counts(owner.organization)[kind] == 2
    created = next(result for result in results if not isinstance(result, Exception))
    if kind == "datasets":
        publish(created, tar_of({"x": b"x"}))
        retention.delete_dataset(dataset=created)
    else:
        retention.delete_workspace(workspace=created)
    create(owner, "another")
    (deleted,) = selectors.deleted(owner.organization)
    with pytest.raises(TooMany):
        retention.restore(item=deleted)


@pytest.mark.django_db(transaction=True)
def test_the_first_workspace_is_created_once(owner):
    def create():
        return catalog.ensure_first_workspace(organization=owner.organization, user=owner.user).pk

    assert len(set(together(*[create] * 5))) == 1
    (workspace,) = selectors.workspaces_for(owner.organization)
    assert workspace.name == "main"
    assert "$WORKSPACE" in files.read_text(root=selectors.workspace_folder(workspace), path="README.md")
    assert len(list((selectors.root() / "workspaces").iterdir())) == 1


def test_files_of_a_workspace_count(owner, settings):
    organization = owner.organization
    # For 1000 bytes in two files, and the workspace's folder.
    Quota.objects.filter(organization=organization).update(max_storage_bytes=1000 + 3 * ENTRY_BYTES)
    workspace = new_workspace(owner)

    def put(path, size):
        catalog.write_file(workspace=workspace, path=path, stream=io.BytesIO(b"x" * size))

    put("a", 600)
    with pytest.raises(TooLarge):
        put("b", 401)
    put("b", 400)
    put("a", 600)
    with pytest.raises(TooLarge):
        put("a", 601)
    assert selectors.quota_left(organization) == 0
    for write in (
        lambda: publish(new_dataset(owner)),
        lambda: catalog.make_folder(workspace=workspace, path="empty"),
        lambda: put("empty", 0),
        lambda: catalog.move_file(workspace=workspace, source="a", target="folder/a"),
        lambda: new_workspace(owner, "another"),
    ):
        with pytest.raises(TooLarge):
            write()
    put("a", 100)
    assert selectors.usage(organization) == Usage(500, 3)
    catalog.delete_file(workspace=workspace, path="b")
    assert selectors.usage(organization) == Usage(100, 2)
    settings.MAX_FILE_BYTES = 10
    with pytest.raises(TooLarge):
        put("c", 11)
    (selectors.workspace_folder(workspace) / "by-a-run").write_bytes(b"x" * 50)
    assert catalog.measure_workspace(workspace=workspace) == selectors.usage(organization) == Usage(150, 3)


def test_deleted_items_count_until_they_are_removed(owner):
    organization = owner.organization
    workspace = new_workspace(owner)
    catalog.write_file(workspace=workspace, path="folder/a", stream=io.BytesIO(b"x" * 10))
    dataset = new_dataset(owner)
    first, second = publish(dataset), publish(dataset)
    everything = selectors.usage(organization)
    assert everything == Usage(10 + 2 * 9, 3 + 2 * 4)  # bytes, and entries with their folders
    retention.delete_version(version=second, user=owner.user)
    dataset.refresh_from_db()
    assert dataset.latest == first
    retention.delete_dataset(dataset=dataset, user=owner.user)
    retention.delete_workspace(workspace=workspace, user=owner.user)
    assert selectors.usage(organization) == everything
    retention.restore(item=second, user=owner.user)
    assert selectors.dataset_named(organization, "mnist").latest == second
    with pytest.raises(NotFound):  # it is not deleted any more
        retention.remove(item=second, user=owner.user)
    retention.delete_dataset(dataset=second.dataset, user=owner.user)
    new_dataset(owner)
    with pytest.raises(NameTaken):
        retention.restore(item=first, user=owner.user)
    for item in (first, second, workspace):
        for _ in range(2):  # the second time changes nothing
            retention.remove(item=item, user=owner.user)
        with pytest.raises(NotFound):
            retention.restore(item=item, user=owner.user)
    assert selectors.usage(organization) == Usage()
    assert published() == leftovers() == []


def test_an_archive_is_refused_while_it_is_unpacked(owner, monkeypatch):
    """A small archive that becomes large, or many, takes no more of the disk than the quota has left."""
    quota = 2 * 1024**2
    Quota.objects.filter(organization=owner.organization).update(max_storage_bytes=quota)
    dataset, taken = new_dataset(owner), []
    remove = trees.remove_tree

    def measure_and_remove(*, folder, scratch):
        taken.append(trees.measure(root=scratch).usage.counted_bytes)
        remove(folder=folder, scratch=scratch)

    monkeypatch.setattr(trees, "remove_tree", measure_and_remove)
    large, many = {"x": bytes(8 * 1024**2)}, {f"{number}": b"" for number in range(1000)}
    for data in (zip_of(large), tar_of(large, compressed=True), zip_of(many), tar_of(many, compressed=True)):
        assert len(data) < quota
        with pytest.raises(TooLarge):
            publish(dataset, data)
    assert len(taken) == 2 * 4  # the unpacked files and the archive are removed one after the other
    # The quota does not count the scratch folder, its two folders for this upload, and the entry of the archive's file.
    assert max(taken) < quota + 4 * ENTRY_BYTES
    assert selectors.usage(owner.organization) == Usage()
    assert leftovers() == []


def test_an_upload_that_crashed_counts_until_collected(owner, monkeypatch):
    dataset = new_dataset(owner)
    with monkeypatch.context() as broken:
        broken.setattr(Reservation, "release", lambda _self: None)
        with pytest.raises(BadArchive):
            publish(dataset, b"x" * 1000)
    assert selectors.usage(owner.organization).size_bytes >= 1000
    assert garbage_collection.collect() == 0  # what the upload left is too young
    monkeypatch.setattr(garbage_collection, "ABANDONED_AFTER", timedelta(0))
    garbage_collection.collect()
    assert selectors.usage(owner.organization) == Usage()


def test_a_reservation_of_entries_alone_is_released(owner):
    with Reservation(owner.organization, label="x", spare_bytes=ENTRY_BYTES) as reservation:
        reservation.count(entries=1)
        assert selectors.usage(owner.organization) == Usage(0, 1)
    assert selectors.usage(owner.organization) == Usage()


def test_moving_folders_while_measured_hides_nothing(owner, monkeypatch):
    """An incomplete measurement does not replace the last complete one."""
    workspace = new_workspace(owner)
    (selectors.workspace_folder(workspace) / "large").write_bytes(b"x" * 1000)
    counted = catalog.measure_workspace(workspace=workspace)
    monkeypatch.setattr(trees, "measure", lambda **_root: Measurement(Usage(1, 2), is_complete=False))
    assert catalog.measure_workspace(workspace=workspace) == counted == Usage(1000, 2)


IMAGE = {"name": "mine", "title": "Mine", "frameworks": ["horovod"], "reference": "registry.example.com:5000/a/b:1.2"}


WRONG_REFERENCES = [
    "", "train", "https://a.b/c", "a.b/c d", "a.b/c:", "A.b/C", "a.b/c\n", "a.b/c@sha256:12", "a.b/" + "c" * 500,
]  # fmt: skip
WRONG_IMAGES = [
    ("name", "A"), ("title", " "), ("title", "x" * 101), ("frameworks", []), ("frameworks", ["jax"]),
    ("description", "x" * 2001), *(("reference", wrong) for wrong in WRONG_REFERENCES),
]  # fmt: skip


def test_invalid_images_are_refused(owner):
    for field, value in WRONG_IMAGES:
        values = IMAGE | {field: value, "organization": owner.organization}
        assert refused_fields(images.create_image, **values) == [field], value
    assert not Image.objects.exists()


def test_builtin_images_are_created_once_and_keep_changes():
    names = ["pytorch", "tensorflow", "horovod", "horovod-tensorflow"]
    assert [image.name for image in images.ensure_builtin_images()] == names
    Image.objects.filter(name="horovod").update(is_active=False, title="Ours")
    images.ensure_builtin_images()
    assert Image.objects.count() == len(names)
    horovod = Image.objects.get(name="horovod")
    assert (horovod.is_active, horovod.title, horovod.frameworks) == (False, "Ours", ["horovod", "pytorch"])
    assert Image.objects.get(name="pytorch").is_builtin


def test_images_are_builtin_or_of_the_organization(owner, stranger):
    ImageFactory(name="builtin")
    ImageFactory(name="old", is_active=False)
    ImageFactory(name="mine", organization=owner.organization)
    ImageFactory(name="theirs", organization=stranger.organization)
    assert {image.name for image in selectors.images_for(owner.organization)} == {"builtin", "mine"}
    assert selectors.image_named(owner.organization, "mine").name == "mine"
    for name in ("old", "theirs", "none"):
        with pytest.raises(NotFound):
            selectors.image_named(owner.organization, name)
