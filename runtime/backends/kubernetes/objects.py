"""Read common fields of Kubernetes API objects. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

Object = Mapping[str, Any]
"""An API object as decoded from JSON, with the field names of the Kubernetes API reference."""
Manifest = dict[str, Any]
"""An API object to create or apply."""

TERMINAL_PHASES = frozenset({"Succeeded", "Failed"})
"""The Pod phases in which no container runs or will run again."""


def timestamp(text: str | None) -> float | None:
    """Convert an API timestamp (RFC 3339) to Unix seconds; None if there is none."""
    return datetime.fromisoformat(text).timestamp() if text else None


def object_annotations(item: Object) -> Mapping[str, str]:
    """Return the object's annotations."""
    annotations: Mapping[str, str] = item["metadata"].get("annotations") or {}
    return annotations


def object_labels(item: Object) -> Mapping[str, str]:
    """Return the object's labels."""
    labels: Mapping[str, str] = item["metadata"].get("labels") or {}
    return labels


def true_conditions(item: Object) -> dict[str, Object]:
    """Return the conditions of an object's status that are true, by type."""
    conditions = (item.get("status") or {}).get("conditions") or []
    return {condition["type"]: condition for condition in conditions if condition.get("status") == "True"}


def controller_uid(item: Object) -> str:
    """Return the UID of the owner that controls the object (the Job of a Pod); empty if there is none."""
    owners = item["metadata"].get("ownerReferences") or []
    return next((str(owner["uid"]) for owner in owners if owner.get("controller")), "")


def is_owned_by(item: Object, uid: str) -> bool:
    """Return whether the object with this UID is among the owners of `item`."""
    return any(owner["uid"] == uid for owner in item["metadata"].get("ownerReferences") or [])


def is_deleting(item: Object) -> bool:
    """Return whether the object's deletion was requested."""
    return bool(item["metadata"].get("deletionTimestamp"))


def pod_phase(pod: Object) -> str:
    """Return the Pod's phase; empty before the API server set one."""
    return str((pod.get("status") or {}).get("phase") or "")


def container_statuses(pod: Object) -> list[Object]:
    """Return the statuses of the Pod's containers."""
    statuses: list[Object] = (pod.get("status") or {}).get("containerStatuses") or []
    return statuses
