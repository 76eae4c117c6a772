"""Fill an empty catalogue with images, node specs, prices and products."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand

from jobs import catalogue


class Command(BaseCommand):
    """`manage.py seed_catalogue`."""

    help = "Fill an empty catalogue with images, node specs, prices and products."

    def handle(self, *_args: Any, verbosity: int, **_options: Any) -> None:
        """Fill the catalogue if it is empty."""
        was_empty = catalogue.seed()
        if verbosity:
            self.stdout.write("Created the starter catalogue." if was_empty else "The catalogue is not empty.")
