"""`manage.py up`: set up what is missing, serve the console in the foreground, and stop it all on Ctrl-C."""

from __future__ import annotations

import signal
from threading import Event
from types import FrameType
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from console import supervision
from console.backup.archive import unfinished_restore
from console.services import ServiceError
from jobs.backend import cluster

STARTING_SECONDS = 60
LOOK_SECONDS = 0.5


class Command(BaseCommand):
    """See `console.supervision`."""

    help = "Serve the whole console on this machine until Ctrl-C."
    requires_system_checks = []

    def handle(self, *args: Any, **options: Any) -> None:
        """Serve. Exits 0 after Ctrl-C, and when a healthy console is up already."""
        self.screen = Console(highlight=False)
        self.stopping = Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._ask_to_stop)
        try:
            with supervision.only_one():
                self._serve()
        except supervision.AlreadyUp as running:
            self._greet_running(running)
        except (supervision.UpError, ServiceError) as error:
            raise CommandError(str(error)) from error

    def _ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        self.stopping.set()

    def _serve(self) -> None:
        supervised = supervision.Supervised()
        try:
            if sentence := unfinished_restore():
                raise supervision.UpError(sentence)
            self.screen.print("Preparing the database and the static files ...")
            supervision.clear_the_way()
            supervision.prepare()
            supervised.start()
            supervised.wait_until_ready(self.stopping)
            if not self.stopping.is_set():
                self._show_banner()
            while not self.stopping.wait(LOOK_SECONDS):
                if not supervised.runs():
                    raise supervision.UpError(f"supervisord ended. Its log is in {settings.EMBEDDED.log_dir}.")
            self.screen.print("Stopping. Runs in progress go on.")
        finally:
            supervised.stop()
            for name, config in settings.TRAINYARD_CLUSTERS.items():
                if config is None:  # only this machine keeps anything ready
                    cluster(name).retire()
            settings.EMBEDDED.stop()
        self.screen.print("Stopped.")

    def _show_banner(self) -> None:
        rows = Table.grid(padding=(0, 2))
        for program in supervision.programs():
            rows.add_row(program.name, program.purpose)
        rows.add_row("", "")
        rows.add_row("logs", str(settings.EMBEDDED.log_dir))
        if settings.PAYMENTS_SANDBOX:
            rows.add_row("payments", "sandbox: no real money moves")
        title = f"Trainyard is at [bold]{settings.TRAINYARD_URL}[/bold]"
        self.screen.print(Panel(rows, title=title, subtitle="Ctrl-C stops it", expand=False))

    def _greet_running(self, running: supervision.AlreadyUp) -> None:
        for _ in range(STARTING_SECONDS):
            if supervision.is_ready():
                self.screen.print(f"{running} It is at {settings.TRAINYARD_URL}")
                return
            if self.stopping.wait(1):
                return
        raise CommandError(f"{running} But it is not ready. See the logs in {settings.EMBEDDED.log_dir}.")
