"""Create a workspace from the source that the user chose: nothing, an example, another workspace, a git repository."""

from __future__ import annotations

from django.utils.translation import gettext_lazy as _

from console.accounts.models import Organization, User
from console.core.errors import InvalidInput, NotFound
from storage import catalog, selectors
from storage.copies import copy_fill
from storage.models import Workspace, WorkspaceImport
from storage.workspace_imports import start_import
from storage.workspace_templates import template_fill


def start_workspace(
    *,
    organization: Organization,
    user: User | None,
    name: str,
    description: str = "",
    template: str = "",
    copy_of: str = "",
    git_url: str = "",
    git_branch: str = "",
    git_secret: str = "",
) -> Workspace | WorkspaceImport:
    """Create a workspace from at most one source: the example `template`, the workspace `copy_of`, or `git_url`.

    A git repository is imported later; the import is returned instead of a workspace. Raises InvalidInput, and
    the errors of `catalog.create_workspace` and `workspace_imports.start_import`.
    """
    if sum(map(bool, (template, copy_of, git_url))) > 1:
        raise InvalidInput(
            fields={"template": _("Choose an example, a workspace to copy or a repository, not several.")}
        )
    fill = template_fill(template) if template else None  # writes the first files (`catalog.Fill`)
    if copy_of:
        try:
            fill = copy_fill(selectors.workspace_named(organization, copy_of))
        except NotFound:
            raise InvalidInput(fields={"copy_of": _("This workspace does not exist. Choose another one.")}) from None
    if git_url:
        return start_import(
            organization=organization, user=user, name=name, description=description,
            git_url=git_url, git_branch=git_branch, git_secret=git_secret,
        )  # fmt: skip
    return catalog.create_workspace(organization=organization, user=user, name=name, description=description, fill=fill)
