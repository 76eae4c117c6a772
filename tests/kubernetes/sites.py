"""Where the tests' runs go: the fake cluster, or, where KUBECONFIG is set, a real one. Both give the same things.

The one rule: everything is in one namespace and one folder of the machines, of this process's own, and both are gone
at the end, whatever happened.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes.client
import kubernetes.config

from tests.kubernetes.cluster import FakeCluster
from tests.kubernetes.images import PYTHON
from tests.kubernetes.resources import Object
from tests.runtime.images_of_ours import IMAGES

IMAGE = os.environ.get("TRAINYARD_TEST_IMAGE", PYTHON)
TORCH_IMAGE = os.environ.get("TRAINYARD_TEST_TORCH_IMAGE", "")
UID = 10001
_STAGING_SECONDS = 180.0
_GONE_SECONDS = 180.0
_PLACE = f"""
UID = {UID}
import json, os, pathlib, shutil, sys
root = pathlib.Path("/host") / sys.argv[1]
for change in json.loads(pathlib.Path("/staged/changes.json").read_text()):
    path = root / change["path"]
    if change["text"] is None:
        shutil.rmtree(path, ignore_errors=True)
        continue
    for folder in [*reversed(path.relative_to(root).parents)]:
        (root / folder).mkdir(exist_ok=True)
        os.chown(root / folder, UID, UID)
        (root / folder).chmod(0o755)
    path.write_text(change["text"])
    os.chown(path, UID, UID)
    path.chmod(0o644)
"""


class Site:
    """One cluster. `root` is where this machine has the volume's files, `shared` whether pods have the very same."""

    real = False
    shared = True

    def __init__(self, kubeconfig: Path, namespace: str, root: Path) -> None:
        self.kubeconfig, self.namespace, self.root = kubeconfig, namespace, root
        client = kubernetes.config.new_client_from_config(str(kubeconfig))
        self.core = kubernetes.client.CoreV1Api(client)
        self.batch = kubernetes.client.BatchV1Api(client)
        self.rbac = kubernetes.client.RbacAuthorizationV1Api(client)
        self.network = kubernetes.client.NetworkingV1Api(client)

    def settings(self, **changes: Any) -> dict[str, Any]:
        """One value of TRAINYARD_CLUSTERS."""
        return {
            "backend": "kubernetes",
            "kubeconfig": str(self.kubeconfig),
            "namespace": self.namespace,
            "volume": self.volume(),
            "images": {"bare": IMAGE, "pytorch": TORCH_IMAGE or IMAGE},
        } | changes

    def volume(self) -> dict[str, Any]:
        """The cluster's volume, as settings name it."""
        raise NotImplementedError

    def place(self, files: Mapping[str, str | None]) -> None:
        """Put files into the volume, by their path in it; pods may change them. None removes what is there."""
        for path, text in files.items():
            where = self.root / path
            if text is None:
                shutil.rmtree(where, ignore_errors=True)
                continue
            where.parent.mkdir(parents=True, exist_ok=True)
            where.write_text(text)
            if os.geteuid() == 0:
                inside = [folder for folder in (where, *where.parents) if folder.is_relative_to(self.root)]
                for one in inside:
                    os.chown(one, UID, UID)

    def left(self) -> list[str]:
        """What the namespace holds that belongs to a run."""
        told = {"label_selector": "trainyard.dev/run"}
        kinds = {
            "job": self.batch.list_namespaced_job,
            "pod": self.core.list_namespaced_pod,
            "service": self.core.list_namespaced_service,
            "secret": self.core.list_namespaced_secret,
            "configmap": self.core.list_namespaced_config_map,
            "networkpolicy": self.network.list_namespaced_network_policy,
        }
        return [
            f"{kind} {item.metadata.name}"
            for kind, find in kinds.items()
            for item in find(self.namespace, **told).items
        ]

    def pods(self, run: str) -> list[Any]:
        """The pods of a run, as the client has them, by node of the run."""
        found = self.core.list_namespaced_pod(self.namespace, label_selector=f"trainyard.dev/run={run}").items
        return sorted(found, key=lambda pod: pod.metadata.name)

    def wait_until_clean(self, seconds: float = 60) -> None:
        """Wait until nothing of any run is left; fails when there is."""
        give_up_at = time.monotonic() + seconds
        while left := self.left():
            assert time.monotonic() < give_up_at, f"left behind: {left}"
            time.sleep(0.05 if not self.real else 1)

    def close(self) -> None:
        """Take everything down."""
        raise NotImplementedError


class FakeSite(Site):
    """The fake cluster `fake`, with storage that the console shares."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fake = FakeCluster(folder / "nodes")
        kubeconfig = self.fake.server.kubeconfig(folder / "kubeconfig")
        root = folder / "volume"
        root.mkdir(mode=0o755)
        super().__init__(kubeconfig, "trainyard-runs", root)
        self.fake.make("namespaces", "", self.namespace)

    def volume(self) -> dict[str, Any]:
        """A folder of this machine, which is every node's."""
        return {"host_path": str(self.root), "root": str(self.root)}

    def close(self) -> None:
        """End the fake."""
        self.fake.close()


