"""The Celery application: `celery -A console.celery worker`.

The one rule: a message is only a hint that makes things fast. Whatever a task does, a sweep would do without it.
"""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from celery.signals import task_prerun
from django.db import close_old_connections

from console.operations import work  # noqa: F401  # listens to Celery's signals from here on

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "console.settings")

app = Celery("console")
app.config_from_object("django.conf:settings", namespace="CELERY")
# Celery would close the database's connection after every task; a new one costs more than most tasks do.
app.conf.CELERY_DB_REUSE_MAX = 1 << 30
app.autodiscover_tasks(["billing", "storage", "jobs"])
app.autodiscover_tasks(["jobs"], related_name="paid")


@task_prerun.connect
def look_at_connections(sender: Any, **_told: Any) -> None:
    """A connection that is too old, or that a restart of the database has broken, is made anew; as for each request."""
    if not sender.request.is_eager:
        close_old_connections()
