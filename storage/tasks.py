"""Celery shims. The one rule: three lines each; the work is done by services."""

from __future__ import annotations

from celery import shared_task

from storage import catalog, sweeping
from storage.models import Workspace


@shared_task(name="storage.tasks.sweep")
def sweep() -> None:
    """Remove the bytes that nothing names any more, and measure workspaces."""
    sweeping.sweep()


@shared_task(name="storage.tasks.measure_workspace")
def measure_workspace(workspace_pk: int) -> None:
    """Count a workspace's bytes after a run wrote to it."""
    catalog.measure_workspace(workspace=Workspace.objects.get(pk=workspace_pk))
