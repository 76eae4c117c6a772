"""Celery shims. The one rule: three lines each; the work is done by services."""

from __future__ import annotations

from celery import shared_task

from storage import sweeping


@shared_task(name="storage.tasks.sweep")
def sweep() -> None:
    """Remove the bytes that nothing names any more, and measure workspaces."""
    sweeping.sweep()
