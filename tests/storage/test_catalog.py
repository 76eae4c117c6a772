from __future__ import annotations

import hashlib
import io
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, transaction
from pytest_django import Settings

from console.accounts.errors import InvalidInput, NotFound
from console.accounts.models import AuditEvent, Membership, Quota
from storage import archives, catalog, files, selectors, trees
from storage.errors import BadArchive, NameTaken, TooLarge, UnsafePath
from storage.models import Dataset, DatasetVersion, Image, Workspace
from tests.storage.archives import member, tar_of, tar_with

pytestmark = pytest.mark.django_db
FILES = {"raw/a": b"12345", "b": b"6789"}
ARCHIVE = tar_of(FILES, compressed=True)
WRONG_NAMES = ["", "A", "a b", "-a", "a-", "a/b", "..", "a\n", "é", "a" * 64, "a\0"]


def leftovers() -> list[str]:
    """Whatever lies in the scratch folder."""
    return [path.name for path in catalog.scratch().iterdir()]


def published() -> list[str]:
    folder = catalog.root() / "datasets"
    return [path.name for path in folder.iterdir()] if folder.exists() else []


def make_dataset(owner: Membership, name: str = "mnist") -> Dataset:
    return catalog.create_dataset(organization=owner.organization, user=owner.user, name=name)


def make_workspace(owner: Membership, name: str = "work") -> Workspace:
    return catalog.create_workspace(organization=owner.organization, user=owner.user, name=name)


def publish(dataset: Dataset, data: bytes = ARCHIVE) -> DatasetVersion:
    return catalog.publish_version(dataset=dataset, user=dataset.created_by, stream=io.BytesIO(data))


# --- Names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRONG_NAMES)
def test_names_are_checked_at_their_field(owner: Membership, name: str) -> None:
    for make in (catalog.create_dataset, catalog.create_workspace):
        with pytest.raises(InvalidInput) as refused:
            make(organization=owner.organization, user=owner.user, name=name)
        assert set(refused.value.fields) == {"name"}
    with pytest.raises(InvalidInput) as refused:
        catalog.create_dataset(organization=owner.organization, user=None, name=name, description="x\0")
    assert set(refused.value.fields) == {"name", "description"}
    assert not (catalog.root() / "workspaces").exists()


def test_names_are_unique_per_organization_while_not_deleted(owner: Membership, stranger: Membership) -> None:
    for make, delete in ((make_dataset, "dataset"), (make_workspace, "workspace")):
        first = make(owner, "same")
        with pytest.raises(NameTaken) as refused:
            make(owner, "same")
        assert set(refused.value.fields) == {"name"}
        make(stranger, "same")
        getattr(catalog, f"delete_{delete}")(**{delete: first}, user=owner.user)
        make(owner, "same")
    assert len(list((catalog.root() / "workspaces").iterdir())) == 3


def test_acts_are_written_down(owner: Membership) -> None:
    dataset, workspace = make_dataset(owner), make_workspace(owner)
    publish(dataset)
    for _again in range(2):
        catalog.delete_dataset(dataset=dataset, user=owner.user)
        catalog.delete_workspace(workspace=workspace, user=owner.user)
    actions = AuditEvent.objects.filter(organization=owner.organization).order_by("id").values_list("action", flat=True)
    assert [action for action in actions if action.startswith(("dataset", "workspace"))] == [
        "dataset.created",
        "workspace.created",
        "dataset.published",
        "dataset.deleted",
        "workspace.deleted",
    ]


# --- Publishing -------------------------------------------------------------------------------------------------------


def test_publish(owner: Membership) -> None:
    dataset = make_dataset(owner)
    version = publish(dataset)
    assert (version.number, version.size_bytes, version.file_count) == (1, 9, 2)
    assert version.sha256 == hashlib.sha256(ARCHIVE).hexdigest()
    folder = selectors.version_folder(version)
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    for path in (folder, *folder.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o555 if path.is_dir() else 0o444)
    assert leftovers() == []
    again = publish(dataset, tar_of({"b": b"new"}))
    assert again.number == 2
    assert selectors.dataset_named(owner.organization, "mnist").latest == dataset.latest == again
    assert (folder / "b").read_bytes() == b"6789"
    assert owner.user.email not in str(folder)
    assert "mnist" not in str(folder)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", BadArchive),
        (b"not an archive", BadArchive),
        (tar_of({}), BadArchive),
        (tar_with(member("folder", b"5")), BadArchive),
        (ARCHIVE[:-20], BadArchive),
        (tar_of({"../x": b""}), UnsafePath),
        (tar_of({"x": b"x" * 30_000}), TooLarge),
    ],
)
def test_a_refused_archive_leaves_nothing(owner: Membership, data: bytes, error: type[Exception]) -> None:
    Quota.objects.filter(organization=owner.organization).update(max_storage_bytes=20_000)
    dataset = make_dataset(owner)
    with pytest.raises(error):
        publish(dataset, data)
    assert leftovers() == published() == []
    assert not dataset.versions.exists()


