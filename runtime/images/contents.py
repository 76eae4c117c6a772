"""Read the versions of Python, CUDA and packages in a built image, from the metadata that pip and uv write."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from runtime.images import venvs

_SUFFIX = ".dist-info"
"""The suffix of the folders in which installers store a package's metadata."""
_CUDA_RUNTIMES = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime-cu13")
"""Packages with the same version as CUDA. An image has one of them, depending on CUDA's major version."""
_FRAMEWORKS = {
    "pytorch": ("torch",),
    "horovod": ("horovod",),
    "tensorflow": ("tensorflow", "tensorflow-cpu"),
}
"""The packages of each framework, by the values of `runtime.specs.Framework`."""


@dataclass(frozen=True)
class Contents:
    """The versions in an image. `frameworks` and `packages` are by name; `cuda` is empty in the CPU flavour."""

    python: str
    cuda: str
    frameworks: dict[str, str]
    packages: dict[str, str]


def read_contents(images_root: Path, name: str) -> Contents | None:
    """Return the contents of a ready image; None if it is not ready."""
    folder = images_root / name
    if not venvs.is_ready(images_root, name):
        return None
    try:
        return _read(folder, (folder / "ready.json").stat().st_mtime_ns)
    except OSError:  # the image is being rebuilt
        return None


@functools.lru_cache(maxsize=32)  # more than there are images
def _read(folder: Path, _built_at: int) -> Contents:
    """Read the contents of an image. `_built_at` is the time of its build (ns), so that a new build is read again."""
    versions = {}
    for path in folder.glob(f"lib/python*/site-packages/*{_SUFFIX}"):
        name, _, version = path.name.removesuffix(_SUFFIX).rpartition("-")
        versions[name.replace("_", "-").lower()] = version
    packages = dict(sorted(versions.items()))
    frameworks = {}
    for framework, names in _FRAMEWORKS.items():
        for name in names:
            if name in packages:
                frameworks[framework] = packages[name]
    cuda = next((packages[name] for name in _CUDA_RUNTIMES if name in packages), "")
    return Contents(_python_version(folder), cuda, frameworks, packages)


def _python_version(folder: Path) -> str:
    """Return the version in `pyvenv.cfg`: venv calls it `version`, uv `version_info`."""
    for line in (folder / "pyvenv.cfg").read_text().splitlines():
        name, _, value = line.partition("=")
        if name.strip() in {"version", "version_info"}:
            return value.strip()
    return ""
