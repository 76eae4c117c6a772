"""The program of the compute nodes. It lies on shared storage, since these nodes have no console installed."""

from __future__ import annotations

import compileall
import hashlib
import shutil
import sys
import uuid
from pathlib import Path

from runtime.specs import Image

_PACKAGE = Path(__file__).resolve().parents[2]  # the folder of the package `runtime`
_PATTERNS = ("*.py", "launcher/**/*.py", "backends/*.py", "backends/supervision/*.py", "backends/slurm/*.py")
"""Patterns of the files to copy. They must include every module that `runtime.backends.slurm.node` imports."""
FOLDER = ".program"
"""The folder of all copies, below the root folder of the runs."""


def interpreter(images_root: Path, image: Image) -> Path:
    """Return the Python that runs the program on compute nodes, for a run in this image.

    For a customer's own image it is the console's own Python. Compute nodes have it at the same path, because the
    virtual environments of the built-in images link to it.
    """
    return images_root / image.builtin / "bin" / "python" if image.builtin else Path(sys.executable).resolve()


def install_node_program(root: Path) -> Path:
    """Copy the needed part of the package `runtime` to a folder below `root`, unless it is there; return that folder.

    The folder's name is a hash of the files. So each version has its own folder, and running jobs keep their version
    across an upgrade.
    """
    files = sorted(path for pattern in _PATTERNS for path in _PACKAGE.glob(pattern))
    digest = hashlib.sha256()
    for path in files:
        digest.update(str(path.relative_to(_PACKAGE)).encode() + b"\0" + path.read_bytes())
    folder = root / FOLDER / digest.hexdigest()[:16]
    if folder.is_dir():
        return folder
    copy = root / FOLDER / f".{uuid.uuid4().hex}"
    try:
        for path in files:
            target = copy / "runtime" / path.relative_to(_PACKAGE)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        # Compiled here, because the launcher in a sandbox runs modules of this copy and cannot write bytecode there.
        compileall.compile_dir(copy, quiet=2)
        copy.rename(folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process has made the same copy first
            raise
    finally:
        shutil.rmtree(copy, ignore_errors=True)
    return folder