class Crash(BaseException):
    """What kills a process in the middle: no handler of ours sees it."""


STEPS: list[tuple[Any, str]] = [
    (files, "copy"),
    (catalog, "unpack_archive"),
    (archives, "sniff"),
    (archives._Target, "link_all"),
    (trees, "make_read_only"),
    (Path, "rename"),
    (catalog, "_require_room"),
    (DatasetVersion.objects, "create"),
    (Dataset, "save"),
    (catalog, "record"),
]


@pytest.mark.parametrize(("place", "step"), STEPS, ids=[step for _place, step in STEPS])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_anywhere_leaves_no_row_and_only_what_the_sweep_takes(
    owner: Membership, monkeypatch: pytest.MonkeyPatch, place: Any, step: str, when: str
) -> None:
    dataset = make_dataset(owner)
    first = publish(dataset)
    real = getattr(place, step)

    def crash(*args: Any, **kwargs: Any) -> None:
        if when == "after":
            real(*args, **kwargs)
        raise Crash

    with monkeypatch.context() as broken:
        broken.setattr(trees, "remove_tree", lambda **_kwargs: 0)  # a dead process cleans nothing up
        broken.setattr(place, step, crash)
        with pytest.raises(Crash), transaction.atomic():
            publish(dataset, tar_of({"x": b"x"}))
    dataset.refresh_from_db()
    assert dataset.latest == first
    assert list(dataset.versions.all()) == [first]
    assert selectors.version_folder(first).exists()
    stray = set(published()) - {first.folder}
    assert leftovers() or stray
    assert publish(dataset).number == 2


def test_a_dataset_deleted_while_its_upload_runs(owner: Membership) -> None:
    dataset = make_dataset(owner)
    catalog.delete_dataset(dataset=dataset)
    with pytest.raises(NotFound):
        publish(dataset)
    assert leftovers() == published() == []


def in_threads(act: Callable[[int], object], count: int) -> list[object]:
    """What `act` gave or raised, in threads that begin together."""
    barrier, results = threading.Barrier(count), [None] * count

    def run(number: int) -> None:
        try:
            barrier.wait()
            results[number] = act(number)
        except Exception as error:
            results[number] = error
        finally:
            connection.close()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.django_db(transaction=True)
def test_publishing_at_once_gives_different_numbers(owner: Membership) -> None:
    dataset = make_dataset(owner)
    results = in_threads(lambda _number: publish(Dataset.objects.get(pk=dataset.pk)).number, 6)
    assert sorted(results) == [1, 2, 3, 4, 5, 6]
    dataset.refresh_from_db()
    assert dataset.latest is not None
    assert dataset.latest.number == 6


@pytest.mark.django_db(transaction=True)
def test_uploads_that_fit_one_by_one_do_not_fit_together(owner: Membership) -> None:
    Quota.objects.filter(organization=owner.organization).update(max_storage_bytes=2500)
    datasets = [make_dataset(owner, f"d{number}") for number in range(4)]
    data = tar_of({"x": b"x" * 1000}, compressed=True)
    results = in_threads(lambda number: publish(datasets[number], data), 4)
    assert sum(isinstance(result, DatasetVersion) for result in results) == 2
    assert sum(isinstance(result, TooLarge) for result in results) == 2
    assert len(published()) == 2
    assert leftovers() == []
    assert catalog.storage_used(owner.organization) == 2000


@pytest.mark.django_db(transaction=True)
def test_the_first_workspace_is_made_once(owner: Membership) -> None:
    def make(_number: int) -> int:
        return catalog.ensure_first_workspace(organization=owner.organization, user=owner.user).pk

    assert len(set(in_threads(make, 5))) == 1
    (workspace,) = selectors.workspaces_for(owner.organization)
    assert workspace.name == "main"
    assert "$WORKSPACE" in files.read_text(root=selectors.workspace_folder(workspace), path="README.md")
    assert len(list((catalog.root() / "workspaces").iterdir())) == 1


