"""Check a cluster, and print a remedy for each check that fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser
from rich.console import Console
from rich.table import Table

from jobs.clusters import cluster, cluster_named, runs_root
from runtime.backends.base import CheckResult
from runtime.backends.kubernetes import backend
from runtime.backends.local import check
from runtime.backends.slurm import check as slurm_check
from runtime.backends.slurm.config import SlurmConfig


class Command(BaseCommand):
    """`manage.py check_cluster [NAME] [--no-smoke]`."""

    help = "Check a cluster of TRAINYARD_CLUSTERS (default: the first). Exits with status 1 if a check fails."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add NAME and --no-smoke."""
        parser.add_argument("name", nargs="?", default="")
        parser.add_argument("--no-smoke", action="store_true", help="do not start a test run")

    def handle(self, *_args: Any, name: str, no_smoke: bool, **_options: Any) -> None:
        """Print the checks. Raises CommandError (exit status 1) if one fails or the cluster is unknown."""
        resolved = cluster_named(name)
        if resolved not in settings.TRAINYARD_CLUSTERS:
            known = ", ".join(settings.TRAINYARD_CLUSTERS)
            raise CommandError(f"TRAINYARD_CLUSTERS names no cluster '{name}'. There are: {known}.")
        screen = Console(file=self.stdout, highlight=False)  # type: ignore[arg-type]  # Rich needs only `write`
        failed = 0
        table = Table(title=f"The cluster {resolved}", title_justify="left")
        for title in ("", "Check", "Result", "What to do"):
            table.add_column(title, overflow="fold")
        with screen.status("Checking ..."):
            for line in _checks(resolved, smoke=not no_smoke):
                failed += not line.ok
                table.add_row("[green]✓[/]" if line.ok else "[red]✗[/]", line.name, line.detail, line.remedy)
        screen.print(table)
        if failed:
            raise CommandError(f"{failed} of the checks failed. Follow the column “What to do”.")


def _checks(name: str, *, smoke: bool) -> Iterator[CheckResult]:
    config, images_root = settings.TRAINYARD_CLUSTERS[name], settings.TRAINYARD_IMAGES_ROOT
    if isinstance(config, SlurmConfig):
        return slurm_check.check(cluster(name), config, root=runs_root(name), images_root=images_root, smoke=smoke)
    if config is not None:
        return backend.check(config, runs_root(name), smoke=smoke)
    return check.check(cluster(name), root=runs_root(name), images_root=images_root, smoke=smoke)
