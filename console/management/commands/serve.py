"""`manage.py serve NAME`: become one process of the console, for a container or a unit of its own.

The one rule: the very programs that `manage.py up` runs, from the same list, so that no manifest repeats their words.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandParser

from console import supervision


class Command(BaseCommand):
    """Replaces itself by the program, which so gets the signals and gives the exit status."""

    help = "Run one program of the console in the foreground: web, live, worker, beat, watcher ..."
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        """NAME."""
        parser.add_argument("name", choices=[program.name for program in supervision.programs()])

    def handle(self, *_args: Any, name: str, **_options: Any) -> None:
        """Never returns."""
        program = next(program for program in supervision.programs() if program.name == name)
        for folder in (settings.VAR_DIR, settings.EMBEDDED.log_dir):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.chdir(settings.BASE_DIR)
        os.execv(sys.executable, [sys.executable, *program.arguments])  # noqa: S606  # no shell is meant
