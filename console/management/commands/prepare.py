"""`manage.py prepare`: what must be done once before a new version serves, wherever its processes run."""

from __future__ import annotations

from typing import Any

from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError, CommandParser

from console import deployment
from console.backup.archive import unfinished_restore
from console.schema import taking_turns


class Command(BaseCommand):
    """Any replica may run it, any number of them at once, any number of times."""

    help = "Check the deployment's settings, bring the schema up to date, fill an empty catalogue. Safe to repeat."
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        """--trial."""
        parser.add_argument("--trial", action="store_true", help="allow what suits a trial: play money, no mail")

    def handle(self, *_args: Any, trial: bool, verbosity: int, **_options: Any) -> None:
        """Refuse settings that nobody should serve with, then migrate and seed."""
        wrong = [finding for finding in deployment.findings() if not (trial and finding.fine_for_a_trial)]
        for finding in wrong:
            self.stderr.write(f"{finding.setting}: {finding.problem} {finding.remedy}")
        if wrong:
            raise CommandError(f"{len(wrong)} settings are not ready for a deployment (docs/deployment.md).")
        if sentence := unfinished_restore():
            raise CommandError(sentence)
        with taking_turns():
            call_command("migrate", interactive=False, verbosity=verbosity)
            call_command("seed_catalogue", verbosity=verbosity)
