"""`manage.py up`: prepare the installation, serve the console in the foreground, and stop everything on Ctrl-C."""

from __future__ import annotations

import signal
import time
from threading import Event
from types import FrameType
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from console.backup.archive import unfinished_restore
from console.supervision import supervisor
from console.supervision.embedded import ServiceError
from jobs.clusters import cluster

STARTING_SECONDS = 60
"""How long an `up` that is already running may take to become ready. It may have started just now, and then still
migrates the database."""
CHECK_SECONDS = 0.5
"""How often to check that supervisord runs."""


class Command(BaseCommand):
    """Runs the console in the foreground, by `console.supervision.supervisor`."""

    help = "Serve the whole console on this machine until Ctrl-C."

    def handle(self, *args: Any, **options: Any) -> None:
        """Serve until Ctrl-C. If this console is running already, only report where it is."""
        self.screen = Console(highlight=False)
        self.stopping = Event()
        for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signal_number, self._request_stop)
        try:
            with supervisor.up_lock():
                self._serve()
        except supervisor.AlreadyRunning as error:
            self._report_running(error)
        except (supervisor.UpError, ServiceError) as error:
            raise CommandError(str(error)) from error

    def _request_stop(self, signal_number: int, frame: FrameType | None) -> None:
        """Make `_serve` stop everything and return (a signal handler)."""
        self.stopping.set()

    def _serve(self) -> None:
        """Prepare the installation, serve until a signal, and stop everything. Raises UpError."""
        supervisord = supervisor.Supervisord()
        try:
            if message := unfinished_restore():
                raise supervisor.UpError(message)
            self.screen.print("Preparing the database and the static files ...")
            supervisor.end_leftovers()
            supervisor.require_free_ports()
            supervisor.prepare()
            supervisord.start()
            supervisord.wait_until_ready(self.stopping)
            if not self.stopping.is_set():
                self._show_banner()
            while not self.stopping.wait(CHECK_SECONDS):
                if not supervisord.is_running():
                    raise supervisor.UpError(f"supervisord ended. Its log is in {settings.EMBEDDED.log_dir}.")
            self.screen.print("Stopping. Runs in progress continue.")
        finally:
            supervisord.stop()
            for name, config in settings.TRAINYARD_CLUSTERS.items():
                if config is None:  # this machine: only its backend has a warm pool, whose processes would stay
                    cluster(name).stop_prepared_processes()
            settings.EMBEDDED.stop()
        self.screen.print("Stopped.")

    def _show_banner(self) -> None:
        """Print the console's address, its programs, and where their logs are."""
        rows = Table.grid(padding=(0, 2))
        for program in supervisor.programs():
            rows.add_row(program.name, program.purpose)
        rows.add_row("", "")
        rows.add_row("logs", str(settings.EMBEDDED.log_dir))
        if settings.PAYMENTS_SANDBOX:
            rows.add_row("payments", "sandbox: no real money moves")
        title = f"Trainyard is at [bold]{settings.TRAINYARD_URL}[/bold]"
        self.screen.print(Panel(rows, title=title, subtitle="Ctrl-C stops it", expand=False))

    def _report_running(self, error: supervisor.AlreadyRunning) -> None:
        """Wait until the console that already runs is ready, and say where it is. Raises CommandError."""
        deadline = time.monotonic() + STARTING_SECONDS
        while time.monotonic() < deadline:
            if supervisor.is_ready():
                self.screen.print(f"{error} It is at {settings.TRAINYARD_URL}")
                return
            if self.stopping.wait(1):
                return
        raise CommandError(f"{error} But it is not ready. See the logs in {settings.EMBEDDED.log_dir}.")
