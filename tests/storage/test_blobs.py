"""A file that versions of one organization share is stored once."""

import errno
import io
import os

import pytest

from runtime.trash import remove_tree
from storage import blobs, catalog, dataset_files, garbage_collection, retention, selectors
from tests.factories.storage import DatasetFactory
from tests.storage.archives import tar_of

pytestmark = pytest.mark.django_db
CONTENT = b"x" * 5000


def publish(organization, files, name="digits"):
    dataset = selectors.datasets_for(organization).filter(name=name).first()
    dataset = dataset or DatasetFactory(organization=organization, name=name)
    return catalog.publish_version(dataset=dataset, user=None, stream=io.BytesIO(tar_of(files)))


def status(version, path):
    return (selectors.version_folder(version) / path).stat()


def all_blobs():
    return [path for path in (selectors.root() / blobs.FOLDER).rglob("*") if path.is_file()]


def test_versions_and_datasets_share_files_of_one_content(owner, stranger):
    first = publish(owner.organization, {"a": CONTENT, "b": b"1", "empty": b""})
    second = publish(owner.organization, {"deep/a": CONTENT, "copy": CONTENT, "b": b"2", "empty": b""})
    other = publish(owner.organization, {"a": CONTENT}, name="other")
    foreign = publish(stranger.organization, {"a": CONTENT})
    inodes = {
        status(version, path).st_ino
        for version, path in ((first, "a"), (second, "deep/a"), (second, "copy"), (other, "a"))
    }
    assert len(inodes) == 1
    assert status(foreign, "a").st_ino not in inodes
    assert status(first, "b").st_ino != status(second, "b").st_ino
    assert (selectors.version_folder(second) / "deep" / "a").read_bytes() == CONTENT
    assert dataset_files.sha256(version=second, path="deep/a") == dataset_files.sha256(version=first, path="a")
    assert [row.name for row in dataset_files.list_page(version=second, path="deep").rows] == ["a"]
    assert second.size_bytes == 2 * len(CONTENT) + 1  # each file counts, although they are stored once


def test_an_executable_file_is_not_shared_with_one_that_is_not(owner, tmp_path):
    (tmp_path / "source").mkdir()
    for name, mode in (("plain", 0o644), ("tool", 0o755)):
        (tmp_path / "source" / name).write_bytes(CONTENT)
        (tmp_path / "source" / name).chmod(mode)
    dataset = DatasetFactory(organization=owner.organization)
    version = catalog.publish_copy(dataset=dataset, user=None, root=tmp_path, path="source")
    assert [status(version, name).st_mode & 0o777 for name in ("plain", "tool")] == [0o444, 0o555]


def test_a_blob_is_kept_until_its_last_version_is_deleted(owner):
    first, second = (publish(owner.organization, {"a": CONTENT}) for _ in range(2))
    for version, is_kept in ((first, True), (second, False)):
        retention.delete_version(version=version)
        retention.remove(item=version)
        garbage_collection.collect()
        assert bool(all_blobs()) == is_kept
        if is_kept:
            assert (selectors.version_folder(second) / "a").read_bytes() == CONTENT
            assert status(second, "a").st_mode & 0o777 == 0o444


def test_a_missing_or_damaged_blob_is_not_linked(owner):
    first = publish(owner.organization, {"a": CONTENT})
    (blob,) = all_blobs()
    blob.unlink()
    second = publish(owner.organization, {"a": CONTENT})
    assert status(first, "a").st_ino != status(second, "a").st_ino
    for damaged in (b"y" * len(CONTENT), b"damaged"):  # of the same size, and of another
        (blob,) = all_blobs()
        blob.unlink()
        blob.write_bytes(damaged)
        third, fourth = (publish(owner.organization, {"a": CONTENT}) for _ in range(2))
        assert (selectors.version_folder(third) / "a").read_bytes() == CONTENT
        assert status(third, "a").st_ino == status(fourth, "a").st_ino  # of the new blob


def test_a_disk_that_cannot_link_stores_copies(owner, monkeypatch):
    first = publish(owner.organization, {"a": CONTENT})
    for number in (errno.EMLINK, errno.EPERM, errno.EXDEV, errno.ENOTSUP):

        def refuse(*_arguments, number=number, **_options):
            raise OSError(number, "refused")

        monkeypatch.setattr(os, "link", refuse)
        second = publish(owner.organization, {"a": CONTENT, "new": b"1"})
        assert status(first, "a").st_ino != status(second, "a").st_ino
        assert (selectors.version_folder(second) / "a").read_bytes() == CONTENT


@pytest.mark.parametrize("call", ["link", "rename"])
def test_a_crash_between_two_steps_leaves_published_files_alone(owner, monkeypatch, call):
    first = publish(owner.organization, {"a": CONTENT})
    real = getattr(os, call)

    def crash(*arguments, **options):
        if options.get("dst_dir_fd") is not None:  # a step of linking a blob into the new version
            raise KeyboardInterrupt
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, crash)
        with pytest.raises(KeyboardInterrupt):
            publish(owner.organization, {"a": CONTENT, "z": b"12"})
    for folder in catalog.scratch().iterdir():  # what the crash left, which garbage collection removes later
        remove_tree(folder)
    assert (selectors.version_folder(first) / "a").read_bytes() == CONTENT
    assert status(first, "a").st_nlink == 2  # in the version and as a blob
    assert publish(owner.organization, {"a": CONTENT}).number == 2
