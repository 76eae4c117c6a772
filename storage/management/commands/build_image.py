"""`manage.py build_image NAME`: build some of the local backend's images. The work is in `runtime.backends.builder`.

The one rule: it may be called at any time, by several at once, and after any crash; a finished image is left as it is.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, OutputWrapper
from rich.console import Console

from runtime.backends import builder
from runtime.errors import RuntimeFault


class Command(BaseCommand):
    """Builds images, and says so when there is nothing to do."""

    help = "Build built-in images of the local backend, unless they are built already; without a name: list them."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """NAME ..., and --force."""
        parser.add_argument("names", nargs="*", metavar="NAME", help="such as pytorch, horovod, tensorflow")
        parser.add_argument("--force", action="store_true", help="build them anew even when they are current")

    def handle(self, *args: Any, **options: Any) -> None:
        """Build one after another, telling what happens."""
        names: list[str] = options["names"]
        if not names:
            self._list()
        for name in names:
            with ExitStack() as stack:
                progress = _Progress(self.stdout, stack)
                try:
                    built = builder.build(
                        settings.TRAINYARD_IMAGES_ROOT, name, force=options["force"], progress=progress
                    )
                except RuntimeFault as error:
                    raise CommandError(str(error)) from error
            if built:
                self.stdout.write(self.style.SUCCESS(f"The image '{name}' is ready ({progress.seconds:.0f} s)."))
            else:
                self.stdout.write(f"The image '{name}' is ready (cached).")

    def _list(self) -> None:
        for offer in builder.offers(settings.TRAINYARD_IMAGES_ROOT):
            state = "ready" if offer.current else "ready, from an older recipe" if offer.ready else "not built"
            self.stdout.write(f"{offer.name:20} {offer.unbuildable or state}")


class _Progress:
    """Steps as lines; on a terminal the programs' own output goes by in one moving line, else line by line."""

    def __init__(self, stdout: OutputWrapper, stack: ExitStack) -> None:
        self._stdout = stdout
        self._begun = time.monotonic()
        self._step = ""
        self._status = stack.enter_context(Console().status("")) if stdout.isatty() else None

    @property
    def seconds(self) -> float:
        """How long the build has taken."""
        return time.monotonic() - self._begun

    def step(self, text: str) -> None:
        """See `builder.Progress`."""
        self._step = text
        self._stdout.write(f"[{self.seconds:4.0f} s] {text}")

    def output(self, line: str) -> None:
        """See `builder.Progress`."""
        if self._status is None:
            self._stdout.write(f"    {line}")
        elif line.strip():
            self._status.update(line.strip()[:100], spinner="dots")
