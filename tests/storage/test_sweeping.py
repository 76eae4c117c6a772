from __future__ import annotations

import io
import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
from django.utils import timezone

from console.accounts.models import Membership
from storage import catalog, selectors, sweeping, tasks
from storage.models import Dataset, Workspace
from tests.factories.storage import DatasetFactory, WorkspaceFactory
from tests.storage.archives import tar_of

pytestmark = pytest.mark.django_db


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight days go by between what a test makes and its sweep: file times can't be set back, so the clock goes on."""
    eight_days = timezone.now() + timedelta(days=8)
    monkeypatch.setattr(sweeping.timezone, "now", lambda: eight_days)


def leftover() -> Path:
    folder = catalog.scratch() / "leftover"
    (folder / "files").mkdir(parents=True)
    (folder / "files" / "x").write_text("x")
    (catalog.scratch() / "spool").write_text("x")
    return folder


def dataset_with_files(owner: Membership, name: str) -> Dataset:
    dataset: Dataset = DatasetFactory(organization=owner.organization, name=name)
    catalog.publish_version(dataset=dataset, user=None, stream=io.BytesIO(tar_of({"a/b": b"x"})))
    return dataset


def test_nothing_young_is_touched(owner: Membership) -> None:
    leftover()
    dataset_with_files(owner, "gone")
    Dataset.objects.update(deleted_at=timezone.now())
    assert sweeping.sweep() == 0
    assert len(list((selectors.root() / "datasets").iterdir())) == 1


@pytest.mark.usefixtures("later")
def test_what_nothing_names_any_more_goes(owner: Membership) -> None:
    leftover()
    live = dataset_with_files(owner, "live")
    gone = dataset_with_files(owner, "gone")
    lately = dataset_with_files(owner, "lately")
    workspaces = {name: WorkspaceFactory(organization=owner.organization, name=name) for name in ("w", "x", "y")}
    stray = selectors.root() / "workspaces" / "stray"
    stray.mkdir()
    now = timezone.now()
    for name, when in (("gone", now - timedelta(days=8)), ("lately", now - timedelta(days=6))):
        Dataset.objects.filter(name=name).update(deleted_at=when)
    Workspace.objects.filter(name="x").update(deleted_at=now - timedelta(days=8))
    Workspace.objects.filter(name="y").update(deleted_at=now - timedelta(days=6))
    assert sweeping.sweep() == 5
    assert selectors.version_folder(live.versions.get()).exists()
    assert selectors.version_folder(lately.versions.get()).exists()
    assert not selectors.version_folder(gone.versions.get()).exists()
    assert [selectors.workspace_folder(workspaces[name]).exists() for name in "wxy"] == [True, False, True]
    assert not stray.exists()
    assert list(catalog.scratch().iterdir()) == []
    assert sweeping.sweep() == 0


def test_workspaces_are_measured_anew(owner: Membership) -> None:
    workspace = WorkspaceFactory(organization=owner.organization)
    broken = WorkspaceFactory(organization=owner.organization)
    selectors.workspace_folder(broken).rmdir()
    (selectors.workspace_folder(workspace) / "by-a-run").write_bytes(b"x" * 70)
    tasks.sweep()
    workspace.refresh_from_db()
    assert workspace.size_bytes == 70


def test_what_cannot_be_removed_stops_nothing(owner: Membership, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = leftover()
    os.utime(folder, (time.time() - 10**6,) * 2)
    monkeypatch.setattr(sweeping, "UNFINISHED", timedelta(0))

    def fail(**_kwargs: object) -> int:
        raise OSError

    monkeypatch.setattr(sweeping.trees, "remove_tree", fail)
    assert sweeping.sweep() == 1
    assert folder.exists()
