"""`manage.py prepare`: check the settings and migrate the database, before the processes of a new version start."""

from __future__ import annotations

from typing import Any

from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError, CommandParser

from console import deployment
from console.backup.archive import unfinished_restore
from console.supervision.schema import schema_lock


class Command(BaseCommand):
    """Prepares a deployment. Safe to repeat, and to run on several replicas at once."""

    help = "Check the deployment's settings, bring the schema up to date, fill an empty catalogue. Safe to repeat."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add --trial."""
        parser.add_argument("--trial", action="store_true", help="allow what suits a trial: play money, no mail")

    def handle(self, *_args: Any, trial: bool, verbosity: int, **_options: Any) -> None:
        """Check the settings, migrate, and fill an empty catalogue with images, node specs, prices and products."""
        findings = [finding for finding in deployment.findings() if not (trial and finding.is_fine_for_trial)]
        for finding in findings:
            self.stderr.write(f"{finding.setting}: {finding.problem} {finding.remedy}")
        if findings:
            raise CommandError(
                f"{len(findings)} settings are not ready for a deployment (docs/operator-guide/deployment.md)."
            )
        if message := unfinished_restore():
            raise CommandError(message)
        with schema_lock():  # for both commands; `migrate` takes it too, and a thread that holds it may take it again
            call_command("migrate", interactive=False, verbosity=verbosity)
            call_command("seed_catalogue", verbosity=verbosity)
