"""The cluster that tests use: the fake one, or a real one (`real_cluster`), behind one interface."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes.client
import kubernetes.config

from runtime.backends.kubernetes.client import ApiClient, resource_path
from runtime.backends.kubernetes.config import ClusterConfig
from tests.console.processes import wait_for
from tests.kubernetes.apiserver import write_kubeconfig
from tests.kubernetes.cluster import NODES, FakeCluster
from tests.kubernetes.images import PYTHON

IMAGE = os.environ.get("TRAINYARD_TEST_IMAGE", PYTHON)
"""The image of runs: any with Python is enough."""
REAL_TORCH_IMAGE = os.environ.get("TRAINYARD_TEST_TORCH_IMAGE", "")
"""An image with PyTorch that a real cluster can pull; empty if none is named."""
UID = 10001
"""The user ID of the containers (the setting `uid`, by default), to which the files of the volume belong."""
ACCOUNT_SECONDS = 30.0
"""How long to wait for the default service account of a new namespace."""


class Site:
    """A cluster and a namespace in it. `root` is where this machine has the volume's files."""

    real = False
    """Whether it is a real cluster and not the fake one."""
    shared = True
    """Whether Pods see `root` itself. Otherwise they see files of their own machines."""
    late_seconds = 5.0
    """How long the nodes of a run may take to find each other, once their containers have started."""

    def __init__(self, kubeconfig: Path, namespace: str, root: Path) -> None:
        self.kubeconfig, self.namespace, self.root = kubeconfig, namespace, root
        self.placed: dict[str, str] = {}
        """The texts of the files that `KubernetesHarness.write` has placed in the volume, by path."""
        client = self.client = kubernetes.config.new_client_from_config(str(kubeconfig))
        self.core = kubernetes.client.CoreV1Api(client)
        self.batch = kubernetes.client.BatchV1Api(client)
        self.rbac = kubernetes.client.RbacAuthorizationV1Api(client)
        self.network = kubernetes.client.NetworkingV1Api(client)

    def config(self, **changes: Any) -> ClusterConfig:
        """Return the settings that a console has for the cluster."""
        return ClusterConfig.from_data("test", self.settings(**changes))

    def settings(self, **changes: Any) -> dict[str, Any]:
        """Return one value of TRAINYARD_CLUSTERS."""
        return {
            "backend": "kubernetes",
            "kubeconfig": str(self.kubeconfig),
            "namespace": self.namespace,
            "volume": self.volume(),
            "images": {"bare": IMAGE, "pytorch": REAL_TORCH_IMAGE or IMAGE},
        } | changes

    def volume(self) -> dict[str, Any]:
        """Return the setting `volume`."""
        return {"host_path": str(self.root), "root": str(self.root)}

    def kubeconfig_of(self, token: str, path: Path) -> Path:
        """Write a kubeconfig for the same server with this token, that needs no other file."""
        server = self.client.configuration
        cluster: dict[str, Any] = {"server": server.host}
        if server.ssl_ca_cert:
            authority = Path(server.ssl_ca_cert).read_bytes()
            cluster["certificate-authority-data"] = base64.b64encode(authority).decode()
        if not server.verify_ssl:
            cluster["insecure-skip-tls-verify"] = True
        if server.tls_server_name:
            cluster["tls-server-name"] = server.tls_server_name
        return write_kubeconfig(path, cluster, {"token": token})

    def place(self, files: Mapping[str, str]) -> None:
        """Write files of the volume, which Pods may change."""
        for path, text in files.items():
            where = self.root / path
            where.parent.mkdir(parents=True, exist_ok=True)
            where.write_text(text)
            if os.geteuid() == 0:
                for one in (where, *where.parents):
                    if one.is_relative_to(self.root):
                        os.chown(one, UID, UID)

    def log(self, pod: str) -> str:
        """Return a Pod's output. The official client does not return bytes as they are."""
        path = resource_path("v1", "pods", self.namespace, pod, "log")
        return b"".join(ApiClient(self.config()).stream(path)).decode("utf-8", "replace")

    def pods(self, run: str) -> list[Any]:
        """Return the Pods of a run, by node."""
        pods = self.core.list_namespaced_pod(self.namespace, label_selector=f"trainyard.dev/run={run}").items
        return sorted(pods, key=lambda pod: pod.metadata.name)

    def run_objects(self) -> list[str]:
        """Return the namespace's objects that belong to a run."""
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
            for item in find(self.namespace, label_selector="trainyard.dev/run").items
        ]

    def wait_for_account(self) -> None:
        """Wait for the namespace's default service account; without it no Pod is admitted."""
        accounts = self.core.list_namespaced_service_account
        wait_for(lambda: accounts(self.namespace, field_selector="metadata.name=default").items, ACCOUNT_SECONDS)

    def close(self) -> None:
        """Remove everything."""
        raise NotImplementedError


class FakeSite(Site):
    """A fake cluster whose storage the console shares."""

    def __init__(self, folder: Path, *, nodes: dict[str, dict[str, str]] = NODES, secure: bool = True) -> None:
        self.folder = folder
        self.fake = FakeCluster(folder / "nodes", nodes=nodes, secure=secure)
        root = folder / "volume"
        root.mkdir(mode=0o755)
        super().__init__(self.fake.server.kubeconfig(folder / "kubeconfig"), "trainyard-runs", root)
        self.fake.make("namespaces", "", self.namespace)
        self.wait_for_account()

    def close(self) -> None:
        """End the fake cluster."""
        self.fake.close()
