"""Package layers: folders of installed packages that a run imports in addition to those of its image.

    <root>/<organization>/<key>/site-packages   the installed packages; exists only when complete
                                request.json    the requirements, the image and the limits of the installation
                                result.json     how the installation ended
                                log.txt         the end of the installation's output
                                runs, inputs    folders of the installation's run; on a cluster, inputs only
    <root>/<organization>/cache                 uv's cache, shared by the organization's installations
                         /lock                  locked during each installation, since the cache serves one at a time
                         /last-start            modified when the last installation started
    <root>/.uv                                  a copy of uv
    <root>/.trash                               folders that are being removed

`<organization>` is the organization's primary key. `<key>` is a digest of everything that the installed files depend
on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from runtime.trash import Trash

SITE_PACKAGES = "site-packages"
"""The folder of the installed packages, in a layer and in the RUN_DIR of its installation."""
CACHE = "cache"
"""The folder of uv's cache, in an organization's folder."""
_DIST_INFO = ".dist-info"
"""The suffix of the folders in which installers store a package's metadata."""
_VERSION = 2
"""A part of each key. Increase it if installations change: packages are then installed again when next ordered."""


@dataclass(frozen=True)
class Layer:
    """The folder of one layer, which may not exist. `root` holds the layers of all organizations."""

    root: Path
    organization_id: str
    key: str

    @property
    def folder(self) -> Path:
        """The layer's folder."""
        return self.root / self.organization_id / self.key

    @property
    def packages(self) -> Path:
        """The folder of the installed packages, which runs mount."""
        return self.folder / SITE_PACKAGES

    @property
    def is_complete(self) -> bool:
        """Whether the packages are installed. Their folder appears by one rename, complete."""
        try:
            # A link does not count, since code of the packages might have made it.
            return stat.S_ISDIR(os.lstat(self.packages).st_mode)
        except OSError:
            return False

    def remove(self) -> None:
        """Remove the layer, if it exists. Call this only if no run uses it."""
        if not self.folder.exists():
            return
        trash = _trash(self.root)
        trash.move_in(self.folder)
        trash.empty()


def move_to_trash(root: Path, organization_id: str) -> None:
    """Remove all layers of an organization below `root`, and its cache, if they exist; `empty_trash` deletes them.

    Call this only if none of them is used or being installed.
    """
    _trash(root).move_in(root / organization_id)


def empty_trash(root: Path) -> None:
    """Delete what was removed below `root`. May take long."""
    _trash(root).empty()


def _trash(root: Path) -> Trash:
    return Trash(root / ".trash")


def installed_versions(image: Path) -> dict[str, str]:
    """Return the versions of an image's packages by canonical name, from its `.dist-info` folders."""
    versions: dict[str, str] = {}
    for folder in image.glob("lib/python*/site-packages/*" + _DIST_INFO):
        name, _, version = folder.name.removesuffix(_DIST_INFO).partition("-")
        versions[canonicalize_name(name)] = version
    return versions


def layer_key(*, image: Path, versions: Mapping[str, str], requirements: Sequence[str]) -> str:
    """Return the key of the layer with these requirements on an image of this machine.

    `image` is the image's folder, and `versions` its `installed_versions`.
    """
    interpreters = sorted(folder.name for folder in image.glob("lib/python*"))
    return _digest(
        image=image.name,
        interpreters=interpreters,
        packages=dict(versions),
        machine=[platform.system(), platform.machine(), *platform.libc_ver()],
        requirements=list(requirements),
    )


def cluster_layer_key(*, cluster_name: str, image_reference: str, python: str, requirements: Sequence[str]) -> str:
    """Return the key of the layer with these requirements on a cluster's image. `python` is its interpreter's path.

    The cluster pulls the image by `image_reference`. The key stays the same if the registry later has another image
    under this reference.
    """
    return _digest(cluster=cluster_name, image=image_reference, python=python, requirements=list(requirements))


def move_installed(layer: Layer, run_folder: Path) -> int | None:
    """Move the packages that a run has installed in its RUN_DIR to the layer; return the bytes that they take on disk.

    Call this after the run has ended, so that nothing changes its files any more. Returns None if a package has
    replaced the folder of packages, or a folder above it, by something else such as a link.
    """
    folder_fds: list[int] = []
    try:
        for name in (run_folder, "run", SITE_PACKAGES):
            parent_fd = folder_fds[-1] if folder_fds else None
            folder_fds.append(
                os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent_fd)
            )
    except OSError:
        return None
    else:
        _run_fd, parent_fd, installed_fd = folder_fds
        # In a pod, another user than this process may own the folder. Then its permissions cannot be changed.
        with contextlib.suppress(PermissionError):
            os.fchmod(installed_fd, 0o755)
        os.rename(SITE_PACKAGES, layer.packages, src_dir_fd=parent_fd)
    finally:
        for folder_fd in folder_fds:
            os.close(folder_fd)
    return size_of(layer.packages)


def size_of(folder: Path) -> int:
    """Return the bytes that a folder's files take up on disk. Follows no links, since hostile code wrote the files."""
    total = 0
    pending_folders = [folder]
    while pending_folders:
        try:
            with os.scandir(pending_folders.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        pending_folders.append(Path(entry.path))
                    else:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512  # the unit of st_blocks
        except OSError:  # the rest of a folder that cannot be read is not counted
            continue
    return total


def _digest(**identity: object) -> str:
    return hashlib.sha256(json.dumps({"version": _VERSION, **identity}, sort_keys=True).encode()).hexdigest()
