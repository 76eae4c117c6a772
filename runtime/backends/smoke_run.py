"""A run of two nodes that does what every run does, to see whether a cluster serves runs.

It hides its order, the wait for its end and the words for how it went. The one rule: nothing of it is left behind.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from pathlib import Path

from runtime.backends.base import Backend, Check
from runtime.errors import BackendUnavailable
from runtime.specs import Framework, Image, Mount, Outcome, Resources, RunPhase, RunSpec, RunStatus

_NAME = "smoke run"
_LAST_LINES = 3


def new_name() -> str:
    """A name for such a run, which no other one has."""
    return f"check-{uuid.uuid4().hex[:12]}"


def check(backend: Backend, name: str, image: str, *, workspace: Path, memory_mib: int, seconds: float) -> Check:
    """Start it in this built-in image, give it so many seconds, and say how it went. Raises RuntimeFault."""
    spec = RunSpec(
        name=name,
        framework=Framework.PYTORCH,
        image=Image(builtin=image),
        nodes=2,
        workers_per_node=1,
        resources=Resources(0.25, memory_mib, disk_mib=memory_mib // 2),
        script="",
        builtin_script="hello",
        deadline_seconds=max(1, int(seconds)),
        grace_seconds=1,
        mounts=(Mount(str(workspace), "/workspace", read_only=True),),
    )
    began = time.monotonic()
    try:
        backend.submit(spec)
        status = await_end(backend, name, seconds)
        return _judge(status, backend, seconds, took=time.monotonic() - began)
    finally:
        with contextlib.suppress(BackendUnavailable):
            backend.delete(name)


def await_end(backend: Backend, name: str, seconds: float) -> RunStatus:
    """How the run ended, or how it stands after so many seconds. Raises RunNotFound, BackendUnavailable."""
    status = backend.describe(name)
    for _names in backend.changes(stop_after=seconds):
        # Its heartbeats too: the run may have changed before anybody watched.
        status = backend.describe(name)
        if status.phase is RunPhase.ENDED:
            break
    return status


def _judge(status: RunStatus, backend: Backend, seconds: float, *, took: float) -> Check:
    if status.outcome is Outcome.COMPLETED:
        return Check(_NAME, ok=True, detail=f"Two nodes met and finished, {took:.1f} s from order to end.")
    if status.phase is not RunPhase.ENDED:
        detail = f"It did not end in {seconds:.0f} s. {status.waiting_for}".strip()
        return Check(_NAME, ok=False, detail=detail, remedy="Mend what it waits for, or see who uses the machines.")
    said = status.failure.message if status.failure is not None else ""
    last = backend.logs(status.name, 0).text.strip().splitlines()[-_LAST_LINES:]
    detail = " ".join([f"It ended as {status.outcome}: {said}", *last]).strip()
    return Check(_NAME, ok=False, detail=detail, remedy="What stands last is the output of its rank 0.")
