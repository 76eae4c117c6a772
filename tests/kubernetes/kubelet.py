"""The fake cluster's nodes: each runs its Pods as real processes and reports their status.

What a kubelet retries is retried here, with the same events and status. A crashed node reports nothing.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tests.kubernetes import pod_status
from tests.kubernetes.api import ENDED, Api, record_event
from tests.kubernetes.container import Bind, Container, ContainerSpec, Networks
from tests.kubernetes.images import Image, PullFailedError, Registry, full_name
from tests.kubernetes.pod_status import ConfigError
from tests.kubernetes.resources import ApiError, Object, now, quantity
from tests.kubernetes.volumes import MountFailedError, binds

_SYNC_SECONDS = 0.25
"""How long the agent waits for a change before it looks for new and deleted Pods all the same."""
_RETRY_SECONDS = 0.5
"""The pause before a failed pull or mount is tried again. A real kubelet waits for seconds, and later for minutes."""
_MIN_GRACE_SECONDS = 2.0
"""The grace period of a container whose Pod is deleted by force."""
T = TypeVar("T")


@dataclass
class Kubelet:
    """One node's agent. `folder` is the node's disk, and `pulled` has the images on it.

    `heartbeats` are those of all nodes (`Controllers.heartbeats`). `failure` is what a thread raised.
    """

    api: Api
    node: str
    folder: Path
    registry: Registry
    networks: Networks
    heartbeats: dict[str, float]
    pulled: set[str] = field(default_factory=set)
    failure: BaseException | None = None

    def __post_init__(self) -> None:
        self.pods: dict[str, Pod] = {}
        self._start_agent()

    def crash(self) -> None:
        """Power the node off."""
        self.kill()
        for pod in list(self.pods.values()):
            pod.kill()

    def kill(self) -> None:
        """Kill the agent. Its containers keep running, and it no longer reports."""
        self.alive = False
        self.heartbeats[self.node] = time.monotonic()  # the last one
        self._thread.join()

    def revive(self) -> None:
        """Restart the killed agent, which reports the containers that have ended meanwhile."""
        self._start_agent()
        for pod in list(self.pods.values()):
            pod.report_missed_end()

    def stop(self) -> None:
        """End the node for good. Raises what its threads raised."""
        if self.alive:
            self.crash()
        for pod in self.pods.values():
            pod.thread.join()
        if self.failure is not None:
            raise self.failure

    def _start_agent(self) -> None:
        self.alive = True
        self.heartbeats[self.node] = math.inf
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        store = self.api.store
        while self.alive:
            for obj in store.find("pods", "", lambda one: one["spec"].get("nodeName") == self.node):
                uid = obj["metadata"]["uid"]
                if uid not in self.pods and obj["status"]["phase"] not in ENDED:
                    self.pods[uid] = Pod(self, obj)
            known = {obj["metadata"]["uid"] for obj in store.find("pods")}
            for uid, pod in list(self.pods.items()):
                if uid not in known and not pod.is_terminating:
                    pod.kill()  # its object was removed before it ended
            with store.changed:
                store.changed.wait(_SYNC_SECONDS)


class Pod:
    """One Pod on its node, with a thread of its own."""

    def __init__(self, kubelet: Kubelet, pod: Object) -> None:
        self._kubelet, self._pod = kubelet, pod
        self._store = kubelet.api.store
        self._meta = pod["metadata"]
        self._folder = kubelet.folder / "pods" / self._meta["uid"]
        self._folder.mkdir(parents=True)
        self._hosts = self._folder / "hosts"
        self._address = kubelet.networks.new_address()
        self.container: Container | None = None
        self._killed = threading.Event()
        self.is_terminating = False
        self._missed_end: Object | None = None  # the container's state, if it ended while the agent was killed
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def kill(self) -> None:
        """Kill its processes, and report nothing."""
        self._killed.set()
        if self.container is not None:
            self.container.kill()
            self.container.ended.wait(20)

    def report_missed_end(self) -> None:
        """Report an end that came while the agent was killed."""
        if self._missed_end is not None:
            self._report_end(self._missed_end)

    def _run(self) -> None:
        try:
            ended = self._run_container()
            if not self._killed.is_set():
                self._report_end(ended)
        except BaseException as error:
            self._kubelet.failure = error
            raise
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _report_end(self, state: Object) -> None:
        if not self._kubelet.alive:
            self._missed_end = state
            return
        self._edit(lambda obj: pod_status.set_ended(obj, state))
        self.remove_if_deleted()

    def _run_container(self) -> Object:
        """Pull the image, run the container, and return its terminated state."""
        self._edit(lambda obj: obj["status"].update(hostIP="127.0.0.1", startTime=now()))
        self._edit(lambda obj: pod_status.set_waiting(obj, "ContainerCreating"))
        container = self._pod["spec"]["containers"][0]
        image = self._retry(lambda: self._pull(container))
        mounts = self._retry(lambda: binds(self._store, self._pod, container, self._folder))
        if image is None or mounts is None:
            return pod_status.never_started_state()
        spec = self._retry(lambda: self._container_spec(container, image, mounts))
        if spec is None:
            return pod_status.never_started_state()
        running = Container(spec, on_end=self._store.changed)
        running.start()
        self.container = running
        if self._killed.is_set():
            running.kill()
        self._event("Normal", "Started", f"Started container {container['name']}")
        self._edit(lambda obj: pod_status.set_running(obj, self._address, running.started_at))
        self._wait_for_end(running)
        return pod_status.terminated_state(running, (self._folder / "termination").read_bytes(), self._meta["uid"])

    def _wait_for_end(self, container: Container) -> None:
        """Wait for the end. The first deletion sends SIGTERM, and SIGKILL after its grace period."""
        spec = self._pod["spec"]
        kill_at: float | None = None
        while not container.ended.is_set():
            obj = self._current()
            is_deleted = self._kubelet.alive and (obj is None or bool(obj["metadata"].get("deletionTimestamp")))
            if is_deleted and kill_at is None:
                meta = obj["metadata"] if obj else {"deletionGracePeriodSeconds": 0}
                grace = meta.get("deletionGracePeriodSeconds", spec["terminationGracePeriodSeconds"])
                kill_at = time.monotonic() + max(grace, _MIN_GRACE_SECONDS)
                self.is_terminating = True
                container.signal(signal.SIGTERM)
                self._event("Normal", "Killing", f"Stopping container {spec['containers'][0]['name']}")
            if kill_at is not None and time.monotonic() >= kill_at:
                container.kill()
            with self._store.changed:
                if not container.ended.is_set():
                    self._store.changed.wait(0.1 if kill_at else 0.5)

    def _pull(self, container: Object) -> Image:
        reference, registry = container["image"], self._kubelet.registry
        if full_name(reference) in self._kubelet.pulled and container.get("imagePullPolicy") != "Always":
            return registry.images[full_name(reference)]
        secrets = []
        for named in self._pod["spec"].get("imagePullSecrets") or []:
            with contextlib.suppress(ApiError):
                secrets.append(self._store.get("secrets", self._meta["namespace"], named["name"]))
        self._event("Normal", "Pulling", f'Pulling image "{reference}"')
        image = registry.pull(reference, secrets)
        self._kubelet.pulled.add(full_name(reference))
        self._event("Normal", "Pulled", f'Successfully pulled image "{reference}"')
        return image

    def _retry(self, get: Callable[[], T]) -> T | None:
        """Call until it succeeds, and report each failure. Return None if the Pod is deleted."""
        failures = 0
        while not self._killed.is_set():
            obj = self._current()
            if obj is None or obj["metadata"].get("deletionTimestamp"):
                return None
            try:
                return get()
            except PullFailedError as error:
                failures += 1
                self._report_pull_failure(error, failures)
            except MountFailedError as error:
                self._event("Warning", error.reason, str(error))
            except ConfigError as error:
                self._set_waiting("CreateContainerConfigError", str(error))
                self._event("Warning", "Failed", f"Error: {error}")
            self._killed.wait(_RETRY_SECONDS)
        return None

    def _report_pull_failure(self, error: PullFailedError, failures: int) -> None:
        image = self._pod["spec"]["containers"][0]["image"]
        if error.reason == "InvalidImageName":
            self._set_waiting(error.reason, str(error))
            self._event("Warning", "InspectFailed", str(error))
        elif failures == 1:
            self._set_waiting(error.reason, str(error))
            self._event("Warning", "Failed", f'Failed to pull image "{image}": {error}')
            self._event("Warning", "Failed", f"Error: {error.reason}")
        else:
            self._set_waiting("ImagePullBackOff", f'Back-off pulling image "{image}": {error.reason}: {error}')
            self._event("Normal", "BackOff", f'Back-off pulling image "{image}"')

    def _container_spec(self, container: Object, image: Image, mounts: tuple[Bind, ...]) -> ContainerSpec:
        spec = self._pod["spec"]
        security = {**(spec.get("securityContext") or {}), **(container.get("securityContext") or {})}
        uid = int(security.get("runAsUser", 0))
        if security.get("runAsNonRoot") and not uid:
            raise ConfigError("container has runAsNonRoot and image will run as root")
        message = self._folder / "termination"
        message.touch()
        message.chmod(0o666)
        namespace = self._meta["namespace"]
        domains = f"{namespace}.svc.cluster.local svc.cluster.local cluster.local"
        files = {
            "hosts": self.own_hosts(),
            "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
            "passwd": "root:x:0:0:root:/root:/bin/sh\n",
            "resolv.conf": f"search {domains}\nnameserver 127.0.0.1\noptions ndots:5\n",
        }
        for name, text in files.items():
            (self._folder / name).write_text(text)
        own = [Bind(f"/etc/{name}", self._folder / name, read_only=True) for name in files]
        own.append(Bind(container["terminationMessagePath"], message))
        group = security.get("fsGroup")
        memory = (container["resources"].get("limits") or {}).get("memory")
        return ContainerSpec(
            image=image,
            command=tuple(container["command"]),
            environment={
                **image.environment,
                **pod_status.environment(self._store, self._pod, container, self._address),
            },
            binds=(*mounts, *own),
            hostname=spec.get("hostname", self._meta["name"]),
            uid=uid,
            gid=int(security.get("runAsGroup", 0)),
            groups=(group,) if group is not None else (),
            read_only_root=bool(security.get("readOnlyRootFilesystem")),
            working_dir=container.get("workingDir", "/"),
            memory_bytes=int(quantity(memory)) if memory else 0,
            network=self._kubelet.networks.namespace_of(self._pod, self._policies()),
        )

    def _policies(self) -> list[Object]:
        labels = self._meta.get("labels") or {}

        def selects(policy: Object) -> bool:
            wanted = policy["spec"]["podSelector"].get("matchLabels") or {}
            return wanted.items() <= labels.items()

        return self._store.find("networkpolicies", self._meta["namespace"], selects)

    def own_hosts(self) -> str:
        """Return the lines of /etc/hosts that a kubelet writes."""
        host = self._pod["spec"].get("hostname") or self._meta["name"]
        subdomain = self._pod["spec"].get("subdomain")
        qualified = f"{host}.{subdomain}.{self._meta['namespace']}.svc.cluster.local " if subdomain else ""
        return f"127.0.0.1 localhost\n{self._address} {qualified}{host}\n"

    def write_hosts(self, text: str) -> None:
        """Replace /etc/hosts, in place because the container has mounted this very file."""
        with contextlib.suppress(FileNotFoundError):
            if self._hosts.exists() and self._hosts.read_text() != text:
                self._hosts.write_text(text)

    # Its object

    def _current(self) -> Object | None:
        with contextlib.suppress(ApiError):
            obj = self._store.get("pods", self._meta["namespace"], self._meta["name"])
            return obj if obj["metadata"]["uid"] == self._meta["uid"] else None
        return None

    def _edit(self, change: Callable[[Object], object]) -> None:
        if self._kubelet.alive and not self._killed.is_set() and self._current() is not None:
            self._store.edit("pods", self._meta["namespace"], self._meta["name"], change)

    def _set_waiting(self, reason: str, message: str) -> None:
        self._edit(lambda obj: pod_status.set_waiting(obj, reason, message))

    def remove_if_deleted(self) -> None:
        """Remove its object if it is deleted, because the Pod has ended."""
        obj = self._current()
        if self._kubelet.alive and obj is not None and obj["metadata"].get("deletionTimestamp"):
            with contextlib.suppress(ApiError):
                self._store.delete("pods", self._meta["namespace"], self._meta["name"], {"gracePeriodSeconds": 0})

    def _event(self, kind: str, reason: str, message: str) -> None:
        if self._kubelet.alive:
            record_event(self._kubelet.api, self._pod, kind, reason, message)
