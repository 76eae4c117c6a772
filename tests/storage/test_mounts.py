from __future__ import annotations

import os

import pytest

from console.accounts.models import Membership
from runtime.specs import Mount
from storage import mounts, selectors
from storage.errors import FileMissing, NotAScript, StorageError, UnsafePath
from storage.models import Workspace
from tests.factories.storage import DatasetVersionFactory, WorkspaceFactory

pytestmark = pytest.mark.django_db


@pytest.fixture
def workspace(owner: Membership) -> Workspace:
    made: Workspace = WorkspaceFactory(organization=owner.organization)
    folder = selectors.workspace_folder(made)
    (folder / "code").mkdir()
    (folder / "code" / "train.py").write_text("print()")
    (folder / "code" / "notes.txt").write_text("x")
    (folder / "link.py").symlink_to("code/train.py")
    (folder / "linked").symlink_to("code")
    (folder / "folder.py").mkdir()
    os.mkfifo(folder / "pipe.py")
    (folder.parent / "outside.py").write_text("secret")
    return made


def test_mounts(workspace: Workspace) -> None:
    versions = [DatasetVersionFactory(dataset__name=name) for name in ("mnist", "cifar")]
    found = mounts.mounts_for(
        workspace=workspace, dataset_versions=versions, workspace_target="/workspace", datasets_target="/datasets"
    )
    assert found == (
        Mount(str(selectors.workspace_folder(workspace)), "/workspace", read_only=False),
        Mount(str(selectors.version_folder(versions[0])), "/datasets/mnist", read_only=True),
        Mount(str(selectors.version_folder(versions[1])), "/datasets/cifar", read_only=True),
    )


@pytest.mark.parametrize("path", ["code/train.py", "./code//train.py", "code/./train.py"])
def test_a_script(workspace: Workspace, path: str) -> None:
    assert mounts.check_script(workspace=workspace, code_path=path) == "code/train.py"


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("../outside.py", UnsafePath),
        ("code/../../outside.py", UnsafePath),
        ("/etc/passwd", UnsafePath),
        ("code/train.py\0", UnsafePath),
        ("link.py", UnsafePath),
        ("linked/train.py", UnsafePath),
        ("", FileMissing),
        ("code", FileMissing),
        ("folder.py", FileMissing),
        ("pipe.py", FileMissing),
        ("none.py", FileMissing),
        ("code/train.py/below.py", FileMissing),
        ("code/notes.txt", NotAScript),
    ],
)
def test_no_script(workspace: Workspace, path: str, error: type[StorageError]) -> None:
    with pytest.raises(error) as refused:
        mounts.check_script(workspace=workspace, code_path=path)
    assert set(refused.value.fields) == {"code_path"}
    assert type(refused.value) is error
