"""`manage.py migrate`: Django's own, safe when several replicas start it at once. See `console.supervision.schema`."""

from __future__ import annotations

from typing import Any

from django.core.management.commands.migrate import Command as Migrate

from console.supervision.schema import schema_lock


class Command(Migrate):
    """Those who come later find nothing left to do."""

    def handle(self, *args: Any, **options: Any) -> None:
        """Migrate under the lock; `--check` and `--plan` do not need it."""
        if options["check_unapplied"] or options["plan"]:
            super().handle(*args, **options)
            return
        with schema_lock():
            super().handle(*args, **options)
