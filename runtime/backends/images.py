"""The local backend's images: virtual environments under one root, `<root>/<name>`, that runs are started in.

The one rule: `ready.json` says what an image is. While it names a builder, the image is still being tried, and
that very process alone may start runs in it; a builder that died leaves an image that nobody can use.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from runtime.backends import identity
from runtime.backends.recipes import NAME_PATTERN, Recipe
from runtime.backends.runs import write_json


def is_ready(images_root: Path, name: str) -> bool:
    """Whether runs of the image can start: it was built once to its end, from whatever recipe."""
    if not NAME_PATTERN.match(name):
        return False
    ready = _read(images_root / name)
    return ready is not None and ready.get("builder") in (None, _myself())


def is_current(images_root: Path, recipe: Recipe) -> bool:
    """Whether the image was built from this very recipe, to its end."""
    ready = _read(images_root / recipe.name)
    return ready is not None and ready.get("digest") == recipe.digest and "builder" not in ready


def mark_candidate(folder: Path) -> None:
    """Let this process, and no other, start runs in what it has built: the proof that it works."""
    write_json(folder / "ready.json", {"builder": _myself()})


def mark_ready(folder: Path, digest: str) -> None:
    """Declare a virtual environment an image that can be used."""
    write_json(folder / "ready.json", {"digest": digest})


def _read(folder: Path) -> dict[str, Any] | None:
    try:
        ready = json.loads((folder / "ready.json").read_bytes())
    except (OSError, ValueError):
        return None
    return ready if isinstance(ready, dict) else None


def _myself() -> list[int | None]:
    return [os.getpid(), identity.start_time(os.getpid())]
