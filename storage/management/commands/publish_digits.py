"""`manage.py publish_digits`: publish the handwritten digits that the examples train on as a public dataset."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError, CommandParser

from storage import sharing

DATASET = "mnist-digits"
"""The name under which scripts find the dataset in every installation."""


class Command(BaseCommand):
    """Publishes the digits once. If they are published already, it changes nothing."""

    help = "Publish the handwritten digits that the examples train on, as the public dataset mnist-digits."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add --archive."""
        parser.add_argument(
            "--archive", type=Path, help="an archive that examples/make_digits.py wrote; by default, write a new one"
        )

    def handle(self, *_args: Any, archive: Path | None, **_options: Any) -> None:
        """Publish. Raises CommandError if the archive cannot be written or published."""
        if sharing.has_public(DATASET):
            self.stdout.write(f"{DATASET} is already published.")
            return
        with tempfile.TemporaryDirectory() as folder:
            if archive is None:
                archive = Path(folder) / "digits.tar.gz"
                _write_digits(archive)
            call_command(
                "publish_dataset",
                DATASET,
                str(archive),
                description="Handwritten digits, MNIST layout.",
                stdout=self.stdout,
            )


def _write_digits(archive: Path) -> None:
    """Write the archive with the example's script. Raises CommandError if scikit-learn is missing."""
    script = settings.BASE_DIR / "examples" / "make_digits.py"
    finished = subprocess.run(
        [sys.executable, str(script), str(archive)], check=False, stderr=subprocess.PIPE, text=True
    )
    if finished.returncode:
        reason = finished.stderr.strip().rpartition("\n")[2]
        raise CommandError(f"{script.name} failed: {reason}. Install requirements/demo.txt, which has scikit-learn.")
