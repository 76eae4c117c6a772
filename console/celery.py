"""The Celery application: `celery -A console.celery worker`.

The one rule: a message is only a hint that makes things fast. Whatever a task does, a sweep would do without it.
"""

from __future__ import annotations

import os

from celery import Celery

from console.operations import work  # noqa: F401  # listens to Celery's signals from here on

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "console.settings")

app = Celery("console")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["billing", "storage", "jobs"])
app.autodiscover_tasks(["jobs"], related_name="paid")
