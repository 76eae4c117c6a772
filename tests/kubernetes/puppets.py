"""A fake cluster without processes: its one machine takes pods, and a test says what becomes of them.

The one rule: what a kubelet would do by itself, a puppet does by itself: it lets go of the pods that are deleted.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from pathlib import Path

from tests.kubernetes import podstatus
from tests.kubernetes.cluster import FakeCluster
from tests.kubernetes.container import Container
from tests.kubernetes.controllers import make_node
from tests.kubernetes.resources import ApiError, Object
from tests.kubernetes.sites import Site

MACHINE = "puppet"
NAMESPACE = "trainyard-runs"


class PuppetSite(Site):
    """The cluster, as a backend is told of it. `starts`: pods that are placed run at once."""

    def __init__(self, folder: Path) -> None:
        self.fake = FakeCluster(folder / "nodes", nodes={})
        # The other suites have every object checked; here thousands of the same are made.
        self.fake.api.checks_schemas = False
        self.fake.faults.retry_after_seconds = 0
        root = folder / "volume"
        root.mkdir()
        super().__init__(self.fake.server.kubeconfig(folder / "kubeconfig"), NAMESPACE, root)
        self.fake.controllers.heartbeats[MACHINE] = math.inf
        make_node(self.fake.api, MACHINE, {}, {"cpu": "64", "memory": "256Gi"})
        self.fake.make("namespaces", "", NAMESPACE)
        self.starts = True
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._obey, daemon=True)
        self._thread.start()

    def volume(self) -> dict[str, str]:
        return {"host_path": str(self.root), "root": str(self.root)}

    def _obey(self) -> None:
        while not self._ending.is_set():
            for pod in self.fake.store.find("pods", NAMESPACE, lambda one: bool(one["spec"].get("nodeName"))):
                if pod["status"]["phase"] in podstatus.ENDED:
                    continue
                if pod["metadata"].get("deletionTimestamp"):
                    self.finish(pod, 1)
                    with contextlib.suppress(ApiError):
                        self.fake.store.delete("pods", NAMESPACE, pod["metadata"]["name"], {"gracePeriodSeconds": 0})
                elif self.starts and pod["status"]["phase"] == "Pending":
                    self._start(pod)
            with self.fake.store.changed:
                self.fake.store.changed.wait(0.02)

    def _start(self, pod: Object) -> None:
        made = Container(order=None, started_at=time.time())  # type: ignore[arg-type] - nothing is run
        self._edit(pod, lambda found: podstatus.set_running(found, "10.0.0.9", made))

    def finish(self, pod: Object, exit_code: int) -> None:
        """Its container has ended."""
        made = Container(order=None, started_at=time.time() - 1, finished_at=time.time(), exit_code=exit_code)  # type: ignore[arg-type]
        told = podstatus.terminated(made, b"", pod["metadata"]["uid"])
        self._edit(pod, lambda found: podstatus.set_ended(found, told, "Failed" if exit_code else "Succeeded"))

    def _edit(self, pod: Object, change: object) -> None:
        self.fake.store.edit("pods", NAMESPACE, pod["metadata"]["name"], change)  # type: ignore[arg-type]

    def close(self) -> None:
        self._ending.set()
        self._thread.join()
        self.fake.close()
