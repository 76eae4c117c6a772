"""Runs on a fake cluster, and conditions to wait for."""

import dataclasses

from runtime.backends.kubernetes.backend import KubernetesBackend
from runtime.backends.kubernetes.rbac import rbac
from tests.runtime.backends.contract import WAIT

NAME = "job-1-1"
LIMITED_ROLE = "limited"
"""The Role of backends with limited permissions."""


def start(harness, **changes):
    """Start a run whose ranks only wait, and return once every rank is ready."""
    harness.start(WAIT, grace_seconds=1, **changes)


def job_of(cluster, name=NAME):
    """Return the Job of a run, as the fake cluster stores it."""
    return next(job for job in cluster.store.find("jobs") if job["metadata"]["name"] == name)


def wait_for_code(harness, code):
    """Return the first status that gives this code as the reason why the run waits."""
    return harness.wait(NAME, lambda status: status.waiting_code == code)


def create_limited_backend(harness, fake, config):
    """Return a backend that has only the permissions of the console's Role."""
    return KubernetesBackend(config=limit_config(harness, fake, config), root=harness.site.root / "runs")


def limit_config(harness, fake, config):
    """Return the settings with a kubeconfig that has only the permissions of the console's Role."""
    (role,) = [each for each in rbac(config) if each["kind"] == "Role"]
    fake.make("roles", config.namespace, LIMITED_ROLE, rules=role["rules"])
    fake.make("serviceaccounts", config.namespace, "a")
    subject = {"kind": "ServiceAccount", "name": "a", "namespace": config.namespace}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": LIMITED_ROLE}
    fake.make("rolebindings", config.namespace, "b", roleRef=reference, subjects=[subject])
    token = fake.server.access.token_for(config.namespace, "a")
    path = harness.site.root.parent / "limited"
    fake.server.kubeconfig(path, token)
    return dataclasses.replace(config, kubeconfig=str(path))


def forbid(fake, config, resource):
    """Take the rule for a resource, such as "jobs", from the Role of limited backends."""

    def remove(role):
        role["rules"] = [rule for rule in role["rules"] if rule["resources"] != [resource]]

    fake.store.edit("roles", config.namespace, LIMITED_ROLE, remove)
