"""Label and field selectors. One that is not supported raises ApiError 400."""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.kubernetes.resources import ApiError, Object

Predicate = Callable[[Object], bool]
_REQUIREMENT = re.compile(r"(?P<absent>!)?(?P<key>[\w./-]+)(?:(?P<sign>!=|==|=)(?P<value>[\w.-]*))?")
_FIELDS = {
    "pods": ("spec.nodeName", "status.phase"),
    "events": ("involvedObject.kind", "involvedObject.name", "involvedObject.uid", "reason", "type"),
}


def labels(text: str) -> Predicate:
    """Return a function that tells whether an object matches a label selector."""
    tests = [_label_test(part.strip()) for part in text.split(",") if part.strip()]
    return lambda obj: all(test(obj["metadata"].get("labels") or {}) for test in tests)


def _label_test(part: str) -> Predicate:
    """Return a function that tells whether labels meet one requirement of a selector."""
    match = _REQUIREMENT.fullmatch(part)
    if match is None:
        raise ApiError(400, "BadRequest", f"unable to parse requirement: {part!r}")
    key, sign, value = match["key"], match["sign"], match["value"]
    if sign:
        return lambda have: (have.get(key) != value) == (sign == "!=")
    return lambda have: (key not in have) == bool(match["absent"])


def fields(plural: str, text: str) -> Predicate:
    """Return a function that tells whether an object matches a field selector."""
    tests: list[tuple[str, bool, str]] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"([\w.]+)(==|=|!=)(.*)", part)
        if match is None or match[1] not in ("metadata.name", *_FIELDS.get(plural, ())):
            raise ApiError(400, "BadRequest", f'field label not supported: "{part}"')
        tests.append((match[1], match[2] == "!=", match[3]))
    return lambda obj: all((_field(obj, name) != value) == negated for name, negated, value in tests)


def _field(obj: Object, name: str) -> str:
    value: object = obj
    for part in name.split("."):
        value = value.get(part, "") if isinstance(value, dict) else ""
    return str(value)
