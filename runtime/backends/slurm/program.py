"""Copy the program of the compute nodes to shared storage, so that they need nothing of the console installed."""

from __future__ import annotations

import compileall
import contextlib
import hashlib
import shutil
import uuid
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[2]
_PARTS = ("*.py", "launcher/**/*.py", "backends/*.py", "backends/supervision/*.py", "backends/slurm/*.py")
"""What `runtime.backends.slurm.node` imports, and a little more."""
FOLDER = ".program"


def installed(root: Path) -> Path:
    """Return the folder that contains the package `runtime`, below `root`. Copy it there first if it is missing.

    Each version has a folder of its own, so that running jobs keep theirs across an upgrade.
    """
    files = sorted(path for part in _PARTS for path in _PACKAGE.glob(part))
    digest = hashlib.sha256()
    for path in files:
        digest.update(str(path.relative_to(_PACKAGE)).encode() + b"\0" + path.read_bytes())
    folder = root / FOLDER / digest.hexdigest()[:16]
    if folder.is_dir():
        return folder
    copy = root / FOLDER / f".{uuid.uuid4().hex}"
    for path in files:
        target = copy / "runtime" / path.relative_to(_PACKAGE)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    # Compiled here because a sandbox cannot write the bytecode.
    compileall.compile_dir(copy, quiet=2)
    with contextlib.suppress(OSError):  # another process was faster
        copy.rename(folder)
    shutil.rmtree(copy, ignore_errors=True)
    return folder
