"""The objects of the fake cluster with their versions, their history and their rules of deletion.

The one rule: every change has a version of its own, in one order for all kinds, and goes through `write`. Objects that
are handed out are copies.
"""

from __future__ import annotations

import copy
import secrets
import threading
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tests.kubernetes.resources import BY_PLURAL, ApiError, Object, Resource, later, now

Key = tuple[str, str, str]
"""Plural, namespace ("" for none), name."""


@dataclass(frozen=True)
class Change:
    """One step of the history. `kind` is ADDED, MODIFIED or DELETED; `before` is None for the first."""

    version: int
    kind: str
    key: Key
    after: Object
    before: Object | None


class Store:
    """Thread-safe. `changed` is notified at every change."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.version = 1000
        self.compacted = 1000
        self.history: list[Change] = []
        self._objects: dict[Key, Object] = {}

    # Reading

    def get(self, plural: str, namespace: str, name: str) -> Object:
        """The object. Raises ApiError 404."""
        with self.changed:
            found = self._objects.get((plural, namespace, name))
            if found is None:
                raise BY_PLURAL[plural].not_found(name)
            return copy.deepcopy(found)

    def find(self, plural: str, namespace: str = "", where: Callable[[Object], bool] | None = None) -> list[Object]:
        """All of a kind, of one namespace where it is named, by namespace and name."""
        with self.changed:
            found = [
                value
                for key, value in sorted(self._objects.items())
                if key[0] == plural and namespace in {"", key[1]} and (where is None or where(value))
            ]
            return copy.deepcopy(found)

    def as_of(self, version: int) -> Store:
        """The objects as they were at that version: what a cache that lags behind shows."""
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
        """What changed after that version. Raises ApiError 410 where that is forgotten."""
        with self.changed:
            if version < self.compacted:
                message = f"too old resource version: {version} ({self.compacted})"
                raise ApiError(410, "Expired", message)
            if version > self.version:
                message = f"Too large resource version: {version}, current: {self.version}"
                raise ApiError(504, "Timeout", message, {"causes": [{"reason": "ResourceVersionTooLarge"}]})
            first = len(self.history)
            while first and self.history[first - 1].version > version:
                first -= 1
            return self.history[first:]

    def compact(self) -> None:
        """Forget the history, as etcd does every five minutes."""
        with self.changed:
            self.version += 1
            self.compacted = self.version
            self.history.clear()

    # Writing

    def create(self, resource: Resource, wanted: Object) -> Object:
        """Add an object. Raises ApiError 409."""
        with self.changed:
            made = copy.deepcopy(wanted)
            meta = made["metadata"]
            if not meta.get("name"):
                meta["name"] = meta["generateName"] + secrets.token_hex(3)[:5]
            key = (resource.plural, meta.get("namespace", "") if resource.namespaced else "", meta["name"])
            if key in self._objects:
                message = f'{resource.plural} "{meta["name"]}" already exists'
                raise ApiError(409, "AlreadyExists", message, {"name": meta["name"], "kind": resource.plural})
            for name in ("resourceVersion", "deletionTimestamp", "deletionGracePeriodSeconds", "selfLink"):
                meta.pop(name, None)
            meta.setdefault("uid", str(uuid.uuid4()))
            meta["creationTimestamp"] = now()
            if "spec" in made and resource.plural not in {"services", "namespaces"}:
                meta["generation"] = 1
            made.setdefault("apiVersion", resource.api_version)
            made.setdefault("kind", resource.kind)
            return self._write("ADDED", key, made)

    def update(self, resource: Resource, wanted: Object, *, status: bool = False) -> Object:
        """Replace an object's main part, or its status. Raises ApiError 404, 409."""
        with self.changed:
            meta = wanted["metadata"]
            key = (resource.plural, meta.get("namespace", "") if resource.namespaced else "", meta["name"])
            old = self._objects.get(key)
            if old is None:
                raise resource.not_found(meta["name"])
            given = meta.get("resourceVersion")
            if given and given != old["metadata"]["resourceVersion"]:
                raise resource.conflict(
                    meta["name"], "the object has been modified; please apply your changes to the latest version"
                )
            if meta.get("uid", old["metadata"]["uid"]) != old["metadata"]["uid"]:
                why = f"Precondition failed: UID in precondition: {meta['uid']}, UID in object meta: "
                raise resource.conflict(meta["name"], why + old["metadata"]["uid"])
            made = copy.deepcopy(old)
            if status:
                made["status"] = copy.deepcopy(wanted.get("status", {}))
            else:
                parts = {name: value for name, value in wanted.items() if name != "status" or not _has_status(resource)}
                made = copy.deepcopy(parts)
                if _has_status(resource) and "status" in old:
                    made["status"] = copy.deepcopy(old["status"])
                for name in ("uid", "creationTimestamp", "generation", "deletionTimestamp", "resourceVersion",
                             "deletionGracePeriodSeconds", "namespace"):  # fmt: skip
                    made["metadata"].pop(name, None)
                    if name in old["metadata"]:
                        made["metadata"][name] = old["metadata"][name]
                if made.get("spec") != old.get("spec") and "generation" in old["metadata"]:
                    made["metadata"]["generation"] += 1
            if made == old:
                return copy.deepcopy(old)
            told = made["metadata"]
            held = told.get("finalizers") or told.get("deletionGracePeriodSeconds")
            if told.get("deletionTimestamp") and not held:
                return self._remove(key, made)
            return self._write("MODIFIED", key, made)

    def edit(self, plural: str, namespace: str, name: str, change: Callable[[Object], None]) -> Object | None:
        """Change an object where it is, status and all: for controllers. None where it has gone."""
        resource = BY_PLURAL[plural]
        with self.changed:
            try:
                wanted = self.get(plural, namespace, name)
            except ApiError:
                return None
            before = copy.deepcopy(wanted)
            change(wanted)
            if {**wanted, "status": 0} != {**before, "status": 0}:
                self.update(resource, wanted)
            if wanted.get("status") != before.get("status") and (plural, namespace, name) in self._objects:
                wanted["metadata"].pop("resourceVersion")
                return self.update(resource, wanted, status=True)
            return wanted

    def delete(self, plural: str, namespace: str, name: str, options: Object | None = None) -> Object:
        """Ask for an object's end. Raises ApiError 404, 409."""
        options = options or {}
        resource = BY_PLURAL[plural]
        with self.changed:
            found = self.get(plural, namespace, name)
            meta = found["metadata"]
            for what, given in (options.get("preconditions") or {}).items():
                if given and given != meta[what]:
                    raise resource.conflict(name, f"Precondition failed: {what}: {given}, in object meta: {meta[what]}")
            finalizers = set(meta.get("finalizers", []))
            policy = options.get("propagationPolicy") or ("Orphan" if plural == "jobs" else "Background")
            if policy == "Orphan":
                finalizers.add("orphan")
            elif policy == "Foreground":
                finalizers.add("foregroundDeletion")
            grace = _grace(resource, found, options)
            if not finalizers and not grace:
                return self._remove((plural, namespace, name), found)
            if meta.get("deletionTimestamp"):
                told = meta.get("deletionGracePeriodSeconds", grace)
                grace = min(grace, told)
                meta["deletionTimestamp"] = later(meta["deletionTimestamp"], grace - told)
            else:
                # By when it is to be gone, as a real API server has it.
                meta["deletionTimestamp"] = later(now(), grace)
            meta["deletionGracePeriodSeconds"] = grace
            if finalizers:
                meta["finalizers"] = sorted(finalizers)
            if found == self._objects[plural, namespace, name]:
                return found
            return self._write("MODIFIED", (plural, namespace, name), found)

    def remove_finalizer(self, plural: str, namespace: str, name: str, finalizer: str) -> None:
        """One thing less that holds the object."""

        def without(found: Object) -> None:
            found["metadata"]["finalizers"] = [
                one for one in found["metadata"].get("finalizers", []) if one != finalizer
            ]
            if not found["metadata"]["finalizers"]:
                del found["metadata"]["finalizers"]

        self.edit(plural, namespace, name, without)

    def owned_by(self, uid: str, plurals: Iterable[str] = ()) -> list[tuple[Key, Object]]:
        """The objects that name this owner."""
        wanted = set(plurals)
        with self.changed:
            return [
                (key, copy.deepcopy(found))
                for key, found in sorted(self._objects.items())
                if (not wanted or key[0] in wanted)
                and any(owner["uid"] == uid for owner in found["metadata"].get("ownerReferences", []))
            ]

    def items(self) -> list[tuple[Key, Object]]:
        """Everything."""
        with self.changed:
            return [(key, copy.deepcopy(found)) for key, found in sorted(self._objects.items())]

    def _write(self, kind: str, key: Key, made: Object) -> Object:
        self.version += 1
        made["metadata"]["resourceVersion"] = str(self.version)
        before = self._objects.get(key)
        self._objects[key] = made
        self.history.append(Change(self.version, kind, key, made, before))
        self.changed.notify_all()
        return copy.deepcopy(made)

    def _remove(self, key: Key, last: Object) -> Object:
        before = self._objects.pop(key)
        self.version += 1
        last["metadata"]["resourceVersion"] = str(self.version)
        self.history.append(Change(self.version, "DELETED", key, last, before))
        self.changed.notify_all()
        return copy.deepcopy(last)


def _has_status(resource: Resource) -> bool:
    return "status" in resource.subresources


def _grace(resource: Resource, found: Object, options: dict[str, Any]) -> int:
    """Only pods end gracefully, and only those that a kubelet runs."""
    if resource.plural != "pods":
        return 0
    if not found["spec"].get("nodeName") or found.get("status", {}).get("phase") in {"Succeeded", "Failed"}:
        return 0
    given = options.get("gracePeriodSeconds")
    return int(found["spec"].get("terminationGracePeriodSeconds", 30) if given is None else given)
