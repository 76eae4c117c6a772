"""`manage.py publish_dataset`: publish an archive as a public dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from console.core.errors import CustomerError
from storage import sharing


class Command(BaseCommand):
    """Publishes an archive as the next version of one of the installation's own public datasets."""

    help = "Publish a .tar, .tar.gz or .zip archive as the next version of a dataset that every organization can read."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add NAME, ARCHIVE and --description."""
        parser.add_argument("name")
        parser.add_argument("archive", type=Path)
        parser.add_argument("--description", default="", help="shown to customers; only for a new dataset")

    def handle(self, *_args: Any, name: str, archive: Path, description: str, **_options: Any) -> None:
        """Publish. Raises CommandError with the reason if that fails."""
        try:
            with archive.open("rb") as stream:
                version = sharing.publish_public(name=name, stream=stream, description=description)
        except OSError as error:
            raise CommandError(str(error)) from error
        except CustomerError as error:
            reasons = [str(sentence) for sentence in error.fields.values()] or [str(error.message)]
            raise CommandError(" ".join(reasons)) from error
        self.stdout.write(f"Published {version}: {version.file_count} files, {version.size_bytes} bytes.")
