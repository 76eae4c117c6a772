"""The objects of the fake cluster, with resource versions, history, finalizers and grace periods.

All kinds share one sequence of versions.
"""

from __future__ import annotations

import copy
import secrets
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from tests.kubernetes.resources import BY_PLURAL, ApiError, Object, Resource, later, now

Key = tuple[str, str, str]
"""Plural, namespace (empty for none), name."""
_SERVER_FIELDS = (
    "uid", "creationTimestamp", "generation", "deletionTimestamp", "deletionGracePeriodSeconds", "resourceVersion",
    "namespace",
)  # fmt: skip
"""Parts of the metadata that clients cannot change."""


@dataclass(frozen=True)
class Change:
    """One step of the history. `kind` is ADDED, MODIFIED or DELETED; `before` is None for ADDED."""

    version: int
    kind: str
    key: Key
    after: Object
    before: Object | None


class Store:
    """The objects of one cluster. Thread-safe: `changed` is its lock, and is notified of every change."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.version = 1000
        self.compacted = 1000  # the history begins after this version
        self.history: list[Change] = []
        self._objects: dict[Key, Object] = {}

    # Reading

    def get(self, plural: str, namespace: str, name: str) -> Object:
        """Return a copy of an object. Raises ApiError 404."""
        with self.changed:
            obj = self._objects.get((plural, namespace, name))
            if obj is None:
                raise BY_PLURAL[plural].not_found(name)
            return copy.deepcopy(obj)

    def find(self, plural: str, namespace: str = "", where: Callable[[Object], bool] | None = None) -> list[Object]:
        """Return copies of all objects of a kind, ordered by namespace and name."""
        with self.changed:
            found = {
                key: value
                for key, value in self._objects.items()
                if key[0] == plural and namespace in {"", key[1]} and (where is None or where(value))
            }
            return [copy.deepcopy(found[key]) for key in sorted(found)]

    def items(self) -> list[tuple[Key, Object]]:
        """Return all objects themselves, which the caller must not change. Tests leave many, so copies are slow."""
        with self.changed:
            return sorted(self._objects.items())

    def as_of(self, version: int) -> Store:
        """Return the objects as they were at that version."""
        past = Store()
        with self.changed:
            past._objects = copy.deepcopy(self._objects)
            past.version = version
            for change in reversed(self.history):
                if change.version <= version:
                    break
                if change.before is None:
                    past._objects.pop(change.key, None)
                else:
                    past._objects[change.key] = copy.deepcopy(change.before)
        return past

    def since(self, version: int) -> list[Change]:
        """Return the changes after that version. Raises ApiError 410 if the history begins later."""
        with self.changed:
            if version < self.compacted:
                raise ApiError(410, "Expired", f"too old resource version: {version} ({self.compacted})")
            first = len(self.history)
            while first and self.history[first - 1].version > version:
                first -= 1
            return self.history[first:]

    def compact(self) -> None:
        """Drop the history, as etcd does every five minutes."""
        with self.changed:
            self.version += 1
            self.compacted = self.version
            self.history.clear()

    # Writing

    def create(self, resource: Resource, wanted: Object) -> Object:
        """Add an object. Raises ApiError 409."""
        with self.changed:
            new = copy.deepcopy(wanted)
            meta = new["metadata"]
            if not meta.get("name"):
                meta["name"] = meta["generateName"] + secrets.token_hex(3)[:5]
            key = (resource.plural, meta.get("namespace", "") if resource.namespaced else "", meta["name"])
            if key in self._objects:
                message = f'{resource.plural} "{meta["name"]}" already exists'
                raise ApiError(409, "AlreadyExists", message, {"name": meta["name"], "kind": resource.plural})
            for name in ("resourceVersion", "deletionTimestamp", "deletionGracePeriodSeconds"):
                meta.pop(name, None)
            meta.setdefault("uid", str(uuid.uuid4()))
            meta["creationTimestamp"] = now()
            if resource.plural in {"jobs", "pods"}:
                meta["generation"] = 1
            new.setdefault("apiVersion", resource.api_version)
            new.setdefault("kind", resource.kind)
            return self._write("ADDED", key, new)

    def update(self, resource: Resource, wanted: Object) -> Object:
        """Replace an object, except its status. Raises ApiError 404, 409."""
        with self.changed:
            meta = wanted["metadata"]
            key = (resource.plural, meta.get("namespace", "") if resource.namespaced else "", meta["name"])
            old = self.get(*key)
            if meta.get("resourceVersion", old["metadata"]["resourceVersion"]) != old["metadata"]["resourceVersion"]:
                why = "the object has been modified; please apply your changes to the latest version"
                raise resource.conflict(meta["name"], why)
            new = copy.deepcopy(wanted)
            for name in _SERVER_FIELDS:  # keep the old values
                new["metadata"].pop(name, None)
                if name in old["metadata"]:
                    new["metadata"][name] = old["metadata"][name]
            if resource.has_status:
                new.pop("status", None)
                new |= {"status": old["status"]} if "status" in old else {}
            return self._replace(key, new)

    def edit(self, plural: str, namespace: str, name: str, change: Callable[[Object], object]) -> None:
        """Change an object in place, with its status, as controllers do. Do nothing if it does not exist."""
        with self.changed:
            if (plural, namespace, name) in self._objects:
                new = self.get(plural, namespace, name)
                change(new)
                self._replace((plural, namespace, name), new)

    def delete(self, plural: str, namespace: str, name: str, options: Object | None = None) -> Object:
        """Delete an object, or mark it as terminating. Raises ApiError 404, 409."""
        options = options or {}
        with self.changed:
            obj = self.get(plural, namespace, name)
            meta = obj["metadata"]
            for field, wanted in (options.get("preconditions") or {}).items():
                if wanted and wanted != meta[field]:
                    why = f"Precondition failed: {field}: {wanted}, in object meta: {meta[field]}"
                    raise BY_PLURAL[plural].conflict(name, why)
            grace = _grace_seconds(plural, obj, options)
            if not meta.get("finalizers") and not grace:
                return self._remove((plural, namespace, name), obj)
            if meta.get("deletionTimestamp"):
                before = meta.get("deletionGracePeriodSeconds", grace)
                grace = min(grace, before)
                meta["deletionTimestamp"] = later(meta["deletionTimestamp"], grace - before)
            else:
                meta["deletionTimestamp"] = later(now(), grace)  # the time at which the grace period ends
            meta["deletionGracePeriodSeconds"] = grace
            if obj == self._objects[plural, namespace, name]:
                return obj  # a repeated deletion that changes nothing
            return self._write("MODIFIED", (plural, namespace, name), obj)

    def remove_finalizer(self, plural: str, namespace: str, name: str, finalizer: str) -> None:
        """Remove a finalizer; a terminating object without any is removed."""

        def remove(obj: Object) -> None:
            left = [one for one in obj["metadata"].pop("finalizers", []) if one != finalizer]
            if left:
                obj["metadata"]["finalizers"] = left

        self.edit(plural, namespace, name, remove)

    def _replace(self, key: Key, new: Object) -> Object:
        old, meta = self._objects[key], new["metadata"]
        if new == old:
            return copy.deepcopy(old)
        if new.get("spec") != old.get("spec") and "generation" in meta:
            meta["generation"] += 1
        if meta.get("deletionTimestamp") and not meta.get("finalizers") and not meta.get("deletionGracePeriodSeconds"):
            return self._remove(key, new)
        return self._write("MODIFIED", key, new)

    def _write(self, kind: str, key: Key, new: Object) -> Object:
        self.version += 1
        new["metadata"]["resourceVersion"] = str(self.version)
        self.history.append(Change(self.version, kind, key, new, self._objects.get(key)))
        self._objects[key] = new
        self.changed.notify_all()
        return copy.deepcopy(new)

    def _remove(self, key: Key, last: Object) -> Object:
        self.version += 1
        last["metadata"]["resourceVersion"] = str(self.version)
        self.history.append(Change(self.version, "DELETED", key, last, self._objects.pop(key)))
        self.changed.notify_all()
        return copy.deepcopy(last)


def _grace_seconds(plural: str, found: Object, options: Object) -> int:
    """Return the grace period of a deletion: only Pods that run on a node have one."""
    if plural != "pods" or not found["spec"].get("nodeName"):
        return 0
    if found.get("status", {}).get("phase") in {"Succeeded", "Failed"}:
        return 0
    wanted = options.get("gracePeriodSeconds")
    return int(found["spec"].get("terminationGracePeriodSeconds", 30) if wanted is None else wanted)
