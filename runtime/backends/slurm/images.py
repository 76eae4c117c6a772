"""The unpacked images of customers on shared storage, as the console keeps them; `image_import` fills them.

An image belongs to one organization, one repository and one digest. So an organization gets only images that the
registry has let it pull. Rarely used images are removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Collection
from pathlib import Path

from runtime.backends.slurm.config import SlurmConfig
from runtime.backends.slurm.image_import import IMAGES_FOLDER, USED_FILE, WORK_FOLDER, ImagePlan
from runtime.files import FileLock
from runtime.specs import RunSpec
from runtime.trash import Trash

KEEP_IMAGES = 10
"""How many unpacked images an organization keeps, so that its share of the disk is bounded. Teams use a few at a time.
"""
KEEP_SECONDS = 14 * 86400.0
"""How long an image is kept after its last use. Two weeks span the pauses in a project that goes on."""
_LOCK = "lock"
"""The file in IMAGES_FOLDER whose lock keeps an image from being removed while its use is noted. Imports lock another
file, in the image's own folder."""
_SUBMISSION_SECONDS = 600.0
"""How long an image is safe after its use was noted, since the run that uses it may not be recorded yet. A submission
takes seconds."""
_STALE_WORK_SECONDS = 3600.0
"""How long after an import's time limit its working folder is kept. The import itself removes it within minutes, unless
its machine failed."""


def image_folder(root: Path, spec: RunSpec) -> Path:
    """Return the folder of a run's own image. `root` holds the runs.

    Without a digest the folder belongs to this run alone, since the tag may name another image at the next run.
    """
    repository = spec.image.reference.partition("@")[0]
    version = spec.image.digest or f"run {spec.name}"
    # Parts of hashes, which are still unique and keep paths short.
    organization = _hash(spec.labels.get("organization", ""))[:16]
    return root / IMAGES_FOLDER / organization / _hash(json.dumps([repository, version]))[:32]


def image_plan(root: Path, spec: RunSpec, config: SlurmConfig) -> ImagePlan:
    """Return the plan by which node 0 imports a run's own image, and note that the image is used."""
    folder = image_folder(root, spec)
    parent = root / IMAGES_FOLDER
    parent.mkdir(parents=True, exist_ok=True)
    with FileLock(parent / _LOCK):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / USED_FILE).touch(mode=0o600)
    host, pull_secret = spec.image.reference.partition("/")[0], spec.pull_secret
    return {
        "folder": str(folder),
        "reference": spec.image.reference,
        "digest": spec.image.digest,
        "host": host,
        "username": pull_secret.username if pull_secret is not None else "",
        "password": pull_secret.password if pull_secret is not None else "",
        "limit_mib": config.image_mib,
        "seconds": config.import_seconds,
        "bin": config.containers_bin,
        "is_insecure": host in config.insecure_registries,
    }


def move_unused_to_trash(root: Path, trash: Trash, used_folders: Collection[Path], import_seconds: float) -> bool:
    """Move unused images to the trash, and working folders of interrupted imports; return whether any were moved.

    Each organization keeps the KEEP_IMAGES images that it used last, each for KEEP_SECONDS after its last use. The
    images in `used_folders`, which live runs use, always stay. `import_seconds` is the time limit of an import.
    """
    parent = root / IMAGES_FOLDER
    if not parent.exists():
        return False
    stale_seconds = import_seconds + _STALE_WORK_SECONDS
    with FileLock(parent / _LOCK):
        now, unused = time.time(), []
        for folder in _folders(parent):
            if folder.name == WORK_FOLDER:
                unused += [work for work in _folders(folder) if now - _modified_at(work) > stale_seconds]
            else:
                unused += _unused_images(folder, used_folders, now)
        for unused_folder in unused:
            trash.move_in(unused_folder)
    return bool(unused)


def _unused_images(organization_folder: Path, used_folders: Collection[Path], now: float) -> list[Path]:
    """Return the folders of an organization's unused images."""
    used_at = {folder: _modified_at(folder / USED_FILE) for folder in _folders(organization_folder)}
    newest_first = sorted(used_at, key=lambda folder: used_at[folder], reverse=True)
    return [
        folder
        for position, folder in enumerate(newest_first)
        if (position >= KEEP_IMAGES or now - used_at[folder] > KEEP_SECONDS)
        and now - used_at[folder] > _SUBMISSION_SECONDS
        and folder not in used_folders
    ]


def _folders(parent: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError), os.scandir(parent) as entries:
        return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []


def _modified_at(path: Path) -> float:
    """Return when a file was modified (Unix seconds); 0 if it is missing."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
