"""Garbage collection of storage removes what no row names and what was deleted long enough ago."""

import io
from datetime import timedelta
from pathlib import Path

import pytest
from django.utils import timezone

from storage import catalog, garbage_collection, selectors, tasks
from storage.models import Dataset, Workspace
from tests.factories.storage import DatasetFactory, ModelVersionFactory, WorkspaceFactory
from tests.storage.archives import tar_of

pytestmark = pytest.mark.django_db
NAMES = ("live", "expired", "recent")
"""Datasets and workspaces that are not deleted, and that were deleted more and less than the retention ago."""


@pytest.fixture
def eight_days_later(monkeypatch):
    """Move `timezone.now` eight days ahead, for the tests too.

    The garbage collection reads when a file's status last changed (ctime), which cannot be set back.
    """
    later = timezone.now() + timedelta(days=8)
    monkeypatch.setattr(garbage_collection.timezone, "now", lambda: later)


def leftover():
    """Leave a folder and a file in the scratch folder, as a killed process does. Return the folder."""
    folder = catalog.scratch() / "leftover"
    (folder / "files").mkdir(parents=True)
    (folder / "files" / "x").write_text("x")
    (catalog.scratch() / "spool").write_text("x")
    return folder


def dataset_with_files(owner, name):
    dataset = DatasetFactory(organization=owner.organization, name=name)
    catalog.publish_version(dataset=dataset, user=None, stream=io.BytesIO(tar_of({"a/b": b"x"})))
    return dataset


@pytest.mark.usefixtures("eight_days_later")
def test_files_without_a_row_are_removed(owner):
    leftover()
    datasets = [dataset_with_files(owner, name) for name in NAMES]
    workspaces = [WorkspaceFactory(organization=owner.organization, name=name) for name in NAMES]
    model = ModelVersionFactory(model__organization=owner.organization)
    strays = [selectors.root() / area / "stray" for area in ("workspaces", "models")]
    for stray in strays:
        stray.mkdir()
    now = timezone.now()
    for name, days in (("expired", 8), ("recent", 6)):
        Dataset.objects.filter(name=name).update(deleted_at=now - timedelta(days=days))
        Workspace.objects.filter(name=name).update(deleted_at=now - timedelta(days=days))
    # Two strays, two leftovers, and the expired dataset and workspace.
    assert garbage_collection.collect() == 6
    assert [selectors.version_folder(each.versions.get()).exists() for each in datasets] == [True, False, True]
    assert [selectors.workspace_folder(each).exists() for each in workspaces] == [True, False, True]
    assert selectors.model_folder(model).exists()
    assert not [stray for stray in strays if stray.exists()]
    assert list(catalog.scratch().iterdir()) == []
    assert garbage_collection.collect() == 0


@pytest.mark.usefixtures("eight_days_later")
def test_an_entry_that_disappears_after_it_was_listed_is_passed_over(monkeypatch):
    leftover()
    gone = catalog.scratch() / "gone"
    list_entries = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda self: iter([gone, *list_entries(self)]))
    assert garbage_collection.collect() == 2  # the leftover folder and file


def test_workspaces_are_measured(owner):
    workspace = WorkspaceFactory(organization=owner.organization)
    broken = WorkspaceFactory(organization=owner.organization)
    selectors.workspace_folder(broken).rmdir()  # which must not stop the measurement of the other
    (selectors.workspace_folder(workspace) / "by-a-run").write_bytes(b"x" * 70)
    tasks.collect_garbage()
    workspace.refresh_from_db()
    assert workspace.size_bytes == 70


def test_a_failed_removal_does_not_stop_the_others(monkeypatch):
    folder = leftover()
    monkeypatch.setattr(garbage_collection, "ABANDONED_AFTER", timedelta(0))

    def fail(**_kwargs):
        raise OSError

    monkeypatch.setattr(garbage_collection.trees, "remove_tree", fail)
    assert garbage_collection.collect() == 1  # the file beside the folder
    assert folder.exists()
