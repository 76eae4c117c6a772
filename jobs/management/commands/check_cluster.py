"""Check a cluster, and print a remedy for each check that fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jobs.clusters import cluster, resolve_cluster_name, runs_root
from runtime.backends.base import CheckResult
from runtime.backends.kubernetes import backend as kubernetes_backend
from runtime.backends.local import check as local_check
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
        cluster_name = resolve_cluster_name(name)
        if cluster_name not in settings.TRAINYARD_CLUSTERS:
            names = ", ".join(settings.TRAINYARD_CLUSTERS)
            raise CommandError(f"TRAINYARD_CLUSTERS names no cluster '{name}'. There are: {names}.")
        screen = Console(file=self.stdout, highlight=False)  # type: ignore[arg-type]  # Rich needs only `write`
        failures = 0
        table = Table(title=f"The cluster {cluster_name}", title_justify="left")
        for title in ("", "Check", "Result", "What to do"):
            table.add_column(title, overflow="fold")
        with screen.status("Checking ..."):
            for check_result in _checks(cluster_name, smoke=not no_smoke):
                failures += not check_result.ok
                mark = "[green]✓[/]" if check_result.ok else "[red]✗[/]"
                # Escaped, because Rich would take words in brackets for its markup.
                table.add_row(mark, check_result.name, escape(check_result.detail), escape(check_result.remedy))
        screen.print(table)
        if failures:
            raise CommandError(f"{failures} of the checks failed. Follow the column “What to do”.")


def _checks(name: str, *, smoke: bool) -> Iterator[CheckResult]:
    """Yield the results of the cluster's checks. With `smoke`, the last check is a test run.

    The settings have a SlurmConfig for a Slurm cluster, None for the local one, and a ClusterConfig for Kubernetes.
    """
    config, images_root = settings.TRAINYARD_CLUSTERS[name], settings.TRAINYARD_IMAGES_ROOT
    if isinstance(config, SlurmConfig):
        return slurm_check.check(cluster(name), config, root=runs_root(name), images_root=images_root, smoke=smoke)
    if config is not None:
        return kubernetes_backend.check(config, runs_root(name), smoke=smoke)
    return local_check.check(cluster(name), root=runs_root(name), images_root=images_root, smoke=smoke)
