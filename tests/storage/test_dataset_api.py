"""The API of the files of a dataset: pages, hashes, and versions that are gone."""

import hashlib

import pytest

from storage import dataset_files, garbage_collection, manifests, retention, selectors
from storage.models import Dataset, DatasetVersion
from tests.factories.storage import DatasetFactory, DatasetVersionFactory
from tests.storage.archives import tar_of

pytestmark = pytest.mark.django_db
FILES = {"README.md": b"# Digits", "raw/a": b"12345", "raw/deep/b": b"6789", "z.csv": b"x,y\n1,2\n"}


@pytest.fixture
def client(api, member):
    return api(member)


@pytest.fixture
def version(client, member):
    """The first of two versions of the dataset `digits`; it has FILES."""
    DatasetFactory(organization=member.organization, name="digits")
    for content in (FILES, {"other": b"1"}):
        client.generic("PUT", "/api/v1/datasets/digits/archive/", tar_of(content), content_type="application/x-tar")
    return DatasetVersion.objects.get(number=1)


def listed(client, **query):
    return client.get("/api/v1/datasets/digits/files/", query).json()


@pytest.mark.usefixtures("version")
def test_a_version_is_listed_with_hashes(client):
    rows = listed(client, version=1)["results"]
    assert [(row["path"], row["kind"], row["size"]) for row in rows] == [
        ("raw", "folder", 0), ("README.md", "file", 8), ("z.csv", "file", 8),
    ]  # fmt: skip
    assert [row["path"] for row in listed(client, version=1, path="raw/")["results"]] == ["raw/deep", "raw/a"]
    (deep,) = listed(client, version=1, path="raw/deep")["results"]
    assert deep["sha256"] == hashlib.sha256(b"6789").hexdigest()
    assert [row["path"] for row in listed(client)["results"]] == ["other"]  # the latest


@pytest.mark.usefixtures("version")
def test_a_long_folder_has_pages(client, monkeypatch):
    monkeypatch.setattr(dataset_files, "PAGE_SIZE", 2)
    page = listed(client, version=1)
    assert len(page["results"]) == 2
    rest = client.get(page["next"]).json()
    assert ([row["path"] for row in rest["results"]], rest["next"]) == (["z.csv"], None)


def test_a_version_that_does_not_exist_or_is_deleted_is_not_found(client, version):
    retention.delete_version(version=version)
    for number in ("1", "3", "0", "x", "-1", "9" * 30, "²"):
        for path in ("", "raw/a"):
            answer = client.get(f"/api/v1/datasets/digits/files/{path}", {"version": number})
            assert answer.status_code == 404, number


@pytest.mark.usefixtures("version")
def test_paths_outside_a_version_are_refused(client):
    for path in ("../x", "%2e%2e/x", "/etc/passwd"):
        assert client.get(f"/api/v1/datasets/digits/files/{path}").json()["code"] == "unsafe_path"
    assert client.get("/api/v1/datasets/digits/files/", {"path": "../.."}).json()["code"] == "unsafe_path"


def test_the_manifest_goes_with_the_version(version):
    manifest = manifests.path_of(selectors.version_folder(version))
    garbage_collection.collect()
    assert manifest.exists()
    retention.delete_version(version=version)
    retention.remove(item=version)
    assert not manifest.exists()


def test_a_version_without_a_manifest_has_no_hashes_and_a_dataset_without_a_version_no_files(client, member):
    version = DatasetVersionFactory(dataset=DatasetFactory(organization=member.organization, name="digits"))
    (selectors.version_folder(version) / "a").write_bytes(b"x")
    assert listed(client)["results"][0]["sha256"] == ""
    Dataset.objects.update(latest=None)
    DatasetVersion.objects.all().delete()
    assert client.get("/api/v1/datasets/digits/files/").status_code == 404
