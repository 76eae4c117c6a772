"""What the console may do on a cluster: the least that it works with. PURE.

The one rule: a verb that is not listed here is not used; `kubernetes_check` asks the cluster for each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from runtime.backends.kubernetes_config import ClusterConfig
from runtime.backends.kubernetes_names import MANAGED_BY, MANAGER

Manifest = dict[str, Any]

ROLE = "trainyard-runs"


class Rule(NamedTuple):
    """What may be done with one kind of object. `needed` False: without it the console works, and says less."""

    group: str
    resource: str
    verbs: tuple[str, ...]
    needed: bool = True


_OWNED = ("create", "delete", "get", "patch")
IN_NAMESPACE = (
    Rule("batch", "jobs", ("create", "delete", "get", "list", "patch", "watch")),
    Rule("", "pods", ("delete", "get", "list", "watch")),
    Rule("", "pods/log", ("get",)),
    Rule("", "configmaps", ("create", "delete", "get", "list", "patch")),
    Rule("", "secrets", _OWNED),
    Rule("", "services", _OWNED),
    Rule("networking.k8s.io", "networkpolicies", _OWNED),
    Rule("", "events", ("list", "watch")),
    Rule("", "persistentvolumeclaims", ("get",)),
)
"""In the namespace of runs; in all of them where each organization has one."""
OF_CLUSTER = (
    Rule("", "nodes", ("get", "list"), needed=False),
    Rule("", "pods", ("list",), needed=False),
    Rule("storage.k8s.io", "storageclasses", ("list",), needed=False),
)
"""To see what is free, and sooner that a machine was lost. Without: the setting `capacity`."""
_QUEUE = (
    Rule("kueue.x-k8s.io", "workloads", ("list",), needed=False),
    Rule("kueue.x-k8s.io", "localqueues", ("get",), needed=False),
)
_ORGANIZATIONS = (
    Rule("", "namespaces", ("create", "get", "patch")),
    Rule("", "resourcequotas", ("create", "get", "patch")),
    Rule("", "limitranges", ("create", "get", "patch")),
)


def rules(config: ClusterConfig) -> Iterator[tuple[Rule, str]]:
    """What this cluster asks for, and in which namespace ("": in all)."""
    namespace = "" if config.namespace_per_organization else config.namespace
    for rule in (*IN_NAMESPACE, *(_QUEUE if config.queue else ())):
        yield rule, namespace
    for rule in (*OF_CLUSTER, *(_ORGANIZATIONS if config.namespace_per_organization else ())):
        yield rule, ""


def rbac(
    config: ClusterConfig, *, service_account: str = "trainyard", service_account_namespace: str = "trainyard"
) -> list[Manifest]:
    """The roles that let a service account do it, and no more, as objects to apply."""
    inside = [_rule(rule) for rule, namespace in rules(config) if namespace]
    everywhere = [_rule(rule) for rule, namespace in rules(config) if not namespace]
    subject = {"kind": "ServiceAccount", "name": service_account, "namespace": service_account_namespace}
    told = {MANAGED_BY: MANAGER}
    made: list[Manifest] = [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": service_account, "namespace": service_account_namespace, "labels": told},
        }
    ]
    for kind, listed in (("Role", inside), ("ClusterRole", everywhere)):
        if not listed:
            continue
        meta = {"name": ROLE if kind == "Role" else f"{ROLE}-{config.namespace}", "labels": told}
        if kind == "Role":
            meta["namespace"] = config.namespace
        api = {"apiVersion": "rbac.authorization.k8s.io/v1"}
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": meta["name"]}
        made += [
            {**api, "kind": kind, "metadata": meta, "rules": listed},
            {**api, "kind": f"{kind}Binding", "metadata": meta, "roleRef": role, "subjects": [subject]},
        ]
    return made


def _rule(rule: Rule) -> Manifest:
    return {"apiGroups": [rule.group], "resources": [rule.resource], "verbs": list(rule.verbs)}
