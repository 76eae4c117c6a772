"""Datasets from files that are already on the platform."""

import os

import pytest

from console.core.errors import InvalidInput
from jobs import dataset_publishing
from jobs.results import checkpoint_key
from runtime.specs import Outcome
from storage import catalog, dataset_files, selectors
from storage.errors import TooLarge
from tests.factories.storage import DatasetFactory

pytestmark = pytest.mark.django_db


@pytest.fixture
def dataset(customer):
    return DatasetFactory(organization=customer.organization, name="digits")


def paths(version, folder=""):
    return [row.path for row in dataset_files.list_page(version=version, path=folder).rows]


def from_workspace(customer, dataset, path=""):
    """Publish a file or folder of the workspace; by default all of it."""
    return dataset_publishing.publish_workspace_folder(
        dataset=dataset, user=customer.membership.user, workspace=customer.workspace, path=path
    )


def from_job(customer, dataset, job, path):
    return dataset_publishing.publish_job_files(dataset=dataset, user=customer.membership.user, job=job, path=path)


def test_a_folder_or_file_of_a_workspace_becomes_a_version_without_links_and_pipes(customer, dataset):
    customer.write("data/a.csv", "1,2\n")
    customer.write("data/deep/b.csv", "3,4\n")
    (customer.folder / "data" / "link").symlink_to("/etc/passwd")
    os.mkfifo(customer.folder / "data" / "pipe")
    version = from_workspace(customer, dataset, "data")
    assert (version.number, version.file_count, paths(version)) == (1, 2, ["deep", "a.csv"])
    customer.write("data/a.csv", "changed")
    assert (selectors.version_folder(version) / "a.csv").read_text() == "1,2\n"
    assert paths(from_workspace(customer, dataset, "data/a.csv")) == ["a.csv"]
    assert "train.py" in paths(from_workspace(customer, dataset))


def test_a_folder_of_a_jobs_outputs_becomes_a_version(customer, dataset):
    attempt = customer.started()
    folder = customer.backend.output_folder(checkpoint_key(attempt.job_id))
    folder.mkdir(parents=True)
    (folder / "labels.csv").write_text("1\n")
    job = customer.end(attempt, Outcome.COMPLETED)
    assert paths(from_job(customer, dataset, job, "outputs")) == ["labels.csv"]
    for path in ("logs/attempt-1", "", "outputs/missing", "outputs/../../x"):
        with pytest.raises(InvalidInput) as refused:
            from_job(customer, dataset, job, path)
        assert set(refused.value.fields) == {"path"}


def test_refused_sources_publish_nothing(customer, dataset):
    (customer.folder / "link").symlink_to("/etc")
    (customer.folder / "empty").mkdir()
    customer.write("data/a", "x" * 10_000)
    # Room for the content of "data/a", but not for the 4096 bytes that the file and its folder count each besides.
    customer.quota(max_storage_bytes=selectors.storage_used(customer.organization) + 12_000)
    for path, error in (
        ("missing", InvalidInput), ("../x", InvalidInput), ("link", InvalidInput), ("link/passwd", InvalidInput),
        ("a\0b", InvalidInput), ("empty", catalog.BadArchive), ("data", TooLarge),
    ):  # fmt: skip
        with pytest.raises(error):
            from_workspace(customer, dataset, path)
    assert not dataset.versions.exists()
    assert list(catalog.scratch().iterdir()) == []
