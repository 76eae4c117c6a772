"""`manage.py check_deployment`: whether these settings are fit to serve customers from several machines."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError

from console import deployment


class Command(BaseCommand):
    """Looks at settings alone: it needs neither database nor network."""

    help = "Say which settings must be set before this is a deployment, and how. Exits 1 when there are any."
    requires_system_checks = []

    def handle(self, *_args: Any, **_options: Any) -> None:
        """List what is missing."""
        found = deployment.findings()
        for finding in found:
            self.stdout.write(f"{finding.setting}: {finding.problem} {finding.remedy}")
        if found:
            raise CommandError(f"{len(found)} settings are not ready for a deployment (docs/deployment.md).")
        self.stdout.write("The settings are ready for a deployment.")