class StagedSite(Site):
    """A cluster reached by its API alone: files get to its machines by pods that write them there."""

    real = True
    shared = False

    def __init__(self, kubeconfig: Path) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="trainyard-k8s-"))
        self._folder.chmod(0o755)  # a console's database, which is another user, lies in it
        name = f"trainyard-test-{secrets.token_hex(4)}"
        # In a folder that every machine has, whatever else of its disk is read-only.
        self._parent = os.environ.get("TRAINYARD_TEST_HOST_PATH", "/tmp")
        super().__init__(kubeconfig, name, self._folder)
        self.machines = self._find_machines()
        self.core.create_namespace(
            {"metadata": {"name": name, "labels": {"pod-security.kubernetes.io/enforce": "privileged"}}}
        )
        try:
            self.place({"ready": "yes"})
        except BaseException:
            self.close()
            raise

    @property
    def host_path(self) -> str:
        """The folder on each machine."""
        return f"{self._parent}/{self.namespace}"

    def volume(self) -> dict[str, Any]:
        """A folder of each machine, which this one does not see."""
        return {"host_path": self.host_path, "root": str(self.root), "shared": False}

    def _find_machines(self) -> list[str]:
        """The machines that take pods."""
        found = []
        for node in self.core.list_node().items:
            taints = [taint for taint in node.spec.taints or [] if taint.effect in {"NoSchedule", "NoExecute"}]
            ready = any(one.type == "Ready" and one.status == "True" for one in node.status.conditions or [])
            if ready and not taints and not node.spec.unschedulable:
                found.append(node.metadata.name)
        assert found, "The cluster has no machine that takes pods."
        return found

    def place(self, files: Mapping[str, str | None]) -> None:
        """Write the files here, for what reads along, and on every machine."""
        super().place(files)
        changes = [{"path": path, "text": text} for path, text in files.items()]
        self._on_machines(_PLACE, [self.namespace], {"changes.json": json.dumps(changes)})

    def _on_machines(self, source: str, arguments: list[str], files: dict[str, str]) -> None:
        """Run a script as root on every machine, with the parent of our folder at /host."""
        name = f"staging-{secrets.token_hex(4)}"
        self.core.create_namespaced_config_map(
            self.namespace, {"metadata": {"name": name}, "data": {**files, "stage.py": source}}
        )
        names = {machine: f"{name}-{number}" for number, machine in enumerate(self.machines)}
        try:
            for machine, pod in names.items():
                self.core.create_namespaced_pod(self.namespace, self._stager(pod, machine, name, arguments))
            for pod in names.values():
                self._wait_for(pod)
        finally:
            for pod in names.values():
                with contextlib.suppress(kubernetes.client.ApiException):
                    self.core.delete_namespaced_pod(pod, self.namespace, grace_period_seconds=0)
            self.core.delete_namespaced_config_map(name, self.namespace)

    def _stager(self, pod: str, machine: str, staged: str, arguments: list[str]) -> Object:
        return {
            "metadata": {"name": pod},
            "spec": {
                "restartPolicy": "Never",
                "automountServiceAccountToken": False,
                "terminationGracePeriodSeconds": 1,
                "nodeSelector": {"kubernetes.io/hostname": machine},
                "tolerations": [{"operator": "Exists"}],
                "securityContext": {"runAsUser": 0, "runAsGroup": 0},
                "containers": [
                    {
                        "name": "stage",
                        "image": IMAGE,
                        "imagePullPolicy": "IfNotPresent",
                        "command": ["python3", "/staged/stage.py", *arguments],
                        "volumeMounts": [
                            {"name": "host", "mountPath": "/host"},
                            {"name": "staged", "mountPath": "/staged"},
                        ],
                    }
                ],
                "volumes": [
                    {"name": "host", "hostPath": {"path": self._parent, "type": "Directory"}},
                    {"name": "staged", "configMap": {"name": staged}},
                ],
            },
        }

    def _wait_for(self, pod: str) -> None:
        give_up_at = time.monotonic() + _STAGING_SECONDS
        while True:
            found = self.core.read_namespaced_pod(pod, self.namespace)
            if found.status.phase == "Succeeded":
                return
            told = [one.state.to_dict() for one in found.status.container_statuses or []]
            failed = found.status.phase == "Failed" or time.monotonic() > give_up_at
            if failed:
                ran = any(state["terminated"] for state in told)
                log = self.core.read_namespaced_pod_log(pod, self.namespace) if ran else found.status.conditions
                raise AssertionError(f"staging did not work: {found.status.phase} {told} {log}")
            time.sleep(0.2)

    def close(self) -> None:
        """Remove our folder from the machines, and the namespace."""
        try:
            self._on_machines(_REMOVE, [self.namespace], {})
        finally:
            self.core.delete_namespace(self.namespace)
            give_up_at = time.monotonic() + _GONE_SECONDS
            while time.monotonic() < give_up_at and self._is_there():
                time.sleep(0.5)
            shutil.rmtree(self._folder, ignore_errors=True)
            assert not self._is_there(), f"The namespace {self.namespace} does not go away."

    def _is_there(self) -> bool:
        try:
            self.core.read_namespace(self.namespace)
        except kubernetes.client.ApiException as error:
            if error.status != 404:
                raise
            return False
        return True


_REMOVE = """
import pathlib, shutil, sys
assert sys.argv[1].startswith("trainyard-test-")
path = pathlib.Path("/host") / sys.argv[1]
shutil.rmtree(path, ignore_errors=True)
assert not path.exists()
"""


def real_kubeconfig() -> Path | None:
    """The real cluster's, where tests are to use one."""
    told = os.environ.get("KUBECONFIG", "")
    return Path(told) if told else None


def open_site(folder: Path) -> Iterator[Site]:
    """The cluster that tests are to use, until they are done with it."""
    kubeconfig = real_kubeconfig()
    site: Site = StagedSite(kubeconfig) if kubeconfig else FakeSite(folder)
    try:
        yield site
    finally:
        site.close()


def built_torch() -> Path | None:
    """The built pytorch image, for the fake."""
    folder = IMAGES / "pytorch"
    return folder if (folder / "ready.json").exists() else None
