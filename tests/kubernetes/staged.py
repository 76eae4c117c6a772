"""A real cluster, reached by its API alone: files get to its machines by pods that write them there.

The one rule: everything is in one namespace and in one folder of each machine, both named for this very process, and
both are gone at the end, whatever happened. What the cluster lacks is said before anything is made.
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

from tests.kubernetes import needs
from tests.kubernetes.resources import Object
from tests.kubernetes.sites import IMAGE, UID, Site

MARK = "trainyard-test"
_STAGING_SECONDS = 180.0
_GONE_SECONDS = 180.0
_PULL_SECONDS = 20.0
"""An image that cannot be pulled for so long is not to be had."""
_PLACE = f"""
UID = {UID}
import json, os, pathlib, shutil, sys, time
assert sys.version_info >= (3, 8), "the image's python3 is older than 3.8"
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
print("time", time.time(), flush=True)
"""
_REMOVE = f"""
import pathlib, shutil, sys
assert sys.argv[1].startswith("{MARK}-")
path = pathlib.Path("/host") / sys.argv[1]
shutil.rmtree(path, ignore_errors=True)
assert not path.exists()
"""


class StagedSite(Site):
    """The cluster of a kubeconfig's current context, with storage that this machine does not see."""

    real = True
    shared = False
    late_seconds = 30.0

    def __init__(self, kubeconfig: Path) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="trainyard-k8s-"))
        self._folder.chmod(0o755)  # a console's database, which is another user, lies in it
        # In a folder that every machine has, whatever else of its disk is read-only.
        self._parent = os.environ.get("TRAINYARD_TEST_HOST_PATH", "/tmp")
        self._staged = False
        super().__init__(kubeconfig, f"{MARK}-{secrets.token_hex(4)}", self._folder)
        try:
            self.machines = needs.demand(self.config())
        except BaseException:
            shutil.rmtree(self._folder)
            raise
        labels = {"pod-security.kubernetes.io/enforce": "privileged", "app.kubernetes.io/managed-by": MARK}
        self.core.create_namespace({"metadata": {"name": self.namespace, "labels": labels}})
        try:
            needs.await_account(self.core, self.namespace)
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

    def place(self, files: Mapping[str, str | None]) -> None:
        """Write the files here, for what reads along, and on every machine."""
        super().place(files)
        changes = [{"path": path, "text": text} for path, text in files.items()]
        asked = time.time()
        said = self._on_machines(_PLACE, [self.namespace], {"changes.json": json.dumps(changes)})
        for machine, log in said.items() if not self._staged else ():
            needs.compare_clocks(machine, log, asked, time.time())
        self._staged = True

    def _on_machines(self, source: str, arguments: list[str], files: dict[str, str]) -> dict[str, str]:
        """Run a script as root on every machine, with the parent of our folder at /host. Gives what each printed."""
        name = f"staging-{secrets.token_hex(4)}"
        self.core.create_namespaced_config_map(
            self.namespace, {"metadata": {"name": name}, "data": {**files, "stage.py": source}}
        )
        names = {machine: f"{name}-{number}" for number, machine in enumerate(self.machines)}
        try:
            for machine, pod in names.items():
                self.core.create_namespaced_pod(self.namespace, self._stager(pod, machine, name, arguments))
            return {machine: self._wait_for(pod, machine) for machine, pod in names.items()}
        finally:
            for pod in names.values():
                with contextlib.suppress(kubernetes.client.ApiException):
                    self.core.delete_namespaced_pod(pod, self.namespace, grace_period_seconds=0)
            with contextlib.suppress(kubernetes.client.ApiException):
                self.core.delete_namespaced_config_map(name, self.namespace)

    def _stager(self, pod: str, machine: str, staged: str, arguments: list[str]) -> Object:
        # By its name, as a DaemonSet does: a label may say something else.
        here = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [machine]}]}
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [here]}}
        return {
            "metadata": {"name": pod},
            "spec": {
                "restartPolicy": "Never",
                "automountServiceAccountToken": False,
                "terminationGracePeriodSeconds": 1,
                "affinity": {"nodeAffinity": required},
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

    def _wait_for(self, pod: str, machine: str) -> str:
        """What it printed, once it has ended well."""
        give_up_at = time.monotonic() + _STAGING_SECONDS
        no_image_at = time.monotonic() + _PULL_SECONDS
        while True:
            found = self.core.read_namespaced_pod(pod, self.namespace)
            if found.status.phase == "Succeeded":
                return self.log(pod)
            told = [one.state.to_dict() for one in found.status.container_statuses or []]
            waits = next((state["waiting"] for state in told if state["waiting"]), None) or {}
            if waits.get("reason") in needs.NO_IMAGE and time.monotonic() > no_image_at:
                needs.refuse(needs.image_sentence(IMAGE, machine, f"{waits['reason']}: {waits.get('message')}"))
            if found.status.phase == "Failed" or time.monotonic() > give_up_at:
                ran = any(state["terminated"] for state in told)
                log = self.log(pod) if ran else found.status.conditions
                raise AssertionError(f"A pod that writes to {self._parent} of {machine} did not work: {told} {log}")
            time.sleep(0.2)

    def close(self) -> None:
        """Remove our folder from the machines, and the namespace."""
        try:
            if self._staged:
                self._on_machines(_REMOVE, [self.namespace], {})
        finally:
            self.core.delete_namespace(self.namespace)
            give_up_at = time.monotonic() + _GONE_SECONDS
            while (left := self._conditions()) is not None and time.monotonic() < give_up_at:
                time.sleep(0.5)
            shutil.rmtree(self._folder, ignore_errors=True)
            assert left is None, f"The namespace {self.namespace} does not go away: {left}"

    def _conditions(self) -> list[str] | None:
        """What keeps the namespace; None where it has gone."""
        try:
            found = self.core.read_namespace(self.namespace)
        except kubernetes.client.ApiException as error:
            if error.status != 404:
                raise
            return None
        return [f"{one.type}: {one.message}" for one in found.status.conditions or [] if one.status == "True"]
