"""Runs on a Kubernetes cluster, and how tests make and lose them there; the words are `AnyYard`'s.

The one rule: nothing here knows whether the cluster is real.
"""

from __future__ import annotations

import dataclasses
import textwrap
import threading
import time
from collections.abc import Mapping
from typing import Any

from runtime.backends.kubernetes import KubernetesBackend
from runtime.backends.kubernetes_config import ClusterConfig
from runtime.specs import Framework, Image, Mount, Resources, RunSpec
from tests.kubernetes.sites import Site
from tests.kubernetes.telling import tell
from tests.runtime.any_yard import AnyYard

SMALL = Resources(cpus=0.25, memory_mib=256)
"""What a run of the tests asks for: a small machine has room for a few, and what starts in one is held to no more."""


class ClusterYard(AnyYard):
    """A backend with a workspace and a data set on a cluster."""

    def __init__(self, site: Site, *, watched: bool = True, **settings: Any) -> None:
        """`watched`: whether there is somebody who follows the cluster, as the console's watcher does."""
        self.site = site
        self.settings = settings
        self.keeps_output = site.shared
        self.late_seconds = site.late_seconds
        self.patience = 300.0 if site.real else 120.0
        self.backend: KubernetesBackend = self.another()
        self._closing = threading.Event()
        if watched:
            threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        """What the console's watcher does all the time: keep what goes with a pod."""
        for _names in self.another().changes():
            if self._closing.is_set():
                return

    def config(self, **changes: Any) -> ClusterConfig:
        """The cluster as a console is told of it."""
        return self.site.config(**{**self.settings, **changes})

    def another(self, **changes: Any) -> KubernetesBackend:
        """One more backend for the same cluster, as another process of the console would have it."""
        return KubernetesBackend(config=self.config(**changes), root=self.site.root / "runs")

    def spec(self, source: str = "print('hello')", /, **changes: Any) -> RunSpec:
        """A spec whose workspace holds the script as `train.py`."""
        self.write({"workspace/train.py": textwrap.dedent(source), "digits/three.txt": "3"})
        spec = RunSpec(
            name="job-1-1",
            framework=Framework.PYTORCH,
            image=Image(builtin="bare"),
            nodes=1,
            workers_per_node=1,
            resources=SMALL,
            script="train.py",
            deadline_seconds=120,
            datasets=("digits",),
            mounts=(
                Mount(str(self.site.root / "workspace"), "/workspace", False),
                Mount(str(self.site.root / "digits"), "/datasets/digits"),
            ),
        )
        return dataclasses.replace(spec, **changes)

    def write(self, files: Mapping[str, str]) -> None:
        """Files of the volume, unless they are so already."""
        new = {path: text for path, text in files.items() if self.site.placed.get(path) != text}
        if new:
            self.site.place(new)
            self.site.placed.update(new)

    def all_logs(self, name: str) -> str:
        """What the cluster says of the run, for a failed test's message."""
        return tell(self.site, f"trainyard.dev/run={name}")

    def lose_node(self, node: int, name: str = "job-1-1") -> None:
        """One node of the run is taken away by the cluster, without the code's doing."""
        pod = self.site.pods(name)[node]
        self.site.core.create_namespaced_pod_eviction(
            pod.metadata.name,
            self.site.namespace,
            {
                "apiVersion": "policy/v1",
                "kind": "Eviction",
                "metadata": {"name": pod.metadata.name},
                "deleteOptions": {"gracePeriodSeconds": 1},
            },
        )

    def left_behind(self) -> list[str]:
        """What is there of runs that were deleted, after a while."""
        give_up_at = time.monotonic() + 60
        while (left := self.site.left()) and time.monotonic() < give_up_at:
            time.sleep(0.05)
        if self.site.shared:
            runs = self.site.root / "runs"
            left += [f"folder {path.name}" for path in runs.glob("*") if not path.name.startswith(".")]
        return left

    def close(self) -> None:
        """Delete every run; nothing of them is left."""
        self._closing.set()
        for name in self.backend.names():
            self.backend.delete(name)
        assert self.left_behind() == []
        assert self.backend.names() == []
