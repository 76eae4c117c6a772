"""The resources that the fake API server serves, and its error responses.

A resource that is not in this table does not exist (404).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

Object = dict[str, Any]


class ApiError(Exception):
    """A response other than 2xx."""

    def __init__(self, code: int, reason: str, message: str, details: Object | None = None) -> None:
        super().__init__(message)
        self.code, self.reason, self.message, self.details = code, reason, message, details or {}

    def status(self) -> Object:
        """Return the `Status` object of the response."""
        return {
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": self.message,
            "reason": self.reason, "details": self.details, "code": self.code,
        }  # fmt: skip


@dataclass(frozen=True)
class Resource:
    """One kind of object, and where it is served."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    has_status: bool = False
    subresources: tuple[str, ...] = ()

    @property
    def api_version(self) -> str:
        """The `apiVersion` of its objects."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def not_found(self, name: str) -> ApiError:
        """Return the response to a request for an object that does not exist."""
        qualified = f"{self.plural}.{self.group}" if self.group else self.plural
        return ApiError(404, "NotFound", f'{qualified} "{name}" not found', {"name": name, "kind": self.plural})

    def conflict(self, name: str, why: str) -> ApiError:
        """Return the response to a write whose precondition does not hold."""
        message = f'Operation cannot be fulfilled on {self.plural} "{name}": {why}'
        return ApiError(409, "Conflict", message, {"name": name, "kind": self.plural})

    def invalid(self, name: str, causes: list[tuple[str, str]]) -> ApiError:
        """Return the response to an invalid object; `causes` are fields and what is wrong with them."""
        message = ", ".join(f"{field}: {problem}" for field, problem in causes)
        details = {"causes": [{"reason": "FieldValueInvalid", "message": why, "field": field} for field, why in causes]}
        return ApiError(422, "Invalid", f'{self.kind} "{name}" is invalid: {message}', details)


_RBAC = "rbac.authorization.k8s.io"
TABLE = (
    Resource("", "v1", "namespaces", "Namespace", namespaced=False, has_status=True),
    Resource("", "v1", "nodes", "Node", namespaced=False, has_status=True),
    Resource("", "v1", "persistentvolumes", "PersistentVolume", namespaced=False, has_status=True),
    Resource("", "v1", "pods", "Pod", has_status=True, subresources=("log", "eviction", "portforward")),
    Resource("", "v1", "services", "Service", has_status=True),
    Resource("", "v1", "secrets", "Secret"),
    Resource("", "v1", "configmaps", "ConfigMap"),
    Resource("", "v1", "events", "Event"),
    Resource("", "v1", "serviceaccounts", "ServiceAccount", subresources=("token",)),
    Resource("", "v1", "resourcequotas", "ResourceQuota", has_status=True),
    Resource("", "v1", "limitranges", "LimitRange"),
    Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", has_status=True),
    Resource("batch", "v1", "jobs", "Job", has_status=True),
    Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy"),
    Resource("storage.k8s.io", "v1", "storageclasses", "StorageClass", namespaced=False),
    Resource(_RBAC, "v1", "roles", "Role"),
    Resource(_RBAC, "v1", "rolebindings", "RoleBinding"),
    Resource(_RBAC, "v1", "clusterroles", "ClusterRole", namespaced=False),
    Resource(_RBAC, "v1", "clusterrolebindings", "ClusterRoleBinding", namespaced=False),
    Resource("authorization.k8s.io", "v1", "selfsubjectaccessreviews", "SelfSubjectAccessReview", namespaced=False),
)
BY_PLURAL = {resource.plural: resource for resource in TABLE}

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUANTITY = re.compile(r"([+-]?\d+(?:\.\d*)?|[+-]?\.\d+)(m|k|Ki|M|Mi|G|Gi|T|Ti)?")
_UNITS = {"m": 1e-3, "": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def quantity(value: object) -> float:
    """Return a resource quantity as a number. Raises ValueError."""
    match = _QUANTITY.fullmatch(str(value))
    if match is None:
        raise ValueError(f"quantities must match the regular expression, not {value!r}")
    return float(match.group(1)) * _UNITS[match.group(2) or ""]


def now() -> str:
    """Return the current time as objects hold it, in whole seconds."""
    return timestamp(datetime.now(UTC).timestamp())


def timestamp(seconds: float) -> str:
    """Return Unix seconds as objects hold them."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def later(text: str, seconds: float) -> str:
    """Return the time `seconds` after another one."""
    return timestamp((datetime.fromisoformat(text) + timedelta(seconds=seconds)).timestamp())


def seconds_of(text: str) -> float:
    """Return a time of an object as Unix seconds."""
    return datetime.fromisoformat(text).timestamp()
