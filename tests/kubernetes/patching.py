"""The four ways to change a part of an object: JSON patch, merge patch, strategic merge patch, server-side apply. PURE.

The one rule: lists of Kubernetes objects are merged by the key that their type declares, where it declares one.
"""

from __future__ import annotations

import copy
from typing import Any

from tests.kubernetes.resources import ApiError, Object

MERGE_KEYS = {
    "containers": "name", "initContainers": "name", "volumes": "name", "env": "name", "volumeMounts": "mountPath",
    "ownerReferences": "uid", "conditions": "type", "imagePullSecrets": "name",
    "ports": "port", "topologySpreadConstraints": "topologyKey",
}  # fmt: skip
SETS = {"finalizers"}


def json_patch(target: Object, operations: list[Object]) -> Object:
    """RFC 6902. Raises ApiError 422 where a step does not apply."""
    made = copy.deepcopy(target)
    for step in operations:
        path = [part.replace("~1", "/").replace("~0", "~") for part in step["path"].split("/")[1:]]
        try:
            _step(made, step, path)
        except (KeyError, IndexError, ValueError, TypeError) as error:
            message = f"the server rejected our request due to an error in our request: {step}: {error}"
            raise ApiError(422, "Invalid", message) from error
    return made


def _step(document: Any, step: Object, path: list[str]) -> None:
    parent = document
    for part in path[:-1]:
        parent = parent[int(part)] if isinstance(parent, list) else parent[part]
    last: Any = path[-1]
    if isinstance(parent, list):
        last = len(parent) if last == "-" else int(last)
    match step["op"]:
        case "add" if isinstance(parent, list):
            parent.insert(last, step["value"])
        case "add":
            parent[last] = step["value"]
        case "replace":
            parent[last]
            parent[last] = step["value"]
        case "remove":
            del parent[last]
        case "test":
            if parent[last] != step["value"]:
                raise ValueError("testing value failed")
        case other:
            raise ValueError(f"unsupported operation {other}")


def merge_patch(target: Any, patch: Any) -> Any:
    """RFC 7386: null removes, lists are replaced."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    made = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            made.pop(name, None)
        else:
            made[name] = merge_patch(made.get(name), value)
    return made


def strategic_patch(target: Any, patch: Any) -> Any:
    """As the merge patch, but lists with a key are merged by it. What kubectl and the Python client send."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    made = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            made.pop(name, None)
        elif isinstance(value, list) and name in MERGE_KEYS and all(isinstance(one, dict) for one in value):
            made[name] = _merge_by_key(made.get(name) or [], value, MERGE_KEYS[name])
        elif isinstance(value, list) and name in SETS:
            made[name] = [*(made.get(name) or []), *(one for one in value if one not in (made.get(name) or []))]
        else:
            made[name] = strategic_patch(made.get(name), value)
    return made


def _merge_by_key(have: list[Object], given: list[Object], key: str) -> list[Object]:
    made = {one[key]: one for one in have}
    for one in given:
        if one.get("$patch") == "delete":
            made.pop(one[key], None)
        else:
            made[one[key]] = strategic_patch(made.get(one[key], {}), one)
    return list(made.values())


def apply(live: Object, given: Object, applied: dict[str, Object], manager: str, *, force: bool) -> Object:
    """Server-side apply of `given` by `manager`. `applied` is what each manager applied last; it is brought up to date.

    What the manager said last time and says no more is removed, unless another says it too. Raises ApiError 409 where
    another manager says otherwise, unless by force.
    """
    others = {name: said for name, said in applied.items() if name != manager}
    disputes = [
        (name, path)
        for name, said in others.items()
        for path, value in leaves(given)
        if (theirs := _at(said, path)) is not _ABSENT and theirs != value and path[0] in {"spec", "data", "metadata"}
    ]
    if disputes and not force:
        told = "; ".join(f'conflict with "{name}": .{".".join(path)}' for name, path in disputes)
        raise ApiError(409, "Conflict", f"Apply failed with {len(disputes)} conflict(s): {told}")
    for name, path in disputes:
        _remove(others[name], path)  # it is ours now
    made = copy.deepcopy(live)
    for path, _value in leaves(applied.get(manager, {})):
        kept = _at(given, path) is not _ABSENT or any(_at(said, path) is not _ABSENT for said in others.values())
        if not kept:
            _remove(made, path)
    applied[manager] = copy.deepcopy(given)
    merged: Object = strategic_patch(made, {name: value for name, value in given.items() if name != "status"})
    return merged


_ABSENT = object()


def leaves(value: Object, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Every value that is no dictionary, with where it is. Lists are one value."""
    found = []
    for name, inner in value.items():
        if isinstance(inner, dict) and inner:
            found += leaves(inner, (*path, name))
        else:
            found.append(((*path, name), inner))
    return found


def _at(value: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        if not isinstance(value, dict) or part not in value:
            return _ABSENT
        value = value[part]
    return value


def _remove(value: Any, path: tuple[str, ...]) -> None:
    if path[0] == "metadata" and path[1] not in {"labels", "annotations", "ownerReferences", "finalizers"}:
        return
    if path[0] in {"apiVersion", "kind"}:
        return
    for part in path[:-1]:
        if not isinstance(value, dict) or part not in value:
            return
        value = value[part]
    value.pop(path[-1], None)
