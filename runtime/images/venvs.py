"""The state of the images for local runs and Slurm, which are virtual environments in `<images_root>/<name>`.

The file `ready.json` in an image has the digest of its recipe and its flavour. While the image is under test, the file
names the builder's process instead, and only that process may start runs. If the builder dies, the image stays unusable
until it is built again.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from runtime import pids
from runtime.files import write_json
from runtime.images.recipes import NAME_PATTERN, Recipe
from runtime.specs import Flavour


def is_ready(images_root: Path, name: str) -> bool:
    """Whether runs of the image can start: it was built completely, from any version of its recipe."""
    if not NAME_PATTERN.match(name):
        return False
    state = _read(images_root / name)
    if state is None:
        return False
    builder = state.get("builder")
    return builder is None or builder == _this_process()


def is_current(images_root: Path, recipe: Recipe, flavour: Flavour) -> bool:
    """Whether the image was built completely from this version of its recipe, in this flavour."""
    state = _read(images_root / recipe.name)
    return state is not None and (state.get("digest"), state.get("flavour")) == (recipe.digest, flavour.value)


def flavour(images_root: Path, name: str) -> Flavour | None:
    """Return the flavour of a ready image; None if it is not ready, or was built before images had flavours."""
    state = _read(images_root / name) if is_ready(images_root, name) else None
    value = (state or {}).get("flavour")
    return Flavour(value) if value in set(Flavour) else None


def identity(images_root: Path, name: str) -> str:
    """Return `sha256:<digest>` of a ready image's recipe, and its flavour; empty if it is not ready."""
    state = (_read(images_root / name) if is_ready(images_root, name) else None) or {}
    return f"sha256:{state['digest']} {state.get('flavour', '')}".strip() if state.get("digest") else ""


def mark_candidate(folder: Path) -> None:
    """Let only this process start runs in the image, so that it can test the image."""
    write_json(folder / "ready.json", {"builder": _this_process()})


def mark_ready(folder: Path, digest: str, flavour: Flavour = Flavour.CPU) -> None:
    """Let every process start runs in this image, which was built from the recipe with this `digest`."""
    write_json(folder / "ready.json", {"digest": digest, "flavour": flavour.value})


def _read(folder: Path) -> dict[str, Any] | None:
    """Return the contents of an image's `ready.json`; None if there is none."""
    try:
        state = json.loads((folder / "ready.json").read_bytes())
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) else None


def _this_process() -> list[int | None]:
    """Return this process's pid and start time, as JSON stores them."""
    return [os.getpid(), pids.start_time(os.getpid())]
