"""Label and field selectors, as the API takes them. PURE.

The one rule: a selector that a real server would refuse (400) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.kubernetes.resources import ApiError, Object

Test = Callable[[Object], bool]
_REQUIREMENT = re.compile(
    r"\s*(?:(?P<not>!)\s*(?P<absent>[\w./-]+)"
    r"|(?P<key>[\w./-]+)\s*(?:(?P<set>in|notin)\s*\((?P<values>[^)]*)\)|(?P<sign>==|=|!=)\s*(?P<value>[\w.-]*))?)\s*"
)
_FIELDS = {
    "pods": ("spec.nodeName", "status.phase", "spec.restartPolicy", "spec.serviceAccountName", "status.podIP"),
    "events": ("involvedObject.kind", "involvedObject.name", "involvedObject.namespace", "involvedObject.uid",
               "involvedObject.fieldPath", "reason", "type", "source"),
    "secrets": ("type",),
    "jobs": ("status.successful",),
    "nodes": ("spec.unschedulable",),
    "namespaces": ("status.phase",),
}  # fmt: skip


def labels(text: str) -> Test:
    """The test that a label selector is."""
    tests: list[Test] = []
    rest = text
    while rest.strip():
        match = _REQUIREMENT.match(rest)
        if match is None or (match.end() < len(rest) and rest[match.end()] != ","):
            raise ApiError(400, "BadRequest", f"unable to parse requirement: {rest!r}")
        tests.append(_label_test(match))
        rest = rest[match.end() + 1 :]
    return lambda found: all(test(found["metadata"].get("labels") or {}) for test in tests)


def _label_test(match: re.Match[str]) -> Test:
    if match["absent"]:
        return lambda have: match["absent"] not in have
    key = match["key"]
    if match["set"]:
        values = {value.strip() for value in match["values"].split(",")}
        if match["set"] == "in":
            return lambda have: have.get(key) in values
        return lambda have: have.get(key) not in values
    if match["sign"] == "!=":
        return lambda have: have.get(key) != match["value"]
    if match["sign"]:
        return lambda have: have.get(key) == match["value"]
    return lambda have: key in have


def fields(plural: str, text: str) -> Test:
    """The test that a field selector is."""
    tests: list[tuple[str, bool, str]] = []
    for part in filter(None, text.split(",")):
        name, sign, value = re.fullmatch(r"([\w.]+)(==|=|!=)(.*)", part).groups()  # type: ignore[union-attr]
        if name not in ("metadata.name", "metadata.namespace", *_FIELDS.get(plural, ())):
            raise ApiError(400, "BadRequest", f'field label not supported: "{name}"')
        tests.append((name, sign == "!=", value))
    return lambda found: all((_field(found, name) != value) == negated for name, negated, value in tests)


def _field(found: Object, name: str) -> str:
    value: object = found
    for part in name.split("."):
        value = value.get(part, "") if isinstance(value, dict) else ""
    return str(value)
