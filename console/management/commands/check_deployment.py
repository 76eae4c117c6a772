"""`manage.py check_deployment`: check whether the settings suit a deployment on several machines."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError

from console import deployment


class Command(BaseCommand):
    """Checks the settings of a deployment. It needs neither database nor network."""

    help = "List the settings that a deployment must change, and how. Exits 1 if there are any."
    requires_system_checks = []  # Django's checks load every page, and this command needs none

    def handle(self, *_args: Any, **_options: Any) -> None:
        """Print every problem; exit 1 if there are any."""
        findings = deployment.findings()
        for finding in findings:
            self.stdout.write(f"{finding.setting}: {finding.problem} {finding.remedy}")
        if findings:
            raise CommandError(
                f"{len(findings)} settings are not ready for a deployment (docs/operator-guide/deployment.md)."
            )
        self.stdout.write("The settings are ready for a deployment.")
