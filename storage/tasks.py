"""Celery tasks of storage. Services do the work."""

from __future__ import annotations

from contextlib import suppress

from celery import shared_task

from console.core.enqueue import send
from console.core.errors import CustomerError
from storage import direct_uploads, garbage_collection, imports, uploads, workspace_imports
from storage.models import Upload


@shared_task(name="storage.tasks.sweep")  # the name since version 0.1, whose beat may still send messages
def collect_garbage() -> None:
    """Remove unneeded files and measure workspaces."""
    garbage_collection.collect()


@shared_task
def finish_upload(pk: int) -> None:
    """Finish a complete upload whose process may have died before the upload was finished."""
    upload = Upload.objects.select_related("organization", "created_by").filter(pk=pk).first()
    if upload:
        # `finish` has stored the error, or `uploads.collect` tries again.
        with suppress(CustomerError), uploads.language_of(upload):
            uploads.finish(upload)


@shared_task
def resume_imports() -> None:
    """Continue imports and fetches of direct uploads whose process died."""
    for pk in imports.stale_imports():
        send(imports.import_dataset, pk)
    for pk in workspace_imports.stale_imports():
        send(workspace_imports.import_workspace, pk)
    if direct_uploads.uploads_to_fetch().exists():
        send(direct_uploads.fetch_uploads)
