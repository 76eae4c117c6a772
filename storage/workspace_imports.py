"""Import a git repository as a new workspace, in a worker.

One transaction writes the workspace's row and ends the import. So wherever a worker dies, either the workspace exists
and the import has ended, or the import is repeated. Garbage collection removes what a dead worker left in the scratch
folder.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from datetime import timedelta

from celery import shared_task
from django.conf import settings
from django.db import transaction
from django.db.models import Q, QuerySet
from django.utils import timezone, translation
from django.utils.translation import gettext as _

from console.accounts.models import Organization, User
from console.accounts.services import record_audit_event
from console.core.enqueue import send, send_on_commit
from console.core.errors import CustomerError, InvalidInput, NotFound
from storage import catalog, imports, selectors
from storage.errors import NameTaken
from storage.git_import import git_fill
from storage.models import Allocation, Workspace, WorkspaceImport

MAX_OPEN = 3
"""How many imports of one organization may wait or run. Only one runs at a time, so others would wait long."""
MAX_ATTEMPTS = 3
"""After this many attempts during which the worker died, the import fails: the repository may be the cause."""
STALE_AFTER = timedelta(minutes=3)
"""An open import that has not been updated for this long may have lost its process. Its task is then sent again. If
the process still works, the new task ends at once, because `import_lock` is held."""

log = logging.getLogger(__name__)


def start_import(
    *,
    organization: Organization,
    user: User | None,
    name: str,
    description: str = "",
    git_url: str,
    git_branch: str = "",
    git_secret: str = "",
) -> WorkspaceImport:
    """Start an import of a git repository as the workspace `name`. Raises InvalidInput, NameTaken.

    `git_secret` is the name of the secret with an access token, or empty.
    """
    catalog.validate_texts(name, description)
    # Called here only for its checks. The worker calls `git_fill` again, and uses the function that it returns.
    git_fill(organization=organization, url=git_url, branch=git_branch, secret=git_secret)
    with transaction.atomic():
        # Concurrent calls wait here, so they cannot use one name twice or exceed MAX_OPEN together.
        Organization.objects.select_for_update(no_key=True).get(pk=organization.pk)
        others = open_imports().filter(organization=organization)
        if selectors.workspaces_for(organization).filter(name=name).exists() or others.filter(name=name).exists():
            raise NameTaken
        if others.count() >= MAX_OPEN:
            message = _("Your organization has %(count)d imports in progress. Wait for one to end.")
            raise InvalidInput(message % {"count": MAX_OPEN})
        row = WorkspaceImport.objects.create(
            organization=organization,
            name=name,
            description=description,
            git_url=git_url,
            git_branch=git_branch,
            git_secret=git_secret,
            created_by=user,
        )
        record_audit_event(organization=organization, actor=user, action="workspace.import_started", target=name)
        send_on_commit(import_workspace, row.pk)
    return row


def open_imports() -> QuerySet[WorkspaceImport]:
    """Return the imports that have not ended."""
    return WorkspaceImport.objects.filter(ended_at=None)


def imports_for(organization: Organization) -> QuerySet[WorkspaceImport]:
    """Return the organization's imports."""
    return WorkspaceImport.objects.filter(organization=organization).select_related("workspace")


def import_with_id(organization: Organization, pk: int) -> WorkspaceImport:
    """Return the organization's import with this id. Raises NotFound."""
    row = imports_for(organization).filter(pk=pk).first() if pk <= selectors.MAX_KEY else None
    if row is None:
        raise NotFound
    return row


def shown_imports(organization: Organization) -> list[WorkspaceImport]:
    """Return up to 20 imports for the list of workspaces, newest first: open, or failed in the last day."""
    yesterday = timezone.now() - timedelta(days=1)
    # An ended import without a workspace has failed, with an error, or its workspace was deleted later.
    is_shown = Q(ended_at=None) | (Q(ended_at__gt=yesterday) & ~Q(error=""))
    return list(imports_for(organization).filter(is_shown, workspace=None).order_by("-pk")[:20])


def stale_imports() -> list[int]:
    """Return the ids of the open imports on which no process seems to work."""
    return list(open_imports().filter(updated_at__lt=timezone.now() - STALE_AFTER).values_list("pk", flat=True))


@shared_task
def import_workspace(pk: int) -> None:
    """Run an import, or repeat it after its worker died; then send the task of the import that has waited longest."""
    row = open_imports().select_related("organization", "created_by").filter(pk=pk).first()
    if row is None or not run_import(row):
        return
    next_id = open_imports().order_by("updated_at").values_list("pk", flat=True).first()
    if next_id:
        send(import_workspace, next_id)


def run_import(row: WorkspaceImport) -> bool:
    """Run an import, unless it has ended. Return False if another process is importing."""
    with imports.import_lock(imports.GIT_LOCK_FILE) as is_locked:
        # An error is stored as a sentence, in the language of the person who started the import.
        language = row.created_by.language if row.created_by else ""
        with translation.override(language or settings.LANGUAGE_CODE):
            if is_locked and _begin_attempt(row):
                _create_workspace(row)
    return is_locked


def _begin_attempt(row: WorkspaceImport) -> bool:
    """Count an attempt. Return False if the import has ended, or if it ends here after MAX_ATTEMPTS."""
    with transaction.atomic():
        current = open_imports().select_for_update().filter(pk=row.pk).first()
        if current is None:
            return False
        if current.attempts >= MAX_ATTEMPTS:
            _end(row, error=_("The import was interrupted too often. Use a smaller repository, or upload its files."))
            return False
        _update(row, attempts=current.attempts + 1)
    return True


def _create_workspace(row: WorkspaceImport) -> None:
    """Create the workspace with the repository's files, or store why that failed."""
    try:
        fill = git_fill(
            organization=row.organization, url=row.git_url, branch=row.git_branch, secret=row.git_secret,
            report=lambda received: _update(row, received_bytes=received),
        )  # fmt: skip
        catalog.create_workspace(
            organization=row.organization, user=row.created_by, name=row.name, description=row.description,
            fill=fill, on_created=lambda workspace: _end(row, workspace=workspace), allocation_key=row.allocation_key,
        )  # fmt: skip
    except InvalidInput as error:
        _end_failed(row, " ".join(map(str, error.fields.values())) or str(error.message))
    except CustomerError as error:
        _end_failed(row, str(error.message))
    except Exception:
        log.exception("The import %s failed", row.pk)
        _end_failed(row, _("The import failed. Try again, and contact the administrator if it fails again."))


def _end_failed(row: WorkspaceImport, error: str) -> None:
    """Store that an import failed, unless its organization was deleted meanwhile."""
    with suppress(NotFound):
        _end(row, error=error)


def _end(row: WorkspaceImport, *, workspace: Workspace | None = None, error: str = "") -> None:
    """Store that an import has ended, with its workspace or error. Raises NotFound if it is no longer open."""
    _update(row, ended_at=timezone.now(), workspace=workspace, error=error[:500])  # the length of the column
    Allocation.objects.filter(key=row.allocation_key).delete()  # an attempt left it if its worker died


def _update(row: WorkspaceImport, **values: object) -> None:
    """Store values of an open import. Raises NotFound if it has ended or was deleted with its organization."""
    if not open_imports().filter(pk=row.pk).update(**values, updated_at=timezone.now()):
        raise NotFound
