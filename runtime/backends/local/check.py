"""Check whether this machine can serve runs. Each failed result says how to fix the fault; no check raises."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from runtime.backends import sandbox, smoke_run
from runtime.backends.base import Backend, CheckResult
from runtime.backends.checks import run_guarded
from runtime.errors import RuntimeFault
from runtime.images import recipes, venvs

MIN_FREE_BYTES = 5 * 2**30
"""Free disk space below which the check fails: a built image alone takes up some GiB, and runs need more."""
SMOKE_SECONDS = 60.0
"""How long the smoke run may take. On an idle machine it takes seconds; a minute leaves room for a busy machine."""
_SMOKE_MEMORY_MIB = 256
"""Memory of each node of the smoke run. It is enough for an interpreter that imports no framework."""


def check(backend: Backend, *, root: Path, images_root: Path, smoke: bool = True) -> Iterator[CheckResult]:
    """Yield the results of all checks. If `smoke` is set and an image is built, the last one is a run of two nodes."""
    yield from run_guarded("sandbox", _check_sandbox)
    yield from run_guarded("isolation", lambda: _check_isolation(backend))
    yield from run_guarded("machine", lambda: _check_machine(backend))
    yield from run_guarded("GPUs", lambda: _check_gpus(backend))
    yield from run_guarded("folder of runs", lambda: _check_folder(root))
    built = [name for name in recipes.recipe_names() if venvs.is_ready(images_root, name)]
    yield _check_images(built)
    if smoke and built:
        yield from run_guarded("smoke run", lambda: _check_smoke_run(backend, built[0]))


def _check_sandbox() -> CheckResult:
    try:
        return CheckResult("sandbox", ok=True, detail=f"bubblewrap at {sandbox.find_bubblewrap()}")
    except RuntimeFault as fault:
        return CheckResult("sandbox", ok=False, detail=str(fault), remedy="apt-get install bubblewrap")


def _check_isolation(backend: Backend) -> Iterator[CheckResult]:
    gaps = backend.isolation_gaps()
    if not gaps:
        detail = "Each run has its own network, and the kernel enforces its limits."
        yield CheckResult("isolation", ok=True, detail=detail)
    for gap in gaps:
        # Runs work without this isolation, so the check passes; its detail informs the administrator.
        yield CheckResult("isolation", ok=True, detail=gap, remedy="See 'Isolation by installation' in SECURITY.md.")


def _check_machine(backend: Backend) -> CheckResult:
    try:
        (machine,) = backend.capacity().machines
    except RuntimeFault as fault:
        return CheckResult(
            "machine", ok=False, detail=str(fault), remedy="Check the permissions of the folder of runs."
        )
    total, free = machine.total, machine.free
    detail = f"{free.cpus:g} of {total.cpus:g} cores and {free.memory_mib} of {total.memory_mib} MiB are free."
    has_resources = total.cpus > 0 and total.memory_mib > 0
    remedy = "" if has_resources else "Raise LOCAL_CPUS and LOCAL_MEMORY_MIB."
    return CheckResult("machine", ok=has_resources, detail=detail, remedy=remedy)


def _check_gpus(backend: Backend) -> CheckResult:
    try:
        (machine,) = backend.capacity().machines
    except RuntimeFault:  # `_check_machine` has reported it
        return CheckResult("GPUs", ok=True, detail="The GPUs cannot be counted now.")
    if machine.total.gpus:
        return CheckResult("GPUs", ok=True, detail=f"{machine.total.gpus} × {machine.total.gpu_type}")
    detail = (
        "There are none, or nvidia-smi is not on the PATH." if not shutil.which("nvidia-smi") else "There are none."
    )
    return CheckResult("GPUs", ok=True, detail=detail)


def _check_folder(root: Path) -> CheckResult:
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=root, prefix=".check-"):
            free_bytes = shutil.disk_usage(root).free
    except OSError as error:
        detail = f"{root} cannot be written: {error.strerror}"
        return CheckResult("folder of runs", ok=False, detail=detail, remedy=f"Give it to the user {os.getuid()}.")
    detail = f"{root}: {free_bytes >> 30} GiB are free."
    has_room = free_bytes >= MIN_FREE_BYTES
    remedy = "" if has_room else f"Free disk space: at least {MIN_FREE_BYTES >> 30} GiB are needed."
    return CheckResult("folder of runs", ok=has_room, detail=detail, remedy=remedy)


def _check_images(built: list[str]) -> CheckResult:
    if built:
        return CheckResult("images", ok=True, detail=", ".join(built))
    return CheckResult("images", ok=False, detail="No image is built.", remedy="manage.py build_image pytorch")


def _check_smoke_run(backend: Backend, image: str) -> CheckResult:
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
        return CheckResult("smoke run", ok=False, detail=str(fault), remedy=remedy)
