"""One pod on its node: from the first look at it to its last status.

The one rule: everything that a kubelet would try again is tried again, with the same words in events and status, until
the pod is deleted.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from tests.kubernetes import podstatus
from tests.kubernetes.api import record_event
from tests.kubernetes.container import Bind, Container, Order, executable
from tests.kubernetes.images import Image, PullFailedError, full_name
from tests.kubernetes.podstatus import ConfigError
from tests.kubernetes.resources import ApiError, Object, now, quantity
from tests.kubernetes.volumes import MountFailedError, binds

if TYPE_CHECKING:
    from tests.kubernetes.kubelet import Kubelet

_RETRY_SECONDS = 0.5
_LEAST_GRACE_SECONDS = 2.0
"""Of a pod that is removed by force, too."""
Had = TypeVar("Had")


class Pod:
    """One pod on its node, on a thread of its own."""

    def __init__(self, kubelet: Kubelet, found: Object) -> None:
        self._kubelet, self._pod = kubelet, found
        self._store = kubelet.api.store
        self._meta = found["metadata"]
        self._folder = kubelet.folder / "pods" / self._meta["uid"]
        self._folder.mkdir(parents=True)
        self.address = kubelet.networks.address()
        self.container: Container | None = None
        self._killed = threading.Event()
        self.too_late = self.leaving = False
        self.thread = threading.Thread(target=self._guarded, daemon=True)
        self.thread.start()

    def kill(self) -> None:
        """Its processes, at once, without a word."""
        self._killed.set()
        if self.container is not None:
            self.container.kill()
            self.container.ended.wait(20)

    def lost(self) -> None:
        """What a kubelet says of a pod whose machine was started anew."""
        told = {"exitCode": 255, "reason": "Unknown", "startedAt": now(), "finishedAt": now()}
        self._edit(lambda found: podstatus.set_ended(found, told, "Failed"))
        self._remove_if_deleted()

    def log(self) -> bytes:
        """Its output."""
        return b"" if self.container is None else self.container.text()

    def lines(self) -> list[tuple[float, bytes]]:
        """Its output with the time of each line."""
        return [] if self.container is None else list(self.container.lines)

    # Its life

    def _guarded(self) -> None:
        try:
            self._live()
        except BaseException as error:
            self._kubelet.failure = error
            raise
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _live(self) -> None:
        spec = self._pod["spec"]
        self._edit(podstatus.set_creating)
        for container in spec.get("initContainers") or []:
            ended = self._run_container(container)
            if ended is None or ended["exitCode"]:
                if not self._killed.is_set():
                    self._tell_end(ended)
                return
        ended = self._run_container(spec["containers"][0], main=True)
        if not self._killed.is_set():
            self._tell_end(ended)

    def _tell_end(self, ended: Object | None) -> None:
        phase = "Failed" if ended is None or ended["exitCode"] or self.too_late else "Succeeded"
        self._edit(lambda found: podstatus.set_ended(found, ended or podstatus.never_started(), phase, self.too_late))
        self._remove_if_deleted()

    def _run_container(self, container: Object, *, main: bool = False) -> Object | None:
        """From pull to end. None where it was never started, because the pod is deleted."""
        image = self._until_had(lambda: self._pull(container))
        mounts = self._until_had(lambda: binds(self._store, self._pod, container, self._folder))
        if image is None or mounts is None:
            return None
        order = self._until_had(lambda: self._order(container, image, mounts))
        if order is None:
            return None
        if executable(order) is None:
            ended = podstatus.not_executable(order.command[0])
            self._event("Warning", "Failed", f"Error: {ended['message']}")
            return ended
        made = Container(order, rotate_bytes=self._kubelet.log_rotate_bytes, on_end=self._store.changed)
        made.start()
        self.container = made
        if self._killed.is_set():
            made.kill()
        self._event("Normal", "Started", f"Started container {container['name']}")
        if main:
            self._edit(lambda found: podstatus.set_running(found, self.address, made))
        self._wait_for(made)
        message = (self._folder / f"termination-{container['name']}").read_bytes()
        return podstatus.terminated(made, message, self._meta["uid"])

    def _wait_for(self, made: Container) -> None:
        """Until its end; a deletion sends SIGTERM, and SIGKILL after its grace; one shortened later counts not."""
        spec = self._pod["spec"]
        kill_at: float | None = None
        too_late_at = time.monotonic() + spec.get("activeDeadlineSeconds", 10**9)
        while not made.ended.is_set():
            found = self._current()
            deleted = found is None or bool(found["metadata"].get("deletionTimestamp"))
            if not deleted and time.monotonic() >= too_late_at:
                deleted = self.too_late = True
            if deleted and kill_at is None:
                meta = found["metadata"] if found else {"deletionGracePeriodSeconds": 0}
                grace = meta.get("deletionGracePeriodSeconds", spec["terminationGracePeriodSeconds"])
                kill_at = time.monotonic() + max(grace, _LEAST_GRACE_SECONDS)
                self.leaving = True
                made.signal(signal.SIGTERM)
                self._event("Normal", "Killing", f"Stopping container {spec['containers'][0]['name']}")
            if kill_at is not None and time.monotonic() >= kill_at:
                made.kill()
            with self._store.changed:
                if not made.ended.is_set():
                    self._store.changed.wait(0.1 if kill_at else 0.5)

    def _pull(self, container: Object) -> Image:
        reference = container["image"]
        if container["imagePullPolicy"] == "IfNotPresent" and full_name(reference) in self._kubelet.pulled:
            return self._kubelet.registry.images[full_name(reference)]
        if container["imagePullPolicy"] == "Never":
            raise PullFailedError(
                "ErrImageNeverPull", f'Container image "{reference}" is not present with pull policy of Never'
            )
        secrets = []
        for told in self._pod["spec"].get("imagePullSecrets") or []:
            with contextlib.suppress(ApiError):
                secrets.append(self._store.get("secrets", self._meta["namespace"], told["name"]))
        self._event("Normal", "Pulling", f'Pulling image "{reference}"')
        image = self._kubelet.registry.pull(reference, secrets)
        self._killed.wait(self._kubelet.pull_seconds)
        self._kubelet.pulled.add(full_name(reference))
        self._event("Normal", "Pulled", f'Successfully pulled image "{reference}"')
        return image

    def _until_had(self, get: Callable[[], Had]) -> Had | None:
        """Try again until it works, saying why it does not; None once the pod is to end."""
        failures = 0
        while not self._killed.is_set():
            found = self._current()
            if found is None or found["metadata"].get("deletionTimestamp"):
                return None
            try:
                return get()
            except PullFailedError as error:
                failures += 1
                backs_off = failures > 1 and error.reason == "ErrImagePull"
                image = self._pod["spec"]["containers"][0]["image"]
                reason = "ImagePullBackOff" if backs_off else error.reason
                message = f'Back-off pulling image "{image}": ErrImagePull: {error}' if backs_off else str(error)
                self._edit(lambda found, told=(reason, message): podstatus.set_waiting(found, *told))  # type: ignore[misc]
                if reason != "InvalidImageName":
                    self._event("Warning", "Failed", f'Failed to pull image "{image}": {error}')
                    self._event("Warning", "Failed", f"Error: {reason}")
                else:
                    self._event("Warning", "InspectFailed", str(error))
                if backs_off:
                    self._event("Normal", "BackOff", f'Back-off pulling image "{image}"')
            except MountFailedError as error:
                self._event("Warning", "FailedMount", str(error))
            except ConfigError as error:
                self._edit(
                    lambda found, why=str(error): podstatus.set_waiting(found, "CreateContainerConfigError", why)
                )  # type: ignore[misc]
                self._event("Warning", "Failed", f"Error: {error}")
            self._killed.wait(_RETRY_SECONDS)
        return None

    def _order(self, container: Object, image: Image, mounts: tuple[Bind, ...]) -> Order:
        spec = self._pod["spec"]
        security = {**(spec.get("securityContext") or {}), **(container.get("securityContext") or {})}
        uid = int(security.get("runAsUser", 0))
        if security.get("runAsNonRoot") and not uid:
            raise ConfigError("container has runAsNonRoot and image will run as root")
        hosts = self._folder / "hosts"
        if not hosts.exists():
            hosts.write_text(f"127.0.0.1 localhost\n{self.address} {self._names()}\n")
        message = self._folder / f"termination-{container['name']}"
        message.touch()
        message.chmod(0o666)
        plain = {
            "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
            "passwd": "root:x:0:0:root:/root:/bin/sh\n",
        }
        namespace = self._meta["namespace"]
        domains = (f"{namespace}.svc.cluster.local", "svc.cluster.local", "cluster.local")
        plain["resolv.conf"] = f"search {' '.join(domains)}\nnameserver 127.0.0.1\noptions ndots:5\n"
        for name, text in plain.items():
            (self._folder / name).write_text(text)
        own = [Bind(f"/etc/{name}", self._folder / name, read_only=True) for name in ("hosts", *plain)]
        own.append(Bind(container["terminationMessagePath"], message))
        group = spec.get("securityContext", {}).get("fsGroup")
        limits = container["resources"].get("limits") or {}
        memory, cpus = limits.get("memory"), limits.get("cpu") if self._kubelet.holds_cpus else None
        return Order(
            image=image,
            command=(*(container.get("command") or []), *(container.get("args") or [])),
            environment={
                **image.environment,
                **podstatus.environment(self._store, self._pod, container, self.address, self._kubelet.node),
            },
            binds=(*mounts, *own),
            hostname=spec.get("hostname") or self._meta["name"],
            uid=uid,
            gid=int(security.get("runAsGroup", 0)),
            groups=() if group is None else (group,),
            read_only_root=bool(security.get("readOnlyRootFilesystem")),
            working_dir=container.get("workingDir", "/"),
            memory_bytes=int(quantity(memory)) if memory else 0,
            cpus=quantity(cpus) if cpus else 0.0,
            network=self._kubelet.networks.of(self._pod),
        )

    def _names(self) -> str:
        spec = self._pod["spec"]
        host = spec.get("hostname") or self._meta["name"]
        if not spec.get("subdomain"):
            return str(host)
        return f"{host}.{spec['subdomain']}.{self._meta['namespace']}.svc.cluster.local {host}"

    def write_hosts(self, text: str) -> None:
        """What names resolve to from now on. In place: the container sees this very file."""
        path = self._folder / "hosts"
        with contextlib.suppress(FileNotFoundError):
            if path.exists() and path.read_text() != text:
                path.write_text(text)

    def own_hosts(self) -> str:
        """The lines that a kubelet writes by itself."""
        return f"127.0.0.1 localhost\n{self.address} {self._names()}\n"

    # What it says

    def _current(self) -> Object | None:
        try:
            found = self._store.get("pods", self._meta["namespace"], self._meta["name"])
        except ApiError:
            return None
        return found if found["metadata"]["uid"] == self._meta["uid"] else None

    def _edit(self, change: Callable[[Object], None]) -> None:
        if self._kubelet.alive and not self._killed.is_set() and self._current() is not None:
            self._store.edit("pods", self._meta["namespace"], self._meta["name"], change)

    def _remove_if_deleted(self) -> None:
        found = self._current()
        if self._kubelet.alive and found is not None and found["metadata"].get("deletionTimestamp"):
            with contextlib.suppress(ApiError):
                self._store.delete("pods", self._meta["namespace"], self._meta["name"], {"gracePeriodSeconds": 0})

    def _event(self, kind: str, reason: str, message: str) -> None:
        if self._kubelet.alive:
            record_event(self._kubelet.api, self._pod, kind, reason, message)
