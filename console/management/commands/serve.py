"""`manage.py serve NAME`: run one process of the console, in a container or systemd unit.

The command lines come from the list that `manage.py up` uses, so manifests do not repeat them.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandParser

from console.supervision import supervisor


class Command(BaseCommand):
    """Replaces this process by the program (exec), so that the program gets its signals and sets its exit status."""

    help = "Run one program of the console in the foreground: web, worker, beat, watcher ..."
    requires_system_checks = []  # `prepare` runs these checks

    def add_arguments(self, parser: CommandParser) -> None:
        """Add NAME."""
        parser.add_argument("name", choices=[program.name for program in supervisor.programs()])

    def handle(self, *_args: Any, name: str, **_options: Any) -> None:
        """Execute the program. Does not return."""
        program = next(program for program in supervisor.programs() if program.name == name)
        for folder in (settings.VAR_DIR, settings.EMBEDDED.log_dir):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.chdir(settings.BASE_DIR)
        os.execv(sys.executable, [sys.executable, *program.arguments])  # noqa: S606  # no shell is needed
