"""Package layers: folders of installed packages that a run imports besides those of its image.

    <root>/<organization>/<key>/site-packages   the layer, complete
                                request.json    what is to be installed
                                result.json     how the installation ended
                                log.txt         its output
                                runs, inputs    the installation's own sandbox; on a cluster, inputs only
    <root>/<organization>/cache                 uv's cache, shared by the organization's installations
                         /lock                  locked during each of them: the cache serves one at a time
    <root>/.uv                                  a copy of uv
    <root>/.trash                               folders that are being removed

`organization` is its primary key. A key is a digest of everything that the installed files depend on.
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
CACHE = "cache"
_DIST_INFO = ".dist-info"


_VERSION = 2
"""Part of each key. Another one makes the next order with the same packages install them anew."""


@dataclass(frozen=True)
class Layer:
    """The folder of one layer, which may not exist. `root` holds those of all organizations."""

    root: Path
    organization: str
    key: str

    @property
    def folder(self) -> Path:
        """The layer's folder."""
        return self.root / self.organization / self.key

    @property
    def packages(self) -> Path:
        """The installed packages: mounted into runs."""
        return self.folder / SITE_PACKAGES

    @property
    def is_complete(self) -> bool:
        """Whether the packages are installed. They appear by one rename."""
        try:
            return stat.S_ISDIR(os.lstat(self.packages).st_mode)
        except OSError:
            return False

    def remove(self) -> None:
        """Remove the layer, if it exists. No run may use it."""
        if not self.folder.exists():
            return
        trash = Trash(self.root / ".trash")
        trash.move_in(self.folder)
        trash.empty()


def installed_versions(image: Path) -> dict[str, str]:
    """Return the versions of an image's packages by canonical name, from its `.dist-info` folders."""
    versions: dict[str, str] = {}
    for folder in image.glob("lib/python*/site-packages/*" + _DIST_INFO):
        name, _, version = folder.name.removesuffix(_DIST_INFO).partition("-")
        versions[canonicalize_name(name)] = version
    return versions


def layer_key(*, image: Path, versions: Mapping[str, str], requirements: Sequence[str]) -> str:
    """Return the key of the layer with these requirements on this image (its folder and `installed_versions`)."""
    interpreters = sorted(folder.name for folder in image.glob("lib/python*"))
    return _digest(
        image=image.name,
        interpreters=interpreters,
        packages=dict(versions),
        machine=[platform.system(), platform.machine(), *platform.libc_ver()],
        requirements=list(requirements),
    )


def cluster_layer_key(*, cluster: str, image: str, python: str, requirements: Sequence[str]) -> str:
    """Return the key of the layer with these requirements on a cluster's image, as the cluster pulls it.

    `python` is the path of the image's interpreter. A reference without a digest may come to mean another image.
    """
    return _digest(cluster=cluster, image=image, python=python, requirements=list(requirements))


def adopt(layer: Layer, run_folder: Path) -> int | None:
    """Move what a run has installed in its RUN_DIR to its place; return the bytes that it takes on the disk.

    The run has ended, so nothing changes its files any more. Returns None if a package has put something else, such as
    a link, where the packages or a folder above them should be.
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
        # Pods may run as another user than this process, which then owns their files.
        with contextlib.suppress(PermissionError):
            os.fchmod(installed_fd, 0o755)
        os.rename(SITE_PACKAGES, layer.packages, src_dir_fd=parent_fd)
    finally:
        for folder_fd in folder_fds:
            os.close(folder_fd)
    return size_of(layer.packages)


def size_of(folder: Path) -> int:
    """Return the bytes that a folder's files take on the disk. Follows no links: hostile code wrote the files."""
    total = 0
    pending = [folder]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(Path(entry.path))
                    else:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
        except OSError:
            continue
    return total


def _digest(**identity: object) -> str:
    return hashlib.sha256(json.dumps({"version": _VERSION, **identity}, sort_keys=True).encode()).hexdigest()