def test_the_first_workspace_inside_a_transaction(owner: Membership) -> None:
    with transaction.atomic():
        first = catalog.ensure_first_workspace(organization=owner.organization, user=owner.user)
        assert catalog.ensure_first_workspace(organization=owner.organization, user=owner.user) == first


# --- Room -------------------------------------------------------------------------------------------------------------


def test_files_of_a_workspace_count(owner: Membership, settings: Settings) -> None:
    Quota.objects.filter(organization=owner.organization).update(max_storage_bytes=1000)
    workspace = make_workspace(owner)

    def put(path: str, size: int) -> None:
        catalog.write_file(workspace=workspace, path=path, stream=io.BytesIO(b"x" * size))

    put("a", 600)
    with pytest.raises(TooLarge):
        put("b", 401)
    put("b", 400)
    put("a", 600)
    with pytest.raises(TooLarge):
        put("a", 601)
    assert catalog.room_left(owner.organization) == 0
    with pytest.raises(TooLarge):
        publish(make_dataset(owner))
    put("a", 100)
    assert catalog.storage_used(owner.organization) == 500
    catalog.delete_file(workspace=workspace, path="b")
    assert catalog.storage_used(owner.organization) == 100
    settings.MAX_FILE_BYTES = 10
    with pytest.raises(TooLarge):
        put("c", 11)
    (selectors.workspace_folder(workspace) / "by-a-run").write_bytes(b"x" * 50)
    assert catalog.measure_workspace(workspace=workspace) == 150
    assert catalog.storage_used(owner.organization) == 150
    catalog.delete_workspace(workspace=workspace)
    assert catalog.storage_used(owner.organization) == 0


def test_an_upload_larger_than_allowed(owner: Membership, settings: Settings) -> None:
    settings.MAX_UPLOAD_BYTES = len(ARCHIVE) - 1
    with pytest.raises(TooLarge):
        publish(make_dataset(owner))
    settings.MAX_UPLOAD_BYTES, settings.MAX_ARCHIVE_FILES = 10_000, 1
    with pytest.raises(TooLarge):
        publish(make_dataset(owner, "other"))
    assert leftovers() == []


def test_storage_is_closed_to_other_users_of_the_machine(owner: Membership) -> None:
    make_workspace(owner)
    publish(make_dataset(owner))
    for name in ("datasets", "workspaces", "scratch"):
        assert stat.S_IMODE((catalog.root() / name).stat().st_mode) == 0o700
    assert catalog.root().stat().st_dev == catalog.scratch().stat().st_dev


# --- Images -----------------------------------------------------------------------------------------------------------

IMAGE = {
    "name": "mine",
    "title": "Mine",
    "frameworks": ["pytorch", "horovod"],
    "reference": "registry.example.com:5000/team/train:1.2",
}


def test_create_image(owner: Membership) -> None:
    catalog.ensure_builtin_images()
    image = catalog.create_image(organization=owner.organization, **IMAGE)
    assert (image.frameworks, image.is_builtin) == (["pytorch", "horovod"], False)
    with pytest.raises(NameTaken):
        catalog.create_image(organization=owner.organization, **IMAGE)
    with pytest.raises(NameTaken):
        catalog.create_image(organization=owner.organization, **IMAGE | {"name": "pytorch"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "A"),
        ("title", " "),
        ("title", "x" * 101),
        ("frameworks", []),
        ("frameworks", ["jax"]),
        ("description", "x" * 2001),
        *(
            ("reference", wrong)
            for wrong in ("", "train", "https://a.b/c", "a.b/c d", "a.b/c:", "A.b/C", "a.b/c\n", "a.b/c@sha256:12")
        ),
    ],
)
def test_a_wrong_image(owner: Membership, field: str, value: object) -> None:
    with pytest.raises(InvalidInput) as refused:
        catalog.create_image(organization=owner.organization, **IMAGE | {field: value})
    assert set(refused.value.fields) == {field}
    assert not Image.objects.exists()


def test_builtin_images_are_made_once_and_stay_as_administrators_left_them() -> None:
    names = ["pytorch", "tensorflow", "horovod", "horovod-tensorflow"]
    assert [image.name for image in catalog.ensure_builtin_images()] == names
    Image.objects.filter(name="horovod").update(is_active=False, title="Ours")
    catalog.ensure_builtin_images()
    assert Image.objects.count() == len(names)
    horovod = Image.objects.get(name="horovod")
    assert (horovod.is_active, horovod.title, horovod.frameworks) == (False, "Ours", ["horovod", "pytorch"])
    assert Image.objects.get(name="pytorch").is_builtin
