"""Compute which folders a run mounts, and check the path of its script.

A run mounts its workspace, to which it can write. It mounts the chosen versions of datasets and models read-only, each
in a folder with its name.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable

from django.utils.translation import gettext_lazy as _

from console.core.errors import Text
from runtime.specs import Mount
from storage import files, selectors
from storage.errors import FileMissing, NotAScript, UnsafePath, WrongKind
from storage.models import DatasetVersion, ModelVersion, Workspace
from storage.paths import Kind, split_path


def mounts_for(
    *,
    workspace: Workspace,
    dataset_versions: Iterable[DatasetVersion],
    model_versions: Iterable[ModelVersion] = (),
    workspace_target: str,
    datasets_target: str,
    models_target: str = "/models",
) -> tuple[Mount, ...]:
    """Return a run's mounts: its workspace, then datasets and models in the given order.

    The targets are paths inside the run. The related `dataset` or `model` of each version should be loaded.
    """
    workspace_mount = Mount(str(selectors.workspace_folder(workspace)), workspace_target, read_only=False)
    datasets = (
        Mount(str(selectors.version_folder(version)), posixpath.join(datasets_target, version.dataset.name))
        for version in dataset_versions
    )
    models = (
        Mount(str(selectors.model_folder(version)), posixpath.join(models_target, version.model.name))
        for version in model_versions
    )
    return (workspace_mount, *datasets, *models)


def check_script(*, workspace: Workspace, code_path: str) -> str:
    """Return the normalized path of a script in a workspace.

    Raises UnsafePath, FileMissing or NotAScript, with a message for the field `code_path`.
    """
    try:
        parts = split_path(code_path)
        kind = files.stat(root=selectors.workspace_folder(workspace), path=code_path).kind
    except UnsafePath as error:
        raise UnsafePath(error.message, fields={"code_path": error.message}) from None
    except (FileMissing, WrongKind):
        raise _missing_error(_("This file does not exist in the workspace. Check the path and spelling.")) from None
    if kind is Kind.LINK:
        raise UnsafePath(fields={"code_path": UnsafePath.message})
    if kind is not Kind.FILE:
        raise _missing_error(_("This is not a file. Enter the path of a script, for example folder/train.py."))
    if not parts[-1].endswith(".py"):
        raise NotAScript(fields={"code_path": NotAScript.message})
    return "/".join(parts)


def _missing_error(sentence: Text) -> FileMissing:
    """Return the error with a sentence for the field `code_path`."""
    return FileMissing(sentence, fields={"code_path": sentence})
