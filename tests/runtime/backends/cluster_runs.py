"""Runs on a fake cluster, and conditions to wait for."""

import dataclasses

from runtime.backends.kubernetes.backend import KubernetesBackend
from tests.runtime.backends.contract import WAIT

NAME = "job-1-1"


def start(harness, **changes):
    """Start a run that waits, and return once every rank does."""
    harness.start(WAIT, grace_seconds=1, **changes)


def job_of(cluster, name=NAME):
    return next(job for job in cluster.store.find("jobs") if job["metadata"]["name"] == name)


def wait_for_code(harness, code):
    return harness.wait(NAME, lambda status: status.waiting_code == code)


def create_limited_backend(harness, fake, config, rules):
    """A backend with only the permissions of these rules, in the namespace of runs."""
    fake.make("roles", config.namespace, "r", rules=rules)
    fake.make("serviceaccounts", config.namespace, "a")
    subject = {"kind": "ServiceAccount", "name": "a", "namespace": config.namespace}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "r"}
    fake.make("rolebindings", config.namespace, "b", roleRef=reference, subjects=[subject])
    token = fake.server.access.token_for(config.namespace, "a")
    path = harness.site.root.parent / "limited"
    fake.server.kubeconfig(path, token)
    return KubernetesBackend(config=dataclasses.replace(config, kubeconfig=str(path)), root=harness.site.root / "runs")
