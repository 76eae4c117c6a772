"""Whether a spec can run here at all.

The one rule: what can be known before a start is refused before it, with the field at fault and a sentence that says
what to do.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path, PurePosixPath

from runtime.backends import images
from runtime.errors import InvalidSpec
from runtime.specs import NAME_PATTERN, Controller, Image, Mount, RunSpec

_KEY_PATTERN = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
_BUILTIN_SCRIPTS = frozenset({"hello", "smoke"})
_RESERVED = frozenset(
    ["usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "proc", "dev", "sys", "tmp", "opt", "trainyard"]
)


def check_name(name: str) -> None:
    """Raises InvalidSpec for what cannot be a run's name, and so no folder's either."""
    if not NAME_PATTERN.match(name):
        raise InvalidSpec(
            f"'{name}' cannot name a run: use lower-case letters, digits and dashes, 52 at most.", field="name"
        )


def check(spec: RunSpec, images_root: Path) -> RunSpec:
    """The spec with the sources of its mounts resolved. Raises InvalidSpec."""
    check_shape(spec)
    check_image(spec.image, images_root, spec.controller)
    return check_folders(spec)


def check_shape(spec: RunSpec) -> RunSpec:
    """The spec, if it makes sense in itself. Raises InvalidSpec."""
    check_name(spec.name)
    _check_numbers(spec)
    if spec.checkpoint_key and not _KEY_PATTERN.match(spec.checkpoint_key):
        raise InvalidSpec("The checkpoint key may hold letters, digits, '.', '_' and '-'.", field="checkpoint_key")
    for target in (spec.workspace_target, spec.datasets_target, *(mount.target for mount in spec.mounts)):
        _check_target(target)
    return spec


def check_folders(spec: RunSpec) -> RunSpec:
    """The spec with the sources of its mounts resolved, where they can be seen from here. Raises InvalidSpec."""
    resolved = dataclasses.replace(spec, mounts=tuple(_resolve(spec, mount) for mount in spec.mounts))
    _check_script(resolved)
    return resolved


def _check_numbers(spec: RunSpec) -> None:
    least = {
        "nodes": (spec.nodes, 1),
        "workers_per_node": (spec.workers_per_node, 1),
        "deadline_seconds": (spec.deadline_seconds, 1),
        "grace_seconds": (spec.grace_seconds, 0),
        "log_limit_bytes": (spec.log_limit_bytes, 1),
    }
    for field, (value, minimum) in least.items():
        if value < minimum:
            raise InvalidSpec(f"{field} is {value}, and must be at least {minimum}.", field=field)
    resources = spec.resources
    if resources.cpus <= 0 or resources.memory_mib <= 0 or resources.gpus < 0:
        raise InvalidSpec("A node needs some CPU and some memory.", field="resources")


def check_image(image: Image, images_root: Path, controller: Controller = Controller.GLOO) -> None:
    """Raises InvalidSpec for an image that this machine can't run now (so), with what would mend it."""
    name = image.builtin
    if not name or image.reference:
        raise InvalidSpec(
            "This cluster runs built-in images only. Choose one of them, or ask your administrator for Kubernetes.",
            field="image",
        )
    if not images.is_ready(images_root, name):
        raise InvalidSpec(
            f"The image '{name}' is not built on this machine yet. Run 'python manage.py build_image {name}'.",
            field="image",
        )
    if controller is Controller.MPI and not (images_root / name / "bin" / "mpirun").exists():
        raise InvalidSpec(f"The image '{name}' has no mpirun. Choose gloo, or an image with MPI.", field="controller")


def _check_target(target: str) -> None:
    path = PurePosixPath(target)
    if not path.is_absolute() or ".." in path.parts or len(path.parts) < 2 or path.parts[1] in _RESERVED:
        raise InvalidSpec(f"Nothing can be mounted at '{target}'.", field="mounts")


def _resolve(spec: RunSpec, mount: Mount) -> Mount:
    _check_target(mount.target)
    target = PurePosixPath(mount.target)
    if not any(target.is_relative_to(allowed) for allowed in (spec.workspace_target, spec.datasets_target)):
        raise InvalidSpec(f"Nothing can be mounted at '{mount.target}'.", field="mounts")
    source = Path(mount.source)
    try:
        resolved = source.resolve(strict=True)
    except OSError as error:
        raise InvalidSpec(f"The folder for '{mount.target}' does not exist.", field="mounts") from error
    if not source.is_absolute() or not resolved.is_dir():
        raise InvalidSpec(f"What is to be mounted at '{mount.target}' is not a folder.", field="mounts")
    return dataclasses.replace(mount, source=str(resolved))


def _check_script(spec: RunSpec) -> None:
    workspace = next((mount for mount in spec.mounts if mount.target == spec.workspace_target), None)
    if workspace is None:
        raise InvalidSpec("The run has no workspace.", field="mounts")
    if spec.builtin_script:
        if spec.builtin_script not in _BUILTIN_SCRIPTS or spec.script:
            raise InvalidSpec(f"The platform has no script '{spec.builtin_script}'.", field="script")
        return
    script = PurePosixPath(spec.script)
    if not spec.script or script.is_absolute() or ".." in script.parts or "\0" in spec.script:
        raise InvalidSpec("The script must be a path inside the workspace.", field="script")
    root = Path(workspace.source)
    try:
        found = (root / script).resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise InvalidSpec(f"There is no file '{spec.script}' in the workspace.", field="script") from error
    if not found.is_relative_to(root):
        raise InvalidSpec(f"'{spec.script}' is a link that leaves the workspace.", field="script")
    if not found.is_file() or not os.access(found, os.R_OK):
        raise InvalidSpec(f"'{spec.script}' is not a file that can be read.", field="script")
