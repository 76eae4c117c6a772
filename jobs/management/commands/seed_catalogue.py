"""Fill an empty catalogue with images, node specs, prices and products."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand

from jobs import catalogue


class Command(BaseCommand):
    """`manage.py seed_catalogue`."""

    help = "Fill an empty catalogue with something to sell; a catalogue that has anything is left alone."

    def handle(self, *_args: Any, verbosity: int, **_options: Any) -> None:
        """Seed."""
        made = catalogue.seed()
        if verbosity:
            self.stdout.write("The starter catalogue is made." if made else "There is a catalogue already.")
