"""`manage.py verify_storage`: compare rows with files, and hash published files again (`storage.verification`)."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from typing import Any

from django.core.management.base import BaseCommand

from storage.verification import Level, verify


class Command(BaseCommand):
    """Checks the storage root. Exits with 1 if there is a problem that was not repaired."""

    help = "Hash published files again, and find rows without files and files without rows. Exits with 1 on a problem."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add --repair and --quick."""
        parser.add_argument(
            "--repair",
            action="store_true",
            help="remove files without a row that garbage collection should have removed, and measure workspaces again",
        )
        parser.add_argument("--quick", action="store_true", help="do not read and hash the published files")

    def handle(self, *args: Any, **options: Any) -> None:
        """Print each finding when it is made, and the totals."""
        counts: Counter[Level] = Counter()
        for finding in verify(with_hashes=not options["quick"], repair=options["repair"]):
            counts[finding.level] += 1
            size = "" if finding.size_bytes is None else f" ({finding.size_bytes} bytes)"
            self.stdout.write(f"{finding.level}: {finding.subject}: {finding.text}{size}")
        self.stdout.write(", ".join(f"{level}: {counts[level]}" for level in Level))
        if counts[Level.PROBLEM]:
            sys.exit(1)
