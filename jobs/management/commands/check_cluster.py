"""Look at a cluster line by line: what is as it should be, and what to do where it is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser
from rich.console import Console
from rich.table import Table

from jobs.backend import cluster, cluster_named, runs_root
from runtime.backends import kubernetes, local_check
from runtime.backends.base import Check


class Command(BaseCommand):
    """`manage.py check_cluster [NAME] [--no-smoke]`."""

    help = "Check a cluster of TRAINYARD_CLUSTERS (the first, without a name): exit status 1 where something is amiss."

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the name, and --no-smoke."""
        parser.add_argument("name", nargs="?", default="")
        parser.add_argument("--no-smoke", action="store_true", help="start no run")

    def handle(self, *_args: Any, name: str, no_smoke: bool, **_options: Any) -> None:
        """Check. Raises CommandError (exit status 1) where a line is amiss, or there is no such cluster."""
        chosen = cluster_named(name)
        if chosen not in settings.TRAINYARD_CLUSTERS:
            known = ", ".join(settings.TRAINYARD_CLUSTERS)
            raise CommandError(f"TRAINYARD_CLUSTERS names no cluster '{name}'. There are: {known}.")
        screen = Console(file=self.stdout, highlight=False)  # type: ignore[arg-type]  # it writes, and that is all
        failed = 0
        table = Table(title=f"The cluster {chosen}", title_justify="left")
        for title in ("", "Looked at", "Found", "What to do"):
            table.add_column(title, overflow="fold")
        with screen.status("Looking ..."):
            for line in _lines(chosen, smoke=not no_smoke):
                failed += not line.ok
                table.add_row("[green]✓[/]" if line.ok else "[red]✗[/]", line.name, line.detail, line.remedy)
        screen.print(table)
        if failed:
            raise CommandError(f"{failed} of these lines need something to be done.")


def _lines(name: str, *, smoke: bool) -> Iterator[Check]:
    config = settings.TRAINYARD_CLUSTERS[name]
    if config is not None:
        return kubernetes.check(config, runs_root(name), smoke=smoke)
    images_root = settings.TRAINYARD_IMAGES_ROOT
    return local_check.check(cluster(name), root=runs_root(name), images_root=images_root, smoke=smoke)
