"""The fake cluster: API server, controllers, nodes and images in one object.

    python -m tests.kubernetes.cluster /tmp/kubeconfig

serves one until Ctrl-C, for `KUBECONFIG=/tmp/kubeconfig make test-kubernetes`.
"""

from __future__ import annotations

import functools
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from tests.kubernetes import portforward
from tests.kubernetes.api import set_condition
from tests.kubernetes.apiserver import ApiServer
from tests.kubernetes.container import Container, Networks
from tests.kubernetes.controllers import Controllers, Pace, make_node
from tests.kubernetes.images import PYTHON, Registry
from tests.kubernetes.kubelet import Kubelet
from tests.kubernetes.resources import BY_PLURAL, ApiError, Object

NODES = {"node-a": {"cpu": "8", "memory": "16Gi"}, "node-b": {"cpu": "8", "memory": "16Gi"}}


class FakeCluster:
    """A cluster of ready nodes. `nodes` has the resources that each offers. `folder` is for their disks."""

    dns_delay_seconds = 0.2
    """How long after a Pod got its address its name resolves."""
    dns_cache_seconds = 1.0
    """How long DNS repeats an answer, which may be the address of an earlier Pod. 30 s by default in CoreDNS."""

    def __init__(self, folder: Path, *, nodes: dict[str, dict[str, str]] = NODES, secure: bool = False) -> None:
        self.folder = folder
        self.server = ApiServer(secure=secure)
        self.api, self.store, self.faults = self.server.api, self.server.store, self.server.faults
        self.registry = Registry()
        self.networks = Networks()
        self.controllers = Controllers(self.api, Pace())
        self.nodes: dict[str, Kubelet] = {}
        self.api.log_of, self.api.dial_of = self._log_of, self._dial_of
        for name, offers in nodes.items():
            self.add_node(name, offers)
        self._closing = threading.Event()
        self._names_since: dict[str, float] = {}  # when each line of /etc/hosts was first seen
        self._cached: dict[str, tuple[str, float]] = {}  # DNS's answer for each line's names, and since when
        self._dns = threading.Thread(target=self._serve_dns, daemon=True)
        self._dns.start()

    def add_node(self, name: str, offers: dict[str, str], **labels: str) -> None:
        """Add a node, which has the Python image."""
        disk = self.folder / name
        disk.mkdir(parents=True)
        heartbeats = self.controllers.heartbeats
        self.nodes[name] = Kubelet(self.api, name, disk, self.registry, self.networks, heartbeats, pulled={PYTHON})
        make_node(self.api, name, {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", **labels}, offers)

    def close(self) -> None:
        """End everything. Raises what its threads raised."""
        self._closing.set()
        self._dns.join()
        for node in self.nodes.values():
            node.stop()
        self.controllers.stop()
        self.server.close()
        self.networks.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    # What tests do

    def make(self, plural: str, namespace: str, name: str, **parts: object) -> Object:
        """Create an object. `parts` are its fields besides `metadata`."""
        return self.api.create(BY_PLURAL[plural], namespace, {"metadata": {"name": name}, **parts})

    def pods(self, namespace: str = "") -> list[Object]:
        """Return all Pods."""
        return self.store.find("pods", namespace)

    def containers(self) -> list[Container]:
        """Return the containers of all Pods, by host name."""
        known = {obj["metadata"]["uid"] for obj in self.pods()}
        pods = [pod for node in self.nodes.values() for uid, pod in node.pods.items() if uid in known]
        return sorted((pod.container for pod in pods if pod.container), key=lambda one: one.spec.hostname)

    def edit_node(self, name: str, change: Callable[[Object], None]) -> None:
        """Change a Node, for example to cordon, taint or label it."""
        self.store.edit("nodes", "", name, change)

    def evict(self, pod: Object, message: str = "The node was low on resource: memory.") -> None:
        """Evict a Pod under node pressure, as its kubelet does."""
        meta = pod["metadata"]

        def fail(obj: Object) -> None:
            obj["status"].update(phase="Failed", reason="Evicted", message=message)
            set_condition(obj, "DisruptionTarget", "True", "TerminationByKubelet", message)

        on_node = self.nodes[pod["spec"]["nodeName"]].pods[meta["uid"]]
        on_node.kill()
        self.store.edit("pods", meta["namespace"], meta["name"], fail)
        on_node.remove_if_deleted()  # its Job may have deleted it already, because its peer failed

    # Output of Pods

    def _log_of(self, namespace: str, name: str, with_times: bool) -> bytes:
        uid = self.store.get("pods", namespace, name)["metadata"]["uid"]
        containers = [node.pods[uid].container for node in self.nodes.values() if uid in node.pods and node.alive]
        lines = [pair for container in containers if container is not None for pair in list(container.lines)]
        return b"".join((_timestamp(at) if with_times else b"") + line for at, line in lines)

    def _dial_of(self, namespace: str, name: str) -> portforward.Dial:
        pod = self.store.get("pods", namespace, name)
        node = self.nodes.get(pod["spec"].get("nodeName", ""))
        if node is None:
            raise ApiError(400, "BadRequest", f"pod {name} does not have a host assigned")
        if not node.alive:
            raise ApiError(500, "InternalError", "error dialing backend: dial tcp: connect: connection refused")
        on_node = node.pods.get(pod["metadata"]["uid"])
        container = on_node.container if on_node else None
        if container is None or container.exit_code is not None:
            raise ApiError(500, "InternalError", "sandbox container is not running")
        return functools.partial(portforward.dial, container.spec.network)

    # Names of Pods behind headless Services, in each container's /etc/hosts

    def _serve_dns(self) -> None:
        while not self._closing.wait(0.05):
            services = self.store.find("services", "", lambda one: one["spec"].get("clusterIP") == "None")
            pods = self.store.find("pods", "", lambda one: one["status"]["phase"] == "Running")
            lines = [line for service in services for pod in pods if (line := _hosts_line(service, pod))]
            now = time.monotonic()
            self._names_since = {line: self._names_since.get(line, now) for line in lines}
            known = [line for line, since in self._names_since.items() if now - since >= self.dns_delay_seconds]
            text = "".join(self._cached_line(line, now) for line in known)
            for node in self.nodes.values():
                for pod in list(node.pods.values()):
                    pod.write_hosts(pod.own_hosts() + text)

    def _cached_line(self, line: str, now: float) -> str:
        """Return the line as DNS answers: while an earlier answer is cached, with the address of that answer."""
        address, _space, names = line.partition(" ")
        known, since = self._cached.get(names, (address, now))
        if known == address or now - since >= self.dns_cache_seconds:
            self._cached[names] = (address, now)
            return line
        return f"{known} {names}"


def _timestamp(at: float) -> bytes:
    """Return a time as kubelets write it before a line: with nanoseconds. The last three digits are made up."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%S.%f}789Z ".encode()


def _hosts_line(service: Object, pod: Object) -> str:
    """Return the line of /etc/hosts for a Pod behind a headless Service, or an empty string."""
    name, namespace, labels = service["metadata"]["name"], service["metadata"]["namespace"], pod["metadata"]["labels"]
    selected = pod["metadata"]["namespace"] == namespace and service["spec"]["selector"].items() <= labels.items()
    address = pod["status"].get("podIP")
    if not selected or not address or pod["spec"].get("subdomain") != name:
        return ""
    short = f"{pod['spec']['hostname']}.{name}"
    qualified = f"{short}.{namespace}.svc.cluster.local"
    # With a final dot too: a resolver sends such a name to servers only, which this file stands in for.
    return f"{address} {qualified} {qualified}. {short}\n"


def main() -> None:
    """Serve until a signal comes."""
    cluster = FakeCluster(Path(tempfile.mkdtemp(prefix="trainyard-fake-")), secure=True)
    cluster.make("namespaces", "", "default")
    cluster.server.kubeconfig(Path(sys.argv[1]))
    sys.stdout.write(f"{cluster.server.url}\n")
    sys.stdout.flush()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    signal.pause()
    cluster.close()


if __name__ == "__main__":
    main()
