"""Set-up that several benchmarks share: paths, free ports, and a database of their own."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import django

ROOT = Path(__file__).resolve().parent.parent
_CONFIGURATION = ("DATABASE_URL", "REDIS_URL", "STRIPE_SECRET_KEY", "TRAINYARD_CLUSTERS")
"""Variables that would point a benchmark at a real installation."""


def images_root() -> Path:
    """Return the folder of the built images."""
    return Path(os.environ.get("TRAINYARD_IMAGES_ROOT", ROOT / "var" / "images")).resolve()


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def free_console_port() -> int:
    """Return a free port for a console. The next port, where its payments sandbox listens, is free too."""
    while True:
        port = free_port()
        with socket.socket() as next_probe:
            try:
                next_probe.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):  # not free, or above 65535
                continue
            return port


@contextmanager
def temporary_installation(**variables: str) -> Iterator[Any]:
    """Set up Django with a new embedded PostgreSQL and Redis, and yield its settings.

    `variables` are added to the environment. Modules that import models can be imported only inside the `with` block.
    """
    with tempfile.TemporaryDirectory(prefix="ty-bench-") as folder:
        for name in _CONFIGURATION:
            os.environ.pop(name, None)
        os.environ |= {"TRAINYARD_VAR": folder, "DJANGO_SETTINGS_MODULE": "console.settings", "LOG_LEVEL": "WARNING"}
        os.environ |= variables
        django.setup()
        from django.conf import settings  # noqa: PLC0415 - Django must be set up first
        from django.core.management import call_command  # noqa: PLC0415 - as above

        settings.EMBEDDED.start()
        try:
            call_command("migrate", interactive=False, verbosity=0)
            yield settings
        finally:
            settings.EMBEDDED.stop()
