"""Runs that go on a fake cluster, and what is waited for there."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from runtime.backends.kubernetes import KubernetesBackend
from runtime.backends.kubernetes_config import ClusterConfig
from runtime.specs import RunStatus, WaitingCode
from tests.kubernetes.cluster import FakeCluster
from tests.kubernetes.yard import ClusterYard

SLEEP = "import time\nprint('up', flush=True)\ntime.sleep(300)"
NAME = "job-1-1"


def until(found: Callable[[], Any], seconds: float = 60) -> Any:
    give_up_at = time.monotonic() + seconds
    while not (result := found()):
        assert time.monotonic() < give_up_at
        time.sleep(0.05)
    return result


def going(yard: ClusterYard, **changes: Any) -> RunStatus:
    yard.backend.submit(yard.spec(SLEEP, grace_seconds=1, **changes))
    return yard.wait_for_text("up")


def job_of(cluster: FakeCluster, name: str = NAME) -> dict[str, Any]:
    return next(job for job in cluster.store.find("jobs") if job["metadata"]["name"] == name)


def waits_for(yard: ClusterYard, code: WaitingCode) -> RunStatus:
    return yard.wait(NAME, lambda status: status.waiting_code == code)


def limited(
    yard: ClusterYard, fake: FakeCluster, config: ClusterConfig, rules: list[dict[str, Any]]
) -> KubernetesBackend:
    """A backend that may do what these rules say, in the namespace of runs."""
    fake.make("roles", config.namespace, "r", rules=rules)
    fake.make("serviceaccounts", config.namespace, "a")
    subject = {"kind": "ServiceAccount", "name": "a", "namespace": config.namespace}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "r"}
    fake.make("rolebindings", config.namespace, "b", roleRef=reference, subjects=[subject])
    token = fake.server.access.token_for(config.namespace, "a")
    path = yard.site.root.parent / "limited"
    fake.server.kubeconfig(path, token)
    return KubernetesBackend(config=dataclasses.replace(config, kubeconfig=str(path)), root=yard.site.root / "runs")
