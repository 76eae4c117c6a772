"""The recycle bin of a workspace: what is deleted can be restored, and counts until it is removed."""

import os
from datetime import timedelta

import pytest
from django.utils import timezone

from console.accounts.models import Quota
from console.core.errors import NotFound
from storage import catalog, files, garbage_collection, recycle_bin, retention, selectors, trees
from storage.errors import FileMissing, NameTaken, UnsafePath, WrongKind
from storage.models import DeletedFile
from storage.trees import Measurement, Usage
from tests.factories.storage import WorkspaceFactory
from tests.racing import raised, together

pytestmark = pytest.mark.django_db


@pytest.fixture
def folder(workspace):
    """The workspace's folder. It has `src` with a file, a folder and a link."""
    folder = selectors.workspace_folder(workspace)
    (folder / "src" / "deep").mkdir(parents=True)
    (folder / "src" / "train.py").write_text("print(1)")
    (folder / "src" / "deep" / "link").symlink_to("/etc/passwd")
    catalog.measure_workspace(workspace=workspace)
    return folder


def used(workspace):
    return selectors.usage(workspace.organization)


def names_in_bin():
    return sorted(path.name for path in catalog.top_folder("bin").iterdir())


def test_what_is_deleted_counts_until_it_is_restored_or_removed(workspace, folder, owner, monkeypatch):
    before = used(workspace)
    item = recycle_bin.delete(workspace=workspace, path="./src/", user=owner.user)
    assert (item.path, item.is_folder, item.size_bytes, item.entry_count) == ("src", True, 8, 4)
    assert list(folder.iterdir()) == []
    assert used(workspace) == before
    assert selectors.usage_by_kind(workspace.organization)["deleted"] == Usage(8, 4)
    with monkeypatch.context() as unreadable:
        unreadable.setattr(trees, "measure", lambda **_root: Measurement(Usage(1, 2), is_complete=False))
        assert recycle_bin.measure(item) == Usage(8, 4)
    assert recycle_bin.restore(item=item) == "src"
    assert (folder / "src" / "train.py").read_text() == "print(1)"
    assert str((folder / "src" / "deep" / "link").readlink()) == "/etc/passwd"
    assert used(workspace) == before
    item = recycle_bin.delete(workspace=workspace, path="src/train.py")
    recycle_bin.remove(item=item)
    recycle_bin.remove(item=item)
    assert used(workspace) == before + Usage(-8, -1)
    assert names_in_bin() == list(DeletedFile.objects.all()) == []
    with pytest.raises(NotFound):
        recycle_bin.restore(item=item)


def test_a_restored_file_never_replaces_another_one(workspace, folder):
    for content in ("first", "second", "third"):
        (folder / "src" / "train.py").write_text(content)
        recycle_bin.delete(workspace=workspace, path="src/train.py")
    third, second, first = recycle_bin.items_of(workspace)
    with pytest.raises(UnsafePath):
        recycle_bin.restore(item=first, path="../train.py")
    (folder / "taken").touch()
    with pytest.raises(NameTaken):
        recycle_bin.restore(item=first, path="taken")
    with pytest.raises(WrongKind):
        recycle_bin.restore(item=first, path="taken/train.py")
    files.delete(root=folder, path="src", scratch=catalog.scratch())
    catalog.measure_workspace(workspace=workspace)
    before = used(workspace)
    restored = [recycle_bin.restore(item=item) for item in (first, second, third)]
    assert restored == ["src/train.py", "src/train (restored).py", "src/train (restored 2).py"]
    assert [(folder / path).read_text() for path in restored] == ["first", "second", "third"]
    assert used(workspace) == before + Usage(0, 1), "the folder that was created counts"
    catalog.measure_workspace(workspace=workspace)
    assert used(workspace) == before + Usage(0, 1)


def test_links_and_pipes_are_removed_at_once_and_never_followed(workspace, folder):
    (folder / "link").symlink_to("src")
    os.mkfifo(folder / "pipe")
    for path in ("link", "pipe"):
        assert recycle_bin.delete(workspace=workspace, path=path) is None
    (folder / "link").symlink_to("src")
    for path, error in (("link/train.py", UnsafePath), ("..", UnsafePath), ("", WrongKind), ("none", FileMissing)):
        with pytest.raises(error):
            recycle_bin.delete(workspace=workspace, path=path)
    assert (folder / "src" / "train.py").exists()
    assert not DeletedFile.objects.exists()


@pytest.mark.usefixtures("folder")
def test_garbage_collection_removes_what_was_kept_long_enough(workspace, monkeypatch):
    old = recycle_bin.delete(workspace=workspace, path="src/train.py")
    kept = recycle_bin.delete(workspace=workspace, path="src")
    DeletedFile.objects.filter(pk=old.pk).update(kept_until=timezone.now())
    (recycle_bin.path_in_bin(kept) / "late").write_text("written by a run that had the folder open")
    (catalog.top_folder("bin") / "orphan").touch()
    with pytest.raises(NotFound):
        recycle_bin.restore(item=old)
    garbage_collection.collect()
    assert names_in_bin() == sorted([kept.folder, "orphan"]), "what has no row is kept for as long as a deleted file"
    monkeypatch.setattr(garbage_collection, "KEPT_AFTER_DELETION", timedelta(0))
    garbage_collection.collect()
    assert names_in_bin() == [kept.folder]
    kept.refresh_from_db()
    assert (kept.size_bytes, kept.entry_count) == (41, 4)  # measured again, with the late file


@pytest.mark.usefixtures("folder")
def test_the_bin_goes_with_its_workspace(workspace, owner, stranger):
    item = recycle_bin.delete(workspace=workspace, path="src")
    assert [(each.name, each.binned_bytes) for each in recycle_bin.bins_of(owner.organization)] == [("code", 8)]
    assert not recycle_bin.bins_of(stranger.organization)
    other = WorkspaceFactory(organization=owner.organization, name="other")
    with pytest.raises(NotFound):
        recycle_bin.item_of(other, item.pk)
    retention.delete_workspace(workspace=workspace)
    with pytest.raises(NotFound):
        recycle_bin.restore(item=item)
    retention.restore(item=workspace)
    recycle_bin.restore(item=item)
    recycle_bin.delete(workspace=workspace, path="src")
    retention.delete_workspace(workspace=workspace)
    retention.remove(item=workspace)
    assert names_in_bin() == []
    assert used(workspace) == Usage(0, 1)  # the other workspace


@pytest.mark.usefixtures("folder")
def test_the_bin_can_be_emptied_though_the_quota_is_full(workspace):
    Quota.objects.update(max_storage_bytes=0)
    item = recycle_bin.delete(workspace=workspace, path="src")
    assert recycle_bin.restore(item=item) == "src", "it counted already"
    recycle_bin.delete(workspace=workspace, path="src")
    assert recycle_bin.empty(workspace=workspace) == 1
    assert used(workspace) == Usage(0, 1)


@pytest.mark.django_db(transaction=True)
def test_what_several_users_restore_at_once_is_restored_once(workspace, folder):
    item = recycle_bin.delete(workspace=workspace, path="src")
    before = used(workspace)
    results = together(*[lambda: recycle_bin.restore(item=DeletedFile(**vars_of(item)))] * 4)
    assert [type(error) for error in raised(results)] == [NotFound] * 3
    assert [path.name for path in folder.iterdir()] == ["src"]
    assert used(workspace) == before


def vars_of(item):
    """Return the columns of a deleted file's row, from which each thread makes an object of its own."""
    return {field.attname: getattr(item, field.attname) for field in DeletedFile._meta.concrete_fields}
