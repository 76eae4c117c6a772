"""`manage.py migrate`: Django's command, which several replicas may run at the same time."""

from __future__ import annotations

from typing import Any

from django.core.management.commands.migrate import Command as Migrate

from console.supervision.schema import schema_lock


class Command(Migrate):
    """Django's command under a lock: one replica migrates, and the others then find nothing to do."""

    def handle(self, *args: Any, **options: Any) -> None:
        """Migrate under the lock; `--check` and `--plan` do not need it."""
        if options["check_unapplied"] or options["plan"]:
            super().handle(*args, **options)
            return
        with schema_lock():
            super().handle(*args, **options)
