"""The customer's choices as a run sees them: which folder lies where, and which script starts.

The one rule: a run may write in its workspace alone; datasets are read-only, each under its own name.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable

from django.utils.translation import gettext_lazy as _

from console.accounts.errors import Text
from runtime.specs import Mount
from storage import files, selectors
from storage.errors import FileMissing, NotAScript, UnsafePath, WrongKind
from storage.models import DatasetVersion, Workspace
from storage.paths import Kind, split


def mounts_for(
    *, workspace: Workspace, dataset_versions: Iterable[DatasetVersion], workspace_target: str, datasets_target: str
) -> tuple[Mount, ...]:
    """The mounts of a run: its workspace, then its datasets in the order given. Load `dataset` with each version."""
    home = Mount(str(selectors.workspace_folder(workspace)), workspace_target, read_only=False)
    datasets = (
        Mount(str(selectors.version_folder(version)), posixpath.join(datasets_target, version.dataset.name))
        for version in dataset_versions
    )
    return (home, *datasets)


def check_script(*, workspace: Workspace, code_path: str) -> str:
    """The script's path in the workspace, normalised. Raises UnsafePath, FileMissing, NotAScript, at `code_path`."""
    try:
        parts = split(code_path)
        kind = files.stat(root=selectors.workspace_folder(workspace), path=code_path).kind
    except UnsafePath as error:
        raise UnsafePath(error.message, fields={"code_path": error.message}) from None
    except (FileMissing, WrongKind):
        raise _missing(_("There is no such file in the workspace. Check its path and its spelling.")) from None
    if kind is Kind.LINK:
        raise UnsafePath(fields={"code_path": UnsafePath.message})
    if kind is not Kind.FILE:
        raise _missing(_("This is no file. Name the script inside the folder, such as folder/train.py."))
    if not parts[-1].endswith(".py"):
        raise NotAScript(fields={"code_path": NotAScript.message})
    return "/".join(parts)


def _missing(sentence: Text) -> FileMissing:
    return FileMissing(sentence, fields={"code_path": sentence})
