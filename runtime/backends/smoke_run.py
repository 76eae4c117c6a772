"""Test a cluster: submit a run of two nodes, wait for its end and delete it."""

from __future__ import annotations

import contextlib
import time
import uuid
from pathlib import Path

from runtime.backends.base import Backend, CheckResult
from runtime.errors import BackendUnavailable
from runtime.specs import Framework, Image, Mount, Outcome, Resources, RunPhase, RunSpec, RunStatus

_CHECK_NAME = "smoke run"
_MAX_LAST_LINES = 3
"""How many of the last lines of a failed run's output the result shows: a traceback ends with the exception."""


def new_name() -> str:
    """Return a name that no other run has."""
    return f"check-{uuid.uuid4().hex[:12]}"


def check(backend: Backend, name: str, image: str, *, workspace: Path, memory_mib: int, seconds: float) -> CheckResult:
    """Run the platform's script `hello` on two nodes with the built-in image `image`; return the result.

    Waits for the run's end for at most `seconds`, and deletes the run. `workspace` is any folder: each run needs
    one. Raises RuntimeFault.
    """
    spec = RunSpec(
        name=name,
        framework=Framework.PYTORCH,
        image=Image(builtin=image),
        nodes=2,
        workers_per_node=1,
        # Small, so that it fits a busy machine. `hello` writes almost nothing, so any small disk limit will do.
        resources=Resources(cpus=0.25, memory_mib=memory_mib, disk_mib=memory_mib // 2),
        script="",
        builtin_script="hello",
        deadline_seconds=max(1, int(seconds)),
        grace_seconds=1,
        mounts=(Mount(str(workspace), "/workspace", read_only=True),),
    )
    started_at = time.monotonic()
    try:
        backend.submit(spec)
        status = await_end(backend, name, seconds)
        return _result(status, backend, seconds, elapsed_seconds=time.monotonic() - started_at)
    finally:
        with contextlib.suppress(BackendUnavailable):  # an error here would hide the result
            backend.delete(name)


def await_end(backend: Backend, name: str, seconds: float) -> RunStatus:
    """Return the run's status at its end, or after `seconds`. Raises RunNotFound, BackendUnavailable."""
    status = backend.describe(name)
    for _names in backend.changes(stop_after_seconds=seconds):
        # Even if `changes` does not name the run: it may have ended before the watch began.
        status = backend.describe(name)
        if status.phase is RunPhase.ENDED:
            break
    return status


def _result(status: RunStatus, backend: Backend, seconds: float, *, elapsed_seconds: float) -> CheckResult:
    """Return the result for a run with this status, for whose end the check has waited for at most `seconds`."""
    if status.outcome is Outcome.COMPLETED:
        detail = f"Two nodes met and finished {elapsed_seconds:.1f} s after submission."
        return CheckResult(_CHECK_NAME, ok=True, detail=detail)
    if status.phase is not RunPhase.ENDED:
        detail = f"It did not end in {seconds:.0f} s. {status.waiting_for}".strip()
        remedy = "Fix the reason why it waits, or check which other work uses the machines."
        return CheckResult(_CHECK_NAME, ok=False, detail=detail, remedy=remedy)
    message = status.failure.message if status.failure is not None else ""
    last_lines = backend.logs(status.name, 0).text.strip().splitlines()[-_MAX_LAST_LINES:]
    detail = " ".join([f"It ended as {status.outcome}: {message}", *last_lines]).strip()
    return CheckResult(
        _CHECK_NAME, ok=False, detail=detail, remedy="The detail ends with the last output of its rank 0."
    )
