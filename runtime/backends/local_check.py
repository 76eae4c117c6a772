"""Whether this machine can serve runs, line by line, each with what to do where it cannot.

The one rule: a line never raises. What cannot be looked at is a line that says so.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from runtime.backends import images, recipes, sandbox, smoke_run
from runtime.backends.base import Backend, Check
from runtime.errors import RuntimeFault

LEAST_FREE_BYTES = 5 * 2**30
SMOKE_SECONDS = 60.0
_SMOKE_MEMORY_MIB = 256


def check(backend: Backend, *, root: Path, images_root: Path, smoke: bool = True) -> Iterator[Check]:
    """Look at the local cluster; `smoke` starts a run of two nodes at the end."""
    yield _sandbox()
    yield from _isolation(backend)
    yield _machine(backend)
    yield _gpus(backend)
    yield _folder(root)
    built = [name for name in recipes.names() if images.is_ready(images_root, name)]
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
        # Runs go on without; who lets strangers run code here must know.
        yield Check("isolation", ok=True, detail=gap, remedy="See 'What isolation there is' in SECURITY.md.")


def _machine(backend: Backend) -> Check:
    try:
        (machine,) = backend.capacity().machines
    except RuntimeFault as fault:
        return Check("machine", ok=False, detail=str(fault), remedy="See the folder of runs, and who may write there.")
    total, free = machine.total, machine.free
    told = f"{free.cpus:g} of {total.cpus:g} cores and {free.memory_mib} of {total.memory_mib} MiB are free."
    enough = total.cpus > 0 and total.memory_mib > 0
    return Check("machine", ok=enough, detail=told, remedy="" if enough else "Raise LOCAL_CPUS and LOCAL_MEMORY_MIB.")


def _gpus(backend: Backend) -> Check:
    try:
        (machine,) = backend.capacity().machines
    except RuntimeFault:
        return Check("GPUs", ok=True, detail="They can't be counted now.")
    if machine.total.gpus:
        return Check("GPUs", ok=True, detail=f"{machine.total.gpus} × {machine.total.gpu_type}")
    told = "There are none, or nvidia-smi is not on the PATH." if not shutil.which("nvidia-smi") else "There are none."
    return Check("GPUs", ok=True, detail=told)


def _folder(root: Path) -> Check:
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=root, prefix=".check-"):
            free = shutil.disk_usage(root).free
    except OSError as error:
        told = f"{root} can't be written: {error.strerror}"
        return Check("folder of runs", ok=False, detail=told, remedy=f"Give it to the user {os.getuid()}.")
    told, enough = f"{root}: {free >> 30} GiB are free.", free >= LEAST_FREE_BYTES
    return Check("folder of runs", ok=enough, detail=told, remedy="" if enough else "Make room, or set LOCAL_DISK_MIB.")


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
