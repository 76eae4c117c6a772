"""`manage.py build_image NAME`: build one of the local backend's images. The work is in `runtime.backends.images`.

The one rule: it may be called at any time, by several at once, and after any crash; a finished image is left as it is.
"""

from __future__ import annotations

import argparse
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from runtime.backends import images
from runtime.errors import RuntimeFault


class Command(BaseCommand):
    """Builds one image, and says so when there is nothing to do."""

    help = "Build a built-in image of the local backend, unless it is built already."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """NAME, and --force."""
        parser.add_argument("name", help="pytorch, tensorflow or horovod")
        parser.add_argument("--force", action="store_true", help="build it anew even when it is current")

    def handle(self, *args: Any, **options: Any) -> None:
        """Build, telling pip's progress line by line."""
        name: str = options["name"]
        try:
            built = images.build(
                settings.TRAINYARD_IMAGES_ROOT, name, force=options["force"], progress=self.stdout.write
            )
        except RuntimeFault as error:
            raise CommandError(str(error)) from error
        if built:
            self.stdout.write(self.style.SUCCESS(f"The image '{name}' is ready."))
        else:
            self.stdout.write(f"The image '{name}' is ready (cached).")
