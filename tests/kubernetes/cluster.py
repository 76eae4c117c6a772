"""The fake cluster whole: API server, controllers, nodes, names. What a test asks for, and what it breaks.

The one rule: `close` fails the test where a part of the cluster itself failed, or left a process.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from tests.kubernetes.api import Query
from tests.kubernetes.apiserver import ApiServer
from tests.kubernetes.controllers import Controllers, Pace, make_node
from tests.kubernetes.images import PYTHON, Registry
from tests.kubernetes.kubelet import Kubelet, Networks
from tests.kubernetes.resources import BY_PLURAL, Object

NODES = {"node-a": {"cpu": "8", "memory": "16Gi"}, "node-b": {"cpu": "8", "memory": "16Gi"}}
NAMES_SECONDS = 0.2


class FakeCluster:
    """Two nodes, ready. `folder` is theirs; names resolve `names_seconds` after their pod has an address."""

    def __init__(self, folder: Path, *, nodes: dict[str, dict[str, str]] | None = None, secure: bool = False) -> None:
        self.folder = folder
        self.server = ApiServer(secure=secure)
        self.api, self.store, self.faults = self.server.api, self.server.store, self.server.faults
        self.registry = Registry()
        self.names_seconds = NAMES_SECONDS
        self._networks = Networks()
        self.pace = Pace()
        self.controllers = Controllers(self.api, self.pace)
        self.nodes: dict[str, Kubelet] = {}
        self.api.log_of = self._log_of
        for name, offers in (NODES if nodes is None else nodes).items():
            self.add_node(name, offers)
        self._ending = threading.Event()
        self._names_since: dict[str, float] = {}
        self._names = threading.Thread(target=self._serve_names, daemon=True)
        self._names.start()

    def add_node(self, name: str, offers: dict[str, str], **labels: str) -> Kubelet:
        """One more machine, that has the plain Python image already."""
        disk = self.folder / name
        disk.mkdir(parents=True)
        made = Kubelet(
            self.api, name, disk, self.registry, self._networks, self.controllers.heartbeats, pulled={PYTHON}
        )
        make_node(self.api, name, {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", **labels}, offers)
        self.nodes[name] = made
        return made

    def close(self) -> None:
        """End everything. Raises what went wrong inside."""
        self._ending.set()
        self._names.join()
        for node in self.nodes.values():
            if node.alive:
                node.stop()
        self.controllers.stop()
        self.server.close()
        self._networks.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    # What tests do to it

    def make(self, plural: str, namespace: str, name: str, **parts: object) -> Object:
        """An object, straight into the API."""
        return self.api.create(BY_PLURAL[plural], namespace, {"metadata": {"name": name}, **parts})

    def pods(self, namespace: str = "") -> list[Object]:
        """Every pod."""
        return self.store.find("pods", namespace)

    def edit_node(self, name: str, change: Callable[[Object], None]) -> None:
        """Cordon it, taint it, label it."""
        self.store.edit("nodes", "", name, change)

    def evict(self, pod: Object, message: str = "The node was low on resource: memory.") -> None:
        """The kubelet evicts a pod, because its node is short of something."""
        meta = pod["metadata"]

        def fail(found: Object) -> None:
            found["status"].update(phase="Failed", reason="Evicted", message=message)
            condition = {
                "type": "DisruptionTarget",
                "status": "True",
                "reason": "TerminationByKubelet",
                "message": message,
            }
            found["status"].setdefault("conditions", []).append(condition)

        self.nodes[pod["spec"]["nodeName"]].pods[meta["uid"]].kill()
        self.store.edit("pods", meta["namespace"], meta["name"], fail)

    # Pods' output

    def _log_of(self, namespace: str, name: str, query: Query) -> bytes:
        uid = self.store.get("pods", namespace, name)["metadata"]["uid"]
        lines: list[tuple[float, bytes]] = []
        for node in self.nodes.values():
            if uid in node.pods and node.alive:
                lines = node.pods[uid].lines()
        if since := query.get("sinceTime"):
            begin = datetime.fromisoformat(since).timestamp()
            lines = [line for line in lines if line[0] >= begin]
        if tail := query.get("tailLines"):
            lines = lines[-int(tail) :] if int(tail) else []
        stamped = query.get("timestamps") in {"true", "True", "1"}
        text = b"".join((_stamp(at) + line if stamped else line) for at, line in lines)
        limit = query.get("limitBytes")
        return text[: int(limit)] if limit else text

    # Names of pods behind headless services

    def _serve_names(self) -> None:
        while not self._ending.wait(0.05):
            services = self.store.find("services", "", lambda one: one["spec"].get("clusterIP") == "None")
            pods = self.store.find("pods", "", lambda one: one["status"]["phase"] == "Running")
            known = []
            for service in services:
                known += [line for pod in pods if (line := _line(service, pod))]
            moment = time.monotonic()
            self._names_since = {line: self._names_since.get(line, moment) for line in known}
            resolved = [line for line, since in self._names_since.items() if moment - since >= self.names_seconds]
            for node in self.nodes.values():
                for runs in list(node.pods.values()):
                    runs.write_hosts(runs.own_hosts() + "".join(resolved))


def _line(service: Object, pod: Object) -> str:
    """The line of /etc/hosts for a pod behind a headless service; empty where it is not behind it."""
    meta, spec = service["metadata"], service["spec"]
    labels = pod["metadata"].get("labels") or {}
    inside = (
        pod["metadata"]["namespace"] == meta["namespace"] and (spec.get("selector") or {}).items() <= labels.items()
    )
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", []))
    address = pod["status"].get("podIP")
    if not inside or not address or not (ready or spec.get("publishNotReadyAddresses")):
        return ""
    if pod["spec"].get("subdomain") != meta["name"]:
        return ""
    short = f"{pod['spec']['hostname']}.{meta['name']}"
    whole = f"{short}.{meta['namespace']}.svc.cluster.local"
    # The resolver takes an ended name from a server alone; this file stands in for one.
    return f"{address} {whole} {whole}. {short}\n"


def _stamp(at: float) -> bytes:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ ").encode()
