"""What a real cluster has to have, looked at before anything is made there, and said plainly where it has not.

The one rule: whoever started the tests reads one paragraph: what is missing, and what to do about it.
"""

from __future__ import annotations

import re
import time
from typing import Any, NoReturn

import pytest

from runtime.backends.kubernetes_api import Api, Refused, path_of
from runtime.backends.kubernetes_capacity import capacity
from runtime.backends.kubernetes_config import ClusterConfig
from runtime.errors import BackendUnavailable
from runtime.specs import Capacity

OLDEST = 31
ROOM = (0.5, 1024)
"""Cores and MiB that a pod of the largest run takes; there are two of it."""
NO_IMAGE = frozenset({"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName"})
_ACCOUNT_SECONDS = 30.0
_SKEW_SECONDS = 10.0
_VERBS = (
    ("", "namespaces", ("create", "delete", "get")),
    ("", "nodes", ("get", "list")),
    ("", "pods", ("create", "delete", "get", "list", "watch")),
    ("", "serviceaccounts", ("create", "get")),
    ("batch", "jobs", ("create", "delete", "get", "list", "patch", "watch")),
    ("rbac.authorization.k8s.io", "clusterroles", ("create", "delete")),
    ("rbac.authorization.k8s.io", "clusterrolebindings", ("create", "delete")),
)


def refuse(sentence: str) -> NoReturn:
    """End the tests with this sentence: none of them could pass."""
    pytest.exit(f"The cluster of KUBECONFIG is not fit for the tests. {sentence}", returncode=1)


def demand(config: ClusterConfig) -> list[str]:
    """The machines that take pods. Ends the tests where something is missing."""
    api = Api(config)
    try:
        version = api.get("/version")
        missing = [
            f"{verb} {what}" for group, what, verbs in _VERBS for verb in verbs if not _may(api, group, what, verb)
        ]
    except (BackendUnavailable, Refused) as error:
        refuse(f"Its API server does not let us in: {error}")
    minor = re.match(r"[0-9]+", str(version.get("minor", "")))
    if version.get("major") != "1" or minor is None or int(minor.group()) < OLDEST:
        refuse(f"It is Kubernetes {version.get('gitVersion')}; 1.{OLDEST} or later is needed.")
    if missing:
        refuse(f"The kubeconfig's user may not: {', '.join(missing)}. Use an administrator's.")
    nodes = api.list(path_of("v1", "nodes"))["items"]
    reasons = {node["metadata"]["name"]: _why_not(node) for node in nodes}
    machines = [name for name, why in reasons.items() if not why]
    if not machines:
        told = "; ".join(f"{name}: {why}" for name, why in reasons.items())
        refuse(f"No machine takes pods. {told or 'There is none'}.")
    _demand_room(capacity(nodes, api.list(path_of("v1", "pods"))["items"], config), machines)
    return machines


def _demand_room(found: Capacity, machines: list[str]) -> None:
    free = {one.name: one.free for one in found.machines if one.name in machines}
    places = sum(int(min(one.cpus // ROOM[0], one.memory_mib // ROOM[1])) for one in free.values())
    if places < 2:
        told = "; ".join(f"{name} has {one.cpus:g} cores and {one.memory_mib} MiB" for name, one in free.items())
        refuse(
            f"Two pods of {ROOM[0]} cores and {ROOM[1]} MiB must find room in what others have not reserved: {told}."
        )


def _may(api: Api, group: str, what: str, verb: str) -> bool:
    return api.review({"group": group, "resource": what, "verb": verb})


def _why_not(node: dict[str, Any]) -> str:
    """Why the machine takes no pods of ours; empty where it does."""
    spec, conditions = node.get("spec") or {}, (node.get("status") or {}).get("conditions") or []
    taints = [taint for taint in spec.get("taints") or [] if taint["effect"] in {"NoSchedule", "NoExecute"}]
    if not any(one["type"] == "Ready" and one["status"] == "True" for one in conditions):
        return "not ready"
    if spec.get("unschedulable"):
        return "cordoned"
    return f"tainted with {taints[0]['key']}" if taints else ""


def await_account(core: Any, namespace: str) -> None:
    """Wait for the new namespace's account: until it is there, no pod is let in."""
    give_up_at = time.monotonic() + _ACCOUNT_SECONDS
    while not core.list_namespaced_service_account(namespace, field_selector="metadata.name=default").items:
        if time.monotonic() > give_up_at:
            refuse(f"The namespace {namespace} is given no service account: does its controller manager run?")
        time.sleep(0.1)


def image_sentence(image: str, machine: str, said: str) -> str:
    """What to do about an image that a machine lacks."""
    return (
        f"The image {image} is not on the machine {machine} and cannot be pulled ({said}). Put it there, such as by "
        f"'ctr -n k8s.io images import', or name another with TRAINYARD_TEST_IMAGE."
    )


def compare_clocks(machine: str, log: str, before: float, after: float) -> None:
    """Times of a run are those of its machines: a clock that is far from this one's makes them run backwards."""
    told = re.search(r"^time ([0-9.]+)$", log, re.MULTILINE)
    assert told is not None, log
    off = max(before - float(told.group(1)), float(told.group(1)) - after)
    if off > _SKEW_SECONDS:
        refuse(f"The clock of {machine} is {off:.0f} s off this machine's: set both by NTP.")
