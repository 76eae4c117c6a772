"""A real cluster, reached by its API alone: Pods write the tests' files on its machines.

Everything is in one namespace and in one folder of each machine, both named for this process. Both are removed at the
end, also after failures.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes.client
import pytest

from runtime.backends.kubernetes.backend import check
from runtime.backends.kubernetes.capacity import compute_capacity
from runtime.backends.kubernetes.client import ApiClient, resource_path
from tests.kubernetes.resources import Object
from tests.kubernetes.sites import IMAGE, UID, Site

MARK = "trainyard-test"
"""What the names of the namespace and of the folder begin with."""
_STAGING_SECONDS = 180.0
"""How long a Pod that writes files may take, with its pull."""
_REMOVAL_SECONDS = 180.0
"""How long the removal of the namespace may take."""
_PLACE = f"""
import json, os, pathlib, sys
assert sys.version_info >= (3, 8), "the image's python3 is older than 3.8"
root = pathlib.Path("/host") / sys.argv[1]
for name, text in json.loads(pathlib.Path("/staged/files.json").read_text()).items():
    path = root / name
    for folder in [*reversed(path.relative_to(root).parents)]:
        (root / folder).mkdir(exist_ok=True)
        os.chown(root / folder, {UID}, {UID})
        (root / folder).chmod(0o755)
    path.write_text(text)
    os.chown(path, {UID}, {UID})
    path.chmod(0o644)
"""
"""The script of a Pod that writes files. Its argument is the name of our folder, whose parent it sees at /host."""
_REMOVE = f"""
import pathlib, shutil, sys
assert sys.argv[1].startswith("{MARK}-")
path = pathlib.Path("/host") / sys.argv[1]
shutil.rmtree(path, ignore_errors=True)
assert not path.exists()
"""
"""The script of a Pod that removes our folder, with the same argument."""


class RealSite(Site):
    """The cluster of a kubeconfig's current context, whose storage this machine does not share."""

    real = True
    shared = False
    late_seconds = 30.0

    def __init__(self, kubeconfig: Path) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="trainyard-k8s-"))
        self._folder.chmod(0o755)  # for a console's database, which runs as another user
        self._parent = os.environ.get("TRAINYARD_TEST_HOST_PATH", "/tmp")  # of our folder on each machine
        self._is_staged = False  # whether our folder exists there
        super().__init__(kubeconfig, f"{MARK}-{secrets.token_hex(4)}", self._folder)
        results = check(self.config(), self._folder, smoke=False)
        failed = [one for one in results if not one.ok and one.name != "namespace"]  # it is created below
        if problems := [f"{one.name}: {one.detail} {one.remedy}" for one in failed]:
            shutil.rmtree(self._folder)
            pytest.exit(f"The cluster of KUBECONFIG is not fit for the tests. {' '.join(problems)}", returncode=1)
        # Runs get no machine that is cordoned, not ready, or tainted in a way that the settings do not tolerate.
        nodes = ApiClient(self.config()).list(resource_path("v1", "nodes"))["items"]
        self.machines = [one.name for one in compute_capacity(nodes, (), self.config()).machines if one.free.cpus > 0]
        # `privileged`, because the Pods that write files run as root and mount folders of their machines.
        labels = {"pod-security.kubernetes.io/enforce": "privileged", "app.kubernetes.io/managed-by": MARK}
        self.core.create_namespace({"metadata": {"name": self.namespace, "labels": labels}})
        try:
            self.wait_for_account()
            self.place({"ready": "yes"})
        except BaseException:
            self.close()
            raise

    def volume(self) -> dict[str, Any]:
        """Return the setting `volume`: a folder of each machine."""
        return {"host_path": f"{self._parent}/{self.namespace}", "root": str(self.root), "shared": False}

    def place(self, files: Mapping[str, str]) -> None:
        """Write the files here and on every machine."""
        super().place(files)
        self._run_on_machines(_PLACE, {"files.json": json.dumps(files)})
        self._is_staged = True

    def _run_on_machines(self, source: str, files: dict[str, str]) -> None:
        """Run a script as root on every machine, with the parent of our folder at /host."""
        name = f"staging-{secrets.token_hex(4)}"
        content = {"metadata": {"name": name}, "data": {**files, "stage.py": source}}
        self.core.create_namespaced_config_map(self.namespace, content)
        names = {machine: f"{name}-{number}" for number, machine in enumerate(self.machines)}
        try:
            for machine, pod in names.items():
                self.core.create_namespaced_pod(self.namespace, self._staging_pod(pod, machine, name))
            for machine, pod in names.items():
                self._wait_for(pod, machine)
        finally:
            for pod in names.values():
                with contextlib.suppress(kubernetes.client.ApiException):
                    self.core.delete_namespaced_pod(pod, self.namespace, grace_period_seconds=0)
            with contextlib.suppress(kubernetes.client.ApiException):
                self.core.delete_namespaced_config_map(name, self.namespace)

    def _staging_pod(self, pod: str, machine: str, config_map: str) -> Object:
        # By name, as a DaemonSet does: a node's hostname label may differ.
        here = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [machine]}]}
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [here]}}
        container = {
            "name": "stage",
            "image": IMAGE,
            "imagePullPolicy": "IfNotPresent",
            "command": ["python3", "/staged/stage.py", self.namespace],
            "volumeMounts": [{"name": "host", "mountPath": "/host"}, {"name": "staged", "mountPath": "/staged"}],
        }
        spec = {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 1,
            "affinity": {"nodeAffinity": required},
            "tolerations": [{"operator": "Exists"}],
            "securityContext": {"runAsUser": 0, "runAsGroup": 0},
            "containers": [container],
            "volumes": [
                {"name": "host", "hostPath": {"path": self._parent, "type": "Directory"}},
                {"name": "staged", "configMap": {"name": config_map}},
            ],
        }
        return {"metadata": {"name": pod}, "spec": spec}

    def _wait_for(self, pod: str, machine: str) -> None:
        """Wait until a Pod has succeeded."""
        give_up_at = time.monotonic() + _STAGING_SECONDS
        while (status := self.core.read_namespaced_pod(pod, self.namespace).status).phase != "Succeeded":
            if status.phase == "Failed" or time.monotonic() > give_up_at:
                states = [one.state for one in status.container_statuses or []]
                advice = f"Put {IMAGE} on the machine, or set TRAINYARD_TEST_IMAGE." if status.phase != "Failed" else ""
                raise AssertionError(f"A Pod cannot write to {self._parent} of {machine}. {advice} {states}")
            time.sleep(0.2)

    def close(self) -> None:
        """Remove our folder from the machines, and the namespace."""
        try:
            if self._is_staged:
                self._run_on_machines(_REMOVE, {})
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
            self.core.delete_namespace(self.namespace)
            give_up_at = time.monotonic() + _REMOVAL_SECONDS
            selector = f"metadata.name={self.namespace}"
            while left := self.core.list_namespace(field_selector=selector).items:
                assert time.monotonic() < give_up_at, f"The namespace is not removed: {left[0].status.conditions}"
                time.sleep(0.5)
