"""The published schemas of Kubernetes' objects, from the package kubernetes-validate.

`kubernetes_validate.validate` reads 2 MB of JSON for each object. Here each schema is read once in a process.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

_SCHEMAS = files("kubernetes_validate") / "kubernetes-json-schema"


def validate(body: dict[str, Any], version: str) -> None:
    """Check an object against the strict schema of a Kubernetes version such as `1.36`.

    Raises jsonschema.ValidationError for an unknown field or a wrong type, FileNotFoundError for an unknown kind.
    """
    api_group, _, api_version = body["apiVersion"].rpartition("/")
    name = "-".join(part for part in (body["kind"].lower(), api_group.partition(".")[0], api_version) if part)
    _validator(version, name).validate(body)


@cache
def _validator(version: str, name: str) -> Draft202012Validator:
    schema = _read(version, name)
    registry = Resource.from_contents(schema) @ (_definitions(version) @ Registry())  # `@` adds to the registry
    return Draft202012Validator(schema, registry=registry)


@cache
def _definitions(version: str) -> Resource[Any]:
    return Resource.from_contents(_read(version, "_definitions"))


def _read(version: str, name: str) -> Any:
    return json.loads((_SCHEMAS / f"v{version}.0-local-strict" / f"{name}.json").read_text())
