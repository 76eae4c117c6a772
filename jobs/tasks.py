"""Celery shims. A message is a hint that makes things fast; what it would do, the sweep does anyway."""

from __future__ import annotations

from celery import shared_task

from jobs import dispatch


@shared_task
def dispatch_queue() -> None:
    """Start what fits."""
    dispatch.dispatch_queue()


@shared_task
def reconcile() -> None:
    """The sweep: every open job against what the backend says."""
    dispatch.reconcile()


@shared_task
def forget_runs() -> None:
    """Remove what runs left at the backend long ago."""
    dispatch.forget_runs()


@shared_task
def stop_job(job_pk: int) -> None:
    """Stop a job's run."""
    dispatch.stop(job_pk=job_pk)
