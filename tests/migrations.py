"""Databases with the present schema, made once for many tests: to migrate an empty one takes 15 seconds of a core."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from django.apps import apps

from console.supervision.embedded import Embedded

ROOT = Path(__file__).resolve().parent.parent
MIGRATE = """
from django.conf import settings
from django.core.management import call_command
settings.EMBEDDED.start(database=True, broker=False)
call_command("migrate", verbosity=0)
"""


def digest() -> str:
    """Return a text that changes with any migration."""
    folders = [Path(app.path, "migrations") for app in apps.get_app_configs()]
    digest = hashlib.sha256()
    for path in sorted(path for folder in folders for path in folder.glob("*.py")):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def copy_migrated_database(var: Path) -> None:
    """Give an installation that was never started the database that its first start would create."""
    source = ROOT / "var" / f"test-database-{digest()}"
    source.parent.mkdir(exist_ok=True)
    with (source.parent / "test-database.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not source.exists():
            for older in source.parent.glob("test-database-*"):
                shutil.rmtree(older)
            _migrate_empty_database().rename(source)
    target = Embedded(var).data_dir
    partial = target.with_name(f"{target.name}.new")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial, symlinks=True)
    partial.rename(target)  # so that a test process that is killed leaves no half of a database


def _migrate_empty_database() -> Path:
    """Migrate an empty PostgreSQL and stop it. Return its data folder."""
    var = ROOT / "var" / "test-database-new"
    embedded = Embedded(var)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRAINYARD_", "DJANGO_"))}
    try:
        subprocess.run(
            [sys.executable, "manage.py", "shell", "-v", "0", "-c", MIGRATE],
            cwd=ROOT, env=environment | {"TRAINYARD_VAR": str(var)}, check=True,
        )  # fmt: skip
    finally:
        embedded.stop()
    return embedded.data_dir
