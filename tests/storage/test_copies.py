"""Copies of files and folders within a workspace."""

import os

import pytest

from console.accounts.models import Quota
from storage import catalog, copies, selectors
from storage.errors import FileMissing, NameTaken, TooLarge, UnsafePath, WrongKind
from storage.trees import ENTRY_BYTES

pytestmark = pytest.mark.django_db


@pytest.fixture
def folder(workspace):
    folder = selectors.workspace_folder(workspace)
    (folder / "src").mkdir()
    (folder / "src" / "run.sh").write_text("true")
    (folder / "src" / "run.sh").chmod(0o755)
    (folder / "src" / "link").symlink_to("/etc/passwd")
    os.mkfifo(folder / "src" / "pipe")
    catalog.measure_workspace(workspace=workspace)
    return folder


def test_a_copy_has_only_files_and_folders_and_counts(workspace, folder):
    copy = lambda source, target: copies.copy_entry(workspace=workspace, source=source, target=target)
    assert copy("src", "new/src") == 2  # the link and the pipe are left out
    assert [path.name for path in (folder / "new" / "src").iterdir()] == ["run.sh"]
    assert (folder / "new/src/run.sh").stat().st_mode & 0o777 == 0o755
    assert copy("src/run.sh", "src/run2.sh") == 0
    workspace.refresh_from_db()
    counted = (workspace.size_bytes, workspace.entry_count)
    catalog.measure_workspace(workspace=workspace)
    assert counted == (workspace.size_bytes, workspace.entry_count)
    refused = [
        ("src/link", "x", UnsafePath), ("src/pipe", "x", WrongKind), ("none", "x", FileMissing), ("", "x", WrongKind),
        ("src", "src", NameTaken), ("src", "../x", UnsafePath), ("src", "src/link/x", UnsafePath),
    ]  # fmt: skip
    for source, target, error in refused:
        with pytest.raises(error):
            copy(source, target)
    assert list(catalog.scratch().iterdir()) == []


def test_a_copy_stays_within_the_quota_and_the_limit_of_a_request(workspace, folder, monkeypatch):
    used = selectors.storage_used(workspace.organization)
    Quota.objects.update(max_storage_bytes=used + 2 * ENTRY_BYTES)  # for two entries, without content
    for source in ("src", "src/run.sh"):  # a copy of a file counts as two until it leaves its scratch folder
        with pytest.raises(TooLarge):
            copies.copy_entry(workspace=workspace, source=source, target="copy")
        with pytest.raises(TooLarge):
            catalog.create_workspace(
                organization=workspace.organization, user=None, name="copy", fill=copies.copy_fill(workspace)
            )
    Quota.objects.update(max_storage_bytes=1 << 40)
    monkeypatch.setattr(copies, "MAX_COPY_BYTES", 3)
    with pytest.raises(TooLarge):
        copies.copy_entry(workspace=workspace, source="src", target="copy")
    assert selectors.storage_used(workspace.organization) == used
    assert [path.name for path in folder.iterdir()] == ["src"]
    assert list(catalog.scratch().iterdir()) == []
