"""What the fake API server serves, and how an API error looks. PURE.

The one rule: what is not in this table does not exist (404), as for a real server without that API group.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

Object = dict[str, Any]


class ApiError(Exception):
    """An answer other than 2xx: a `Status` object."""

    def __init__(self, code: int, reason: str, message: str, details: Object | None = None) -> None:
        super().__init__(message)
        self.code, self.reason, self.message, self.details = code, reason, message, details or {}

    def status(self) -> Object:
        """As the server says it."""
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "details": self.details,
            "code": self.code,
        }


@dataclass(frozen=True)
class Resource:
    """One kind of object: where it is served and which of its parts are written apart."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    subresources: frozenset[str] = field(default_factory=frozenset)

    @property
    def api_version(self) -> str:
        """As an object says it."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def not_found(self, name: str) -> ApiError:
        """404."""
        qualified = f"{self.plural}.{self.group}" if self.group else self.plural
        return ApiError(404, "NotFound", f'{qualified} "{name}" not found', {"name": name, "kind": self.plural})

    def conflict(self, name: str, why: str) -> ApiError:
        """409 of an update."""
        message = f'Operation cannot be fulfilled on {self.plural} "{name}": {why}'
        return ApiError(409, "Conflict", message, {"name": name, "kind": self.plural})

    def invalid(self, name: str, causes: list[tuple[str, str]]) -> ApiError:
        """422, with the fields at fault."""
        told = ", ".join(f"{where}: {what}" for where, what in causes)
        details = {
            "name": name,
            "kind": self.kind,
            "causes": [{"reason": "FieldValueInvalid", "message": what, "field": where} for where, what in causes],
        }
        return ApiError(422, "Invalid", f'{self.kind} "{name}" is invalid: {told}', details)


def _core(plural: str, kind: str, *subresources: str, namespaced: bool = True) -> Resource:
    return Resource("", "v1", plural, kind, namespaced, frozenset(subresources))


TABLE = (
    _core("namespaces", "Namespace", "status", namespaced=False),
    _core("nodes", "Node", "status", namespaced=False),
    _core("persistentvolumes", "PersistentVolume", "status", namespaced=False),
    _core("pods", "Pod", "status", "log", "eviction"),
    _core("services", "Service", "status"),
    _core("secrets", "Secret"),
    _core("configmaps", "ConfigMap"),
    _core("events", "Event"),
    _core("serviceaccounts", "ServiceAccount", "token"),
    _core("resourcequotas", "ResourceQuota", "status"),
    _core("limitranges", "LimitRange"),
    _core("persistentvolumeclaims", "PersistentVolumeClaim", "status"),
    Resource("batch", "v1", "jobs", "Job", True, frozenset({"status"})),
    Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy"),
    Resource("storage.k8s.io", "v1", "storageclasses", "StorageClass", False),
    Resource("scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass", False),
    Resource("rbac.authorization.k8s.io", "v1", "roles", "Role"),
    Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding"),
    Resource("rbac.authorization.k8s.io", "v1", "clusterroles", "ClusterRole", False),
    Resource("rbac.authorization.k8s.io", "v1", "clusterrolebindings", "ClusterRoleBinding", False),
    Resource("authorization.k8s.io", "v1", "selfsubjectaccessreviews", "SelfSubjectAccessReview", False),
)
KUEUE = (
    Resource("kueue.x-k8s.io", "v1beta1", "localqueues", "LocalQueue", True, frozenset({"status"})),
    Resource("kueue.x-k8s.io", "v1beta1", "clusterqueues", "ClusterQueue", False, frozenset({"status"})),
    Resource("kueue.x-k8s.io", "v1beta1", "workloads", "Workload", True, frozenset({"status"})),
)
"""Served where Kueue is installed (`Cluster.install_kueue`)."""
BY_PLURAL = {resource.plural: resource for resource in TABLE + KUEUE}

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUANTITY = re.compile(r"([+-]?\d+(?:\.\d*)?|[+-]?\.\d+)(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei|[eE][+-]?\d+)?")
_UNITS = {"m": 1e-3, "": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_UNITS |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60}


def quantity(value: object) -> float:
    """A resource quantity as a number. Raises ValueError."""
    match = _QUANTITY.fullmatch(str(value))
    if match is None:
        raise ValueError(f"quantities must match the regular expression, not {value!r}")
    number, unit = match.group(1), match.group(2) or ""
    return float(number) * (_UNITS[unit] if unit in _UNITS else 10 ** float(unit[1:]))


def now() -> str:
    """The time as objects have it: whole seconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def later(text: str, seconds: float) -> str:
    """So many seconds after a time."""
    return (datetime.fromisoformat(text) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_of(text: str) -> float:
    """The inverse of `now`, as Unix seconds."""
    return datetime.fromisoformat(text).timestamp()
