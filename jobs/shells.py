"""Shells in the nodes of running jobs: whether one may be opened, and how to connect to it.

A shell is a process of the run's sandbox (`runtime.launcher.shells`). It ends with the run at the latest, and changes
neither the run's deadline nor its price.
"""

from __future__ import annotations

from pathlib import Path

from django.utils.translation import gettext as _

from jobs.clusters import cluster
from jobs.models import Attempt, Job
from jobs.states import JobState
from runtime.backends.base import ShellTunnel
from runtime.errors import BackendUnavailable, RunNotFound


def is_offered(job: Job) -> bool:
    """Return whether the job page offers shells: the organization lets its members open them, and the job runs."""
    return job.organization.shell_enabled and job.state == JobState.RUNNING


def address_of(job: Job, node: int) -> Path | ShellTunnel | None:
    """Return how to connect to a new shell in a node; None if no shell may be opened there now (see `problem`)."""
    try:
        return _address(job, node) if is_offered(job) else None
    except BackendUnavailable:
        return None


def problem(job: Job, node: int) -> str:
    """Return why no shell can be opened in a node, as a sentence; empty if one can."""
    if not job.organization.shell_enabled:
        return _("Your organization does not allow shells. An owner can enable them on the page Organization.")
    if job.state != JobState.RUNNING:
        return _("The job does not run. A shell is a part of a running node and ends with it.")
    try:
        is_running = _address(job, node) is not None
    except BackendUnavailable:
        # Backends raise this also where the cluster answers, but the node does not.
        return _(
            "The node can't be reached now. Try again in a few minutes. If that fails too, ask your administrator."
        )
    return "" if is_running else _("This node does not run, or started before an update of the console.")


def _address(job: Job, node: int) -> Path | ShellTunnel | None:
    """Return how to connect to a new shell in a node; None if it does not run. Raises BackendUnavailable."""
    attempt: Attempt | None = job.attempts.filter(finished_at=None).last()
    if attempt is None:
        return None
    try:
        return cluster(attempt.backend).shell_socket(attempt.run_name, node)
    except RunNotFound:
        return None
