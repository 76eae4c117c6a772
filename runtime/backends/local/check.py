"""Check whether this machine can serve runs. Each result says how to fix what is wrong; no check raises."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from runtime.backends import sandbox, smoke_run
from runtime.backends.base import Backend, Check
from runtime.errors import RuntimeFault
from runtime.images import recipes, venvs

MIN_FREE_BYTES = 5 * 2**30
"""Free disk space below which the check fails; images and runs soon need more."""
SMOKE_SECONDS = 60.0
"""How long the test run may take. It takes seconds on an idle machine; the rest is for a busy one."""
_SMOKE_MEMORY_MIB = 256
"""Memory of each node of the test run, which imports no framework."""


def check(backend: Backend, *, root: Path, images_root: Path, smoke: bool = True) -> Iterator[Check]:
    """Yield the results of all checks. With `smoke` the last one is a test run of two nodes, if an image is built."""
    yield _sandbox()
    yield from _isolation(backend)
    yield _machine(backend)
    yield _gpus(backend)
    yield _folder(root)
    built = [name for name in recipes.names() if venvs.is_ready(images_root, name)]
    yield _images(built)
    if smoke and built:
        yield _smoke(backend, built[0])


def _sandbox() -> Check:
    try:
        return Check("sandbox", ok=True, detail=f"bubblewrap at {sandbox.find_bubblewrap()}")
    except RuntimeFault as fault:
        return Check("sandbox", ok=False, detail=str(fault), remedy="apt-get install bubblewrap")


def _isolation(backend: Backend) -> Iterator[Check]:
    gaps = backend.isolation_gaps()
    if not gaps:
        yield Check("isolation", ok=True, detail="Runs have their own network, and the kernel holds what they may use.")
    for gap in gaps:
        # Runs work without this isolation, so the check passes; the administrator must know of it.
        yield Check("isolation", ok=True, detail=gap, remedy="See 'What isolation there is' in SECURITY.md.")


def _machine(backend: Backend) -> Check:
    try:
        (machine,) = backend.capacity().machines
    except RuntimeFault as fault:
        return Check("machine", ok=False, detail=str(fault), remedy="See the folder of runs, and who may write there.")
    total, free = machine.total, machine.free
    detail = f"{free.cpus:g} of {total.cpus:g} cores and {free.memory_mib} of {total.memory_mib} MiB are free."
    enough = total.cpus > 0 and total.memory_mib > 0
    return Check("machine", ok=enough, detail=detail, remedy="" if enough else "Raise LOCAL_CPUS and LOCAL_MEMORY_MIB.")


def _gpus(backend: Backend) -> Check:
    try:
        (machine,) = backend.capacity().machines
    except RuntimeFault:
        return Check("GPUs", ok=True, detail="They can't be counted now.")
    if machine.total.gpus:
        return Check("GPUs", ok=True, detail=f"{machine.total.gpus} × {machine.total.gpu_type}")
    detail = (
        "There are none, or nvidia-smi is not on the PATH." if not shutil.which("nvidia-smi") else "There are none."
    )
    return Check("GPUs", ok=True, detail=detail)


def _folder(root: Path) -> Check:
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=root, prefix=".check-"):
            free = shutil.disk_usage(root).free
    except OSError as error:
        detail = f"{root} can't be written: {error.strerror}"
        return Check("folder of runs", ok=False, detail=detail, remedy=f"Give it to the user {os.getuid()}.")
    detail, enough = f"{root}: {free >> 30} GiB are free.", free >= MIN_FREE_BYTES
    return Check(
        "folder of runs", ok=enough, detail=detail, remedy="" if enough else "Make room, or set LOCAL_DISK_MIB."
    )


def _images(built: list[str]) -> Check:
    if built:
        return Check("images", ok=True, detail=", ".join(built))
    return Check("images", ok=False, detail="None is built.", remedy="manage.py build_image pytorch")


def _smoke(backend: Backend, image: str) -> Check:
    try:
        with tempfile.TemporaryDirectory(prefix="trainyard-check-") as workspace:
            return smoke_run.check(
                backend,
                smoke_run.new_name(),
                image,
                workspace=Path(workspace),
                memory_mib=_SMOKE_MEMORY_MIB,
                seconds=SMOKE_SECONDS,
            )
    except (RuntimeFault, OSError) as fault:
        remedy = "Free two nodes of a quarter core, and try again."
        return Check("smoke run", ok=False, detail=str(fault), remedy=remedy)
