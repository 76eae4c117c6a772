"""`manage.py migrate`: Django's own, safe when several replicas start it at once. See `console.schema`."""

from __future__ import annotations

from typing import Any

from django.core.management.commands.migrate import Command as Migrate

from console.schema import taking_turns


class Command(Migrate):
    """Those who come later find nothing left to do."""

    def handle(self, *args: Any, **options: Any) -> None:
        """Migrate when it is our turn. A look (`--check`, `--plan`) waits for nobody."""
        if options["check_unapplied"] or options["plan"]:
            super().handle(*args, **options)
            return
        with taking_turns():
            super().handle(*args, **options)
