"""The fake cluster's nodes: each runs the pods that are bound to it, as real processes, and tells the API of them.

The one rule: what a pod's status says has happened; a node that crashed says nothing any more.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.kubernetes.api import Api
from tests.kubernetes.images import Registry
from tests.kubernetes.networks import Networks
from tests.kubernetes.pods import Pod
from tests.kubernetes.podstatus import ENDED

_LOOK_SECONDS = 0.25


@dataclass
class Kubelet:
    """One node's agent. `folder` is its disk."""

    api: Api
    node: str
    folder: Path
    registry: Registry
    networks: Networks
    heartbeats: dict[str, float]
    pull_seconds: float = 0.0
    log_rotate_bytes: int = 10 << 20
    holds_cpus: bool = False
    """Whether containers have no more cores than their limit says: as on a real machine, and as slow."""
    pulled: set[str] = field(default_factory=set)
    failure: BaseException | None = None

    def __post_init__(self) -> None:
        self.pods: dict[str, Pod] = {}
        self.alive = False
        self.start()

    def start(self) -> None:
        """Boot. What ran here before the crash is known to have ended."""
        for pod in self.pods.values():
            pod.lost()
        self.pods = {}
        self.alive = True
        self.heartbeats[self.node] = math.inf
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def crash(self) -> None:
        """Power off: no process of it is left, and nobody is told."""
        self.alive = False
        self.heartbeats[self.node] = time.monotonic()
        for pod in list(self.pods.values()):
            pod.kill()
        self._thread.join()

    def stop(self) -> None:
        """End for good. Raises what went wrong in its threads."""
        self.crash()
        for pod in self.pods.values():
            pod.thread.join()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        store = self.api.store
        while self.alive:
            for found in store.find("pods", "", lambda one: one["spec"].get("nodeName") == self.node):
                uid = found["metadata"]["uid"]
                if uid not in self.pods and found["status"]["phase"] not in ENDED:
                    self.pods[uid] = Pod(self, found)
            self._end_orphans()
            with store.changed:
                store.changed.wait(_LOOK_SECONDS)

    def _end_orphans(self) -> None:
        """Kill pods whose object was removed, but for those that are leaving: they have what they were given."""
        known = {found["metadata"]["uid"] for found in self.api.store.find("pods")}
        for uid, pod in list(self.pods.items()):
            if uid not in known and not pod.leaving:
                pod.kill()
