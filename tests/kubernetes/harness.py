"""Runs on a Kubernetes cluster, real or fake, with the helpers of `RunHarness`."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from runtime.backends.kubernetes.backend import KubernetesBackend
from runtime.backends.kubernetes.config import ClusterConfig
from runtime.specs import Resources
from tests.kubernetes.sites import Site
from tests.runtime.run_harness import RunHarness


class KubernetesHarness(RunHarness):
    """A backend with a workspace and a data set on a cluster."""

    resources = Resources(cpus=0.25, memory_mib=256)
    """So little that a small machine has room for several nodes."""
    deadline_seconds = 120

    def __init__(self, site: Site, *, watched: bool = True, **settings: Any) -> None:
        """Create the backend, with these settings of the cluster.

        `watched`: whether a thread follows the cluster, as the console's watcher does.
        """
        self.site = site
        self.settings = settings
        self.keeps_output = site.shared
        self.late_seconds = site.late_seconds
        self.patience = 300.0 if site.real else 120.0
        self.workspace, self.dataset = site.root / "workspace", site.root / "digits"
        self.backend: KubernetesBackend = self.new_backend()
        self._closing = threading.Event()
        if watched:
            threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        """Follow the cluster as the console's watcher does, which saves the last state of Pods that are deleted."""
        for _names in self.new_backend().changes():
            if self._closing.is_set():
                return

    def config(self, **changes: Any) -> ClusterConfig:
        """Return the settings that a console has for the cluster."""
        return self.site.config(**{**self.settings, **changes})

    def new_backend(self, **changes: Any) -> KubernetesBackend:
        """Return a backend as another process of the console would have it. `changes` are settings of the cluster."""
        return KubernetesBackend(config=self.config(**changes), root=self.site.root / "runs")

    def write_script(self, source: str) -> None:
        self.write({"workspace/train.py": source, "digits/three": "3"})

    def write(self, files: Mapping[str, str]) -> None:
        """Write files of the volume, unless an earlier call has written the same content."""
        new = {path: text for path, text in files.items() if self.site.placed.get(path) != text}
        if new:
            self.site.place(new)
            self.site.placed.update(new)

    def all_logs(self, name: str) -> str:
        """Describe the run for the message of a failed test."""
        return describe(self.site, f"trainyard.dev/run={name}")

    def lose_node(self, node: int, name: str = "job-1-1") -> None:
        """Evict a Pod of the run."""
        pod = self.site.pods(name)[node]
        metadata = {"name": pod.metadata.name}
        eviction: dict[str, Any] = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
        eviction["deleteOptions"] = {"gracePeriodSeconds": 1}
        self.site.core.create_namespaced_pod_eviction(pod.metadata.name, self.site.namespace, eviction)

    def left_behind(self) -> list[str]:
        """Return what deleted runs have left after a while."""
        give_up_at = time.monotonic() + 60
        while (left := self.site.run_objects()) and time.monotonic() < give_up_at:
            time.sleep(0.05)
        if self.site.shared:
            runs = self.site.root / "runs"
            left += [f"folder {path.name}" for path in runs.glob("*") if not path.name.startswith(".")]
        return left

    def close(self) -> None:
        """Delete every run, and check that nothing is left."""
        self._closing.set()
        for name in self.backend.names():
            self.backend.delete(name)
        assert self.left_behind() == []
        assert self.backend.names() == []


def describe(site: Site, selector: str = "") -> str:
    """Describe the namespace after a failed test: nodes, Jobs, Pods with output, events. It never raises."""
    lists = {
        "Node": site.core.list_node,
        "Job": lambda: site.batch.list_namespaced_job(site.namespace, label_selector=selector),
        "Pod": lambda: site.core.list_namespaced_pod(site.namespace, label_selector=selector),
    }
    lines = [f"namespace {site.namespace}"]
    for kind, find in lists.items():
        for one in _items(site, find):
            shown = {**one.get("spec", {}), **one.get("status", {}), **one["metadata"].get("annotations", {})}
            for name in ("template", "containers", "volumes", "images", "capacity", "affinity"):
                shown.pop(name, None)
            lines.append(f"== {kind} {one['metadata']['name']}: {json.dumps(shown)}")
            if kind == "Pod":
                lines += [f"   | {line}" for line in _output(site, one["metadata"]["name"])]
    for event in _items(site, lambda: site.core.list_namespaced_event(site.namespace))[-60:]:
        about = event.get("involvedObject", {})
        lines.append(f"{event.get('lastTimestamp')} {about.get('name')}: {event.get('reason')}: {event.get('message')}")
    return "\n".join(lines)


def _items(site: Site, find: Callable[[], Any]) -> list[dict[str, Any]]:
    try:
        items: list[dict[str, Any]] = site.client.sanitize_for_serialization(find().items)
    except Exception as error:
        return [{"metadata": {"name": f"cannot be listed: {error}"}}]
    return items


def _output(site: Site, pod: str) -> list[str]:
    try:
        return site.log(pod).splitlines()[-60:]
    except Exception as error:
        return [f"no output: {error}"]
