"""The Celery application: `celery -A console.celery worker`.

A lost message only costs time: periodic tasks do the same work later.
"""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from celery.signals import task_prerun
from django.db import close_old_connections

from console.observability import celery_signals  # noqa: F401  # the import connects its receivers

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "console.settings")

app = Celery("console")
app.config_from_object("django.conf:settings", namespace="CELERY")
# By default Celery closes the database connection after every task. A new connection takes longer than most tasks, so
# it may serve a practically unlimited number of tasks; `close_unusable_connections` closes a broken one.
app.conf.CELERY_DB_REUSE_MAX = 1 << 30
app.autodiscover_tasks(["billing", "storage", "jobs", "console.notifications"])
# The modules of these tasks have other names than `tasks`. `AccountsConfig.ready` imports two more, `accounts.audit`
# and `accounts.openid`.
app.autodiscover_tasks(["jobs"], related_name="dispatch")
app.autodiscover_tasks(["jobs"], related_name="checkout")
app.autodiscover_tasks(["jobs"], related_name="results")
app.autodiscover_tasks(["jobs"], related_name="notebook_endings")
app.autodiscover_tasks(["jobs.sweeps"], related_name="progress")
app.autodiscover_tasks(["console.accounts"], related_name="emails")
app.autodiscover_tasks(["console.accounts"], related_name="invitations")
app.autodiscover_tasks(["console.accounts"], related_name="sessions")


@task_prerun.connect
def close_unusable_connections(sender: Any, **_kwargs: Any) -> None:
    """Close database connections that are too old or broken, as Django does before each request."""
    if not sender.request.is_eager:  # an eager task runs inside the caller's transaction
        close_old_connections()
