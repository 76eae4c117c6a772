"""Where the tests' runs go: the fake cluster here, or a real one (`staged`). Both give the same things.

The one rule: a site is all that a test knows of its cluster; `close` leaves nothing of it.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes.client
import kubernetes.config

from runtime.backends.kubernetes_api import Api, path_of
from runtime.backends.kubernetes_config import ClusterConfig
from tests.kubernetes.cluster import FakeCluster
from tests.kubernetes.images import PYTHON
from tests.kubernetes.needs import await_account
from tests.runtime.images_of_ours import IMAGES

IMAGE = os.environ.get("TRAINYARD_TEST_IMAGE", PYTHON)
TORCH_IMAGE = os.environ.get("TRAINYARD_TEST_TORCH_IMAGE", "")
UID = 10001


def write_kubeconfig(path: Path, cluster: Mapping[str, Any], user: Mapping[str, Any]) -> Path:
    """A kubeconfig with one context."""
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": dict(cluster)}],
        "users": [{"name": "test", "user": dict(user)}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": "default"}}],
    }
    path.write_text(json.dumps(content))
    return path


class Site:
    """One cluster. `root` is where this machine has the volume's files, `shared` whether pods have the very same."""

    real = False
    shared = True
    late_seconds = 5.0
    """What may pass from when a container begins until all nodes of its run know each other, beside whole seconds."""

    def __init__(self, kubeconfig: Path, namespace: str, root: Path) -> None:
        self.kubeconfig, self.namespace, self.root = kubeconfig, namespace, root
        self.placed: dict[str, str] = {}
        """What yards have written, by its path."""
        client = self.client = kubernetes.config.new_client_from_config(str(kubeconfig))
        self.core = kubernetes.client.CoreV1Api(client)
        self.batch = kubernetes.client.BatchV1Api(client)
        self.rbac = kubernetes.client.RbacAuthorizationV1Api(client)
        self.network = kubernetes.client.NetworkingV1Api(client)

    def config(self, **changes: Any) -> ClusterConfig:
        """The cluster as a console is told of it."""
        return ClusterConfig.from_data("test", self.settings(**changes))

    def kubeconfig_of(self, token: str, path: Path) -> Path:
        """A kubeconfig for the same server, of whoever has this token; with no file beside it that it needs."""
        told = self.client.configuration
        cluster: dict[str, Any] = {"server": told.host}
        if told.ssl_ca_cert:
            content = Path(told.ssl_ca_cert).read_bytes()
            cluster["certificate-authority-data"] = base64.b64encode(content).decode()
        if not told.verify_ssl:
            cluster["insecure-skip-tls-verify"] = True
        if told.tls_server_name:
            cluster["tls-server-name"] = told.tls_server_name
        return write_kubeconfig(path, cluster, {"token": token})

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

    def log(self, pod: str, **query: str) -> str:
        """What a pod has printed. By our own client: the official one gives bytes as text that says they are."""
        path = path_of("v1", "pods", self.namespace, pod, "log")
        return b"".join(Api(self.config()).text(path, **query)).decode("utf-8", "replace")

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
        self.fake = FakeCluster(folder / "nodes", secure=True)
        kubeconfig = self.fake.server.kubeconfig(folder / "kubeconfig")
        root = folder / "volume"
        root.mkdir(mode=0o755)
        super().__init__(kubeconfig, "trainyard-runs", root)
        self.fake.make("namespaces", "", self.namespace)
        await_account(self.core, self.namespace)

    def volume(self) -> dict[str, Any]:
        """A folder of this machine, which is every node's."""
        return {"host_path": str(self.root), "root": str(self.root)}

    def close(self) -> None:
        """End the fake."""
        self.fake.close()


def built_torch() -> Path | None:
    """The built pytorch image, for the fake."""
    folder = IMAGES / "pytorch"
    return folder if (folder / "ready.json").exists() else None
