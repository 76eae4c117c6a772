"""Runs on the local backend, without a console, for benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runtime.backends.base import Backend, create
from runtime.specs import Framework, Image, Mount, Outcome, Resources, RunPhase, RunSpec, RunStatus

TIMEOUT_SECONDS = 180
"""The deadline of each run. Each takes seconds on an idle machine."""


class LocalRuns:
    """Runs scripts of one workspace. `options` go to the backend."""

    def __init__(self, folder: Path, images_root: Path, **options: Any) -> None:
        self.workspace = folder / "workspace"
        self.workspace.mkdir(parents=True, exist_ok=True)
        self._runs = 0
        # Explicit, so that a run fits on a machine with fewer cores too.
        self._backend: Backend = create("local", root=folder / "runs", images_root=images_root, cpus=8, **options)

    def run(self, script: str, nodes: int, workers: int, framework: Framework = Framework.PYTORCH) -> Path:
        """Run a script to its end; return its RUN_DIR."""
        self._runs += 1
        spec = RunSpec(
            name=f"bench-{self._runs}",
            framework=framework,
            image=Image(builtin=framework.value),
            nodes=nodes,
            workers_per_node=workers,
            # Two cores for the whole run, so that runs of one, two and four nodes can be compared.
            resources=Resources(cpus=2 / nodes, memory_mib=2048),
            script=script,
            deadline_seconds=TIMEOUT_SECONDS,
            mounts=(Mount(str(self.workspace), "/workspace", read_only=False),),
        )
        self._backend.submit(spec)
        status = wait_for_end(self._backend, spec.name, TIMEOUT_SECONDS)
        if status.outcome is not Outcome.COMPLETED:
            raise SystemExit(f"The benchmark's run {spec.name} did not complete: {status}")
        return self._backend.run_folder(spec.name) / "run"

    def delete_last(self) -> None:
        """Delete the last run."""
        self._backend.delete(f"bench-{self._runs}")


def wait_for_end(backend: Backend, name: str, seconds: float) -> RunStatus:
    """Return the status of a run once it has ended, or after `seconds`."""
    status = backend.describe(name)
    if status.phase is not RunPhase.ENDED:
        for _names in backend.changes(stop_after_seconds=seconds):
            status = backend.describe(name)
            if status.phase is RunPhase.ENDED:
                break
    return status
