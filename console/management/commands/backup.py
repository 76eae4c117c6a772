"""`manage.py backup DEST`: back up this installation's database and files. See `console.backup.archive`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError

from console.backup import archive
from console.backup.database import DatabaseToolFailed
from console.supervision.embedded import ServiceError


class Command(BaseCommand):
    """Makes a backup. The console may keep running."""

    help = "Back up database and files into the new folder DEST, whether the console runs or not."
    requires_system_checks = []  # Django's checks load every page, and this command needs none

    def add_arguments(self, parser: CommandParser) -> None:
        """Add DEST."""
        parser.add_argument("destination", metavar="DEST", type=Path, help="a folder that does not exist yet")

    def handle(self, *_args: Any, destination: Path, **_options: Any) -> None:
        """Make the backup, and print its size and the entries that were left out."""
        try:
            manifest = archive.create(destination, report=self.stdout.write)
        except (archive.BackupRefused, DatabaseToolFailed, DatabaseError, ServiceError, OSError) as error:
            raise CommandError(str(error)) from error
        for name, part in manifest["parts"].items():
            for path in part.get("left_out", ()):
                self.stderr.write(f"{name}: left out: {path}")
            if part.get("missing", 0) > len(part.get("left_out", ())):  # `trees.MAX_LISTED` cut the list
                self.stderr.write(f"{name}: left out in all: {part['missing']}")
        size = sum(part["bytes"] for part in manifest["parts"].values())
        files = sum(part.get("files", 0) for part in manifest["parts"].values())
        self.stdout.write(f"{destination}: {files} files and the database, {size / 1024**2:.1f} MiB.")
        self.stdout.write(
            "The backup contains secret_key: protect it like the key." if archive.KEY_FILE in manifest["parts"] else
            "The backup does not contain SECRET_KEY: store the key separately."
        )  # fmt: skip
