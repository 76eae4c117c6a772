"""Celery shims. A message is a hint that makes things fast; what it would do, the sweep does anyway."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import Task, shared_task

from console.accounts.hints import send
from jobs import backend, clusters, dispatch


@shared_task
def dispatch_queue(cluster: str = "") -> None:
    """Start what fits: on a cluster, or on each of several, which do not wait for each other."""
    _on_each(dispatch_queue, dispatch.dispatch_queue, cluster, backend.cluster_names())


@shared_task
def reconcile(cluster: str = "") -> None:
    """The sweep: every open job against what its cluster says."""
    _on_each(reconcile, dispatch.reconcile, cluster, clusters.to_sweep())


@shared_task
def forget_runs() -> None:
    """Remove what runs left at the backend long ago."""
    dispatch.forget_runs()


@shared_task
def stop_job(job_pk: int) -> None:
    """Stop a job's run."""
    dispatch.stop(job_pk=job_pk)


def _on_each(task: Task[Any, Any], work: Callable[[str], None], cluster: str, names: list[str]) -> None:
    if cluster or len(names) == 1:
        work(cluster or names[0])
        return
    for name in names:
        send(task, name)
