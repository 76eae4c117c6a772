"""The permissions that the console needs on a cluster, as rules and as RBAC manifests. Pure.

The console uses only the verbs that are listed here; `check` asks the cluster whether each is permitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from runtime.backends.kubernetes.config import ClusterConfig
from runtime.backends.kubernetes.names import MANAGED_BY_LABEL, MANAGER
from runtime.backends.kubernetes.objects import Manifest

ROLE = "trainyard-runs"
"""The name of the Role, and the prefix of the ClusterRole's name."""


class Rule(NamedTuple):
    """Permitted verbs on one resource."""

    group: str
    resource: str
    verbs: tuple[str, ...]
    is_needed: bool = True
    """Whether runs need the permission. If they do not, the console only shows less without it."""


_MANAGE = ("create", "delete", "get", "patch")
"""Verbs for objects that the console creates and never lists."""
IN_NAMESPACE = (
    Rule("batch", "jobs", ("create", "delete", "get", "list", "patch", "watch")),
    Rule("", "pods", ("delete", "get", "list", "watch")),
    Rule("", "pods/log", ("get",)),
    Rule("", "pods/portforward", ("create", "get")),
    Rule("", "configmaps", ("create", "delete", "get", "list", "patch")),
    Rule("", "secrets", _MANAGE),
    Rule("", "services", _MANAGE),
    Rule("networking.k8s.io", "networkpolicies", _MANAGE),
    Rule("", "events", ("list", "watch")),
    Rule("", "persistentvolumeclaims", ("get",)),
)
"""Permissions in the namespace of runs, or in all namespaces if each organization has one."""
CLUSTER_WIDE = (
    Rule("", "nodes", ("get", "list"), is_needed=False),
    Rule("", "pods", ("list",), is_needed=False),
    Rule("storage.k8s.io", "storageclasses", ("list",), is_needed=False),
)
"""Permissions to count free resources and to detect lost machines early. With the setting `capacity`, the console can
do without the count."""
# Permissions for a cluster with a Kueue queue, and for a cluster with a namespace per organization.
_QUEUE = (
    Rule("kueue.x-k8s.io", "workloads", ("list",), is_needed=False),
    Rule("kueue.x-k8s.io", "localqueues", ("get",), is_needed=False),
)
_ORGANIZATIONS = (
    Rule("", "namespaces", ("create", "get", "patch")),
    Rule("", "resourcequotas", ("create", "get", "patch")),
    Rule("", "limitranges", ("create", "get", "patch")),
)


def rules(config: ClusterConfig) -> Iterator[tuple[Rule, str]]:
    """Yield each rule that this cluster's settings need, with its namespace ("" for all)."""
    namespace = "" if config.namespace_per_organization else config.namespace
    for rule in (*IN_NAMESPACE, *(_QUEUE if config.queue else ())):
        yield rule, namespace
    for rule in (*CLUSTER_WIDE, *(_ORGANIZATIONS if config.namespace_per_organization else ())):
        yield rule, ""


def rbac(
    config: ClusterConfig, *, service_account: str = "trainyard", service_account_namespace: str = "trainyard"
) -> list[Manifest]:
    """Return the manifests of a service account with exactly these permissions."""
    namespaced = [_policy_rule(rule) for rule, namespace in rules(config) if namespace]
    cluster_wide = [_policy_rule(rule) for rule, namespace in rules(config) if not namespace]
    subject = {"kind": "ServiceAccount", "name": service_account, "namespace": service_account_namespace}
    labels = {MANAGED_BY_LABEL: MANAGER}
    objects: list[Manifest] = [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": service_account, "namespace": service_account_namespace, "labels": labels},
        }
    ]
    for kind, rule_list in (("Role", namespaced), ("ClusterRole", cluster_wide)):
        if not rule_list:
            continue
        meta = {"name": ROLE if kind == "Role" else f"{ROLE}-{config.namespace}", "labels": labels}
        if kind == "Role":
            meta["namespace"] = config.namespace
        version = {"apiVersion": "rbac.authorization.k8s.io/v1"}
        role_ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": meta["name"]}
        objects += [
            {**version, "kind": kind, "metadata": meta, "rules": rule_list},
            {**version, "kind": f"{kind}Binding", "metadata": meta, "roleRef": role_ref, "subjects": [subject]},
        ]
    return objects


def _policy_rule(rule: Rule) -> Manifest:
    return {"apiGroups": [rule.group], "resources": [rule.resource], "verbs": list(rule.verbs)}
