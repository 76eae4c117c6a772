"""`manage.py restore SRC`: replace this installation's data by a backup. See `console.backup.archive`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError

from console.backup import archive
from console.backup.database import DatabaseToolFailed
from console.supervision.embedded import ServiceError


class Command(BaseCommand):
    """Restores a backup, for which the console must be stopped, or verifies one."""

    help = "Restore the backup in the folder SRC into this installation, which must be stopped and empty."
    requires_system_checks = []  # Django's checks load every page, and this command needs none

    def add_arguments(self, parser: CommandParser) -> None:
        """Add SRC, --force and --verify."""
        parser.add_argument("source", metavar="SRC", type=Path, help="a folder that `manage.py backup` made")
        parser.add_argument("--force", action="store_true", help="replace what is here, and accept another SECRET_KEY")
        parser.add_argument("--verify", action="store_true", help="check every file of the backup, and change nothing")

    def handle(self, *_args: Any, source: Path, force: bool, verify: bool, **_options: Any) -> None:
        """Restore or verify the backup."""
        try:
            report = self.stdout.write
            manifest = archive.verify(source) if verify else archive.restore(source, force=force, report=report)
        except (
            archive.BackupRefused,
            archive.RestoreBroken,
            DatabaseToolFailed,
            DatabaseError,
            ServiceError,
            OSError,
        ) as error:
            raise CommandError(str(error)) from error
        result = "is complete and undamaged" if verify else "is restored, and the books balance"
        self.stdout.write(f"The backup of {manifest['made_at']} (Trainyard {manifest['version']}) {result}.")
