"""Our local backend as the benchmarks drive it: bare runs, with no console in front."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runtime.backends.base import Backend, create
from runtime.specs import Framework, Image, Mount, Outcome, Resources, RunPhase, RunSpec, RunStatus

SECONDS = 180


class Local:
    """Runs scripts of one workspace. `options` go to the backend."""

    def __init__(self, folder: Path, images_root: Path, **options: Any) -> None:
        self.workspace = folder / "workspace"
        self.workspace.mkdir(parents=True, exist_ok=True)
        self._runs = 0
        self.backend: Backend = create("local", root=folder / "runs", images_root=images_root, cpus=8, **options)

    def run(self, script: str, nodes: int, workers: int, framework: Framework = Framework.PYTORCH) -> Path:
        """Submit, wait for the end, and give the run's own folder (RUN_DIR)."""
        self._runs += 1
        spec = RunSpec(
            name=f"bench-{self._runs}",
            framework=framework,
            image=Image(builtin=framework.value),
            nodes=nodes,
            workers_per_node=workers,
            resources=Resources(cpus=max(0.5, 2 / nodes), memory_mib=2048),
            script=script,
            deadline_seconds=SECONDS,
            mounts=(Mount(str(self.workspace), "/workspace", read_only=False),),
        )
        self.backend.submit(spec)
        status = self._wait(spec.name)
        if status.outcome is not Outcome.COMPLETED:
            raise SystemExit(f"our run did not complete: {status}")
        return self.backend.run_folder(spec.name) / "run"

    def forget(self) -> None:
        """Delete the last run."""
        self.backend.delete(f"bench-{self._runs}")

    def _wait(self, name: str) -> RunStatus:
        status = self.backend.describe(name)
        if status.phase is not RunPhase.ENDED:
            for _names in self.backend.changes(stop_after=SECONDS):
                status = self.backend.describe(name)
                if status.phase is RunPhase.ENDED:
                    break
        return status
