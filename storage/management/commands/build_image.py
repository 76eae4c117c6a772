"""`manage.py build_image NAME`: build images of the local backend (`runtime.images.builder`).

Safe to repeat, to run several times at once, and after a crash. Finished images stay unless `--force` is given.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, OutputWrapper
from rich.console import Console

from runtime.errors import RuntimeFault
from runtime.images import builder
from runtime.specs import Flavour


class Command(BaseCommand):
    """Builds images; without a name, lists them."""

    help = "Build built-in images of the local backend that are not built yet. Without a name, list the images."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add NAME ..., --flavour and --force."""
        parser.add_argument("names", nargs="*", metavar="NAME", help="for example pytorch, horovod, tensorflow")
        parser.add_argument(
            "--flavour",
            choices=("auto", *Flavour),
            default=settings.TRAINYARD_IMAGE_FLAVOUR,
            help="cpu or cuda; auto (the default) chooses cuda if the machine has an NVIDIA GPU",
        )
        parser.add_argument("--force", action="store_true", help="rebuild current images too")

    def handle(self, *args: Any, **options: Any) -> None:
        """Build the images one after another and print the progress."""
        names: list[str] = options["names"]
        flavour = None if options["flavour"] == "auto" else Flavour(options["flavour"])
        if not names:
            self._list(flavour)
        for name in names:
            with ExitStack() as stack:
                progress = _Progress(self.stdout, stack)
                try:
                    built = builder.build(
                        settings.TRAINYARD_IMAGES_ROOT,
                        name,
                        flavour=flavour,
                        force=options["force"],
                        progress=progress,
                    )
                except RuntimeFault as error:
                    raise CommandError(str(error)) from error
            if built:
                self.stdout.write(self.style.SUCCESS(f"The image '{name}' is ready ({progress.seconds:.0f} s)."))
            else:
                self.stdout.write(f"The image '{name}' is ready (cached).")

    def _list(self, flavour: Flavour | None) -> None:
        for image in builder.list_images(settings.TRAINYARD_IMAGES_ROOT, flavour=flavour):
            if image.unbuildable:  # the reason why
                state = image.unbuildable
            elif image.is_ready:
                state = "ready" if image.is_current else "ready, but out of date"
            else:
                state = "not built"
            flavour_text = f" ({image.flavour})" if image.flavour and not image.unbuildable else ""
            self.stdout.write(f"{image.name:20} {state}{flavour_text}")


class _Progress:
    """Prints the steps of a build as lines. On a terminal, the output of programs is shown in one status line."""

    def __init__(self, stdout: OutputWrapper, stack: ExitStack) -> None:
        self._stdout = stdout
        self._started_at = time.monotonic()
        self._status = stack.enter_context(Console().status("")) if stdout.isatty() else None

    @property
    def seconds(self) -> float:
        """Return how long the build has taken."""
        return time.monotonic() - self._started_at

    def step(self, text: str) -> None:
        """See `builder.Progress`."""
        self._stdout.write(f"[{self.seconds:4.0f} s] {text}")

    def output(self, line: str) -> None:
        """See `builder.Progress`."""
        if self._status is None:
            self._stdout.write(f"    {line}")
        elif line.strip():
            self._status.update(line.strip()[:100])
