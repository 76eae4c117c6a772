"""What of storage a run sees, and which scripts it may start."""

import os

import pytest

from runtime.specs import Mount
from storage import mounts, selectors
from storage.errors import FileMissing, NotAScript, UnsafePath
from tests.factories.storage import DatasetVersionFactory, WorkspaceFactory

pytestmark = pytest.mark.django_db


@pytest.fixture
def workspace(owner):
    workspace = WorkspaceFactory(organization=owner.organization)
    folder = selectors.workspace_folder(workspace)
    (folder / "code").mkdir()
    (folder / "code" / "train.py").write_text("print()")
    (folder / "code" / "notes.txt").write_text("x")
    (folder / "link.py").symlink_to("code/train.py")
    (folder / "linked").symlink_to("code")
    (folder / "folder.py").mkdir()
    os.mkfifo(folder / "pipe.py")
    (folder.parent / "outside.py").write_text("secret")
    return workspace


def test_a_run_sees_its_workspace_and_read_only_datasets(workspace):
    versions = [DatasetVersionFactory(dataset__name=name) for name in ("mnist", "cifar")]
    result = mounts.mounts_for(
        workspace=workspace, dataset_versions=versions, workspace_target="/workspace", datasets_target="/datasets"
    )
    assert result == (
        Mount(str(selectors.workspace_folder(workspace)), "/workspace", read_only=False),
        Mount(str(selectors.version_folder(versions[0])), "/datasets/mnist", read_only=True),
        Mount(str(selectors.version_folder(versions[1])), "/datasets/cifar", read_only=True),
    )


def test_check_script_normalizes_the_path(workspace):
    for path in ("code/train.py", "./code//train.py", "code/./train.py"):
        assert mounts.check_script(workspace=workspace, code_path=path) == "code/train.py"


def test_check_script_refuses_all_but_python_files_inside(workspace):
    for path, error in (
        ("code/../../outside.py", UnsafePath), ("link.py", UnsafePath), ("linked/train.py", UnsafePath),
        ("folder.py", FileMissing), ("pipe.py", FileMissing), ("code/train.py/below.py", FileMissing),
        ("code/notes.txt", NotAScript),
    ):  # fmt: skip
        with pytest.raises(error) as refused:
            mounts.check_script(workspace=workspace, code_path=path)
        assert (path, type(refused.value), set(refused.value.fields)) == (path, error, {"code_path"})
