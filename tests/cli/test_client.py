"""The client against the console's OpenAPI schema: it sends what the schema allows and reads what it promises."""

import inspect
import re
from dataclasses import MISSING, fields
from functools import cache

import httpx
import pytest
from drf_spectacular.generators import SchemaGenerator

from cli.client import Client
from cli.schemas import COMPONENTS
from tests.cli.conftest import client_of

PAGING_PARAMETERS = {"cursor"}
"""Parameters that no operation lists: the client takes them from the answer's link to the next page."""


@cache
def schema():
    return SchemaGenerator().get_schema(request=None, public=True)


def resolved(node):
    if "$ref" in node:
        return resolved(schema()["components"]["schemas"][node["$ref"].rpartition("/")[2]])
    for combined in ("allOf", "oneOf"):
        if combined in node:
            return {**resolved(node[combined][0]), **{key: node[key] for key in node if key != combined}}
    return node


def example(node, *, is_full):
    """Return a value that the schema allows: full, or without optional fields and with null where that is allowed."""
    node = resolved(node)
    if node.get("nullable") and not is_full:
        return None
    if "enum" in node:
        return node["enum"][0]
    kind = node.get("type", "object")
    if kind == "object":
        names = [name for name in node.get("properties", {}) if is_full or name in node.get("required", [])]
        made = {name: example(node["properties"][name], is_full=is_full) for name in names}
        extra = node.get("additionalProperties")
        return made | ({"any": example(extra, is_full=is_full)} if extra and is_full and extra is not True else {})
    if kind == "array":
        return [example(node["items"], is_full=is_full)]
    formats = {"uuid": "1f0c0b0e-0000-4000-8000-000000000000", "date-time": "2026-01-01T00:00:00Z"}
    plain = {"string": formats.get(node.get("format"), "text"), "integer": 1, "number": 0.5, "boolean": True}
    return plain[kind]


UNTYPED_ANSWERS = {
    "get /api/v1/jobs/{id}/metrics/": {"metrics": {"loss": [[1, 0.5]]}},
}
"""Answers of operations whose schema does not say what they contain."""
ESTIMATE = {"p50_minor": 1, "p90_minor": 2, "basis": {"sentence": "measured"}}
"""The field `estimate` of quotes, of which the schema only says that it is an object."""


def operation_of(method, path):
    """Return the operation of the schema that serves a path, with the template of its path."""
    for template, operations in schema()["paths"].items():
        pattern = re.sub(r"\{path\}", ".+", re.sub(r"\{(?!path)\w+\}", "[^/]+", template))
        if method in operations and re.fullmatch(pattern, path):
            return template, operations[method]
    raise AssertionError(f"{method} {path} is not in the schema.")


class Server:
    """Answers every request as the schema says, and refuses those that it does not know."""

    def __init__(self, *, is_full):
        self.is_full = is_full
        self.seen = []

    def __call__(self, request):
        method, path = request.method.lower(), request.url.raw_path.decode().partition("?")[0]
        if method == "head":  # how tus asks for an upload's offset; the schema has no HEAD
            return httpx.Response(200, headers={"Upload-Offset": "7"})
        template, operation = operation_of(method, path)
        self.seen.append(f"{method} {template}")
        self.check_parameters(operation, request)
        if "json" in request.headers.get("Content-Type", ""):
            self.check_body(operation, httpx.Response(200, content=request.content).json())
        status, answer = next(iter(operation["responses"].items()))
        # The client must call no other host, so it ignores the host of this address and of `next`.
        headers = {"Upload-Offset": "7", "Location": "https://elsewhere.example.com/api/v1/uploads/key/"}
        content = answer.get("content", {})
        if "text/event-stream" in content and "event-stream" in request.headers["Accept"]:
            return httpx.Response(200, text='event: state\ndata: {"a":\ndata: 1}\n\n')  # one JSON text over two lines
        if "application/json" in content:
            answered = content["application/json"]["schema"]
            body = UNTYPED_ANSWERS.get(self.seen[-1]) or example(answered, is_full=self.is_full)
            if "estimate" in body:
                body["estimate"] = ESTIMATE
            if body.get("next"):
                has_next = not request.url.params
                body["next"] = "https://elsewhere.example.com/?cursor=c&after=a" if has_next else None
            return httpx.Response(int(status), json=body, headers=headers)
        return httpx.Response(int(status), content=b"bytes" if content else b"", headers=headers)

    def check_parameters(self, operation, request):
        known = {each["name"] for each in operation.get("parameters", []) if each["in"] == "query"}
        # Is the answer a page of a list?
        if "next" in str(operation["responses"]) or "Page" in str(operation["responses"]):
            known |= PAGING_PARAMETERS
        assert set(request.url.params) <= known, request.url
        special = {name for name in request.headers if name.startswith(("upload-", "tus-", "idempotency-"))}
        assert special <= {each["name"].lower() for each in operation.get("parameters", [])}, special

    def check_body(self, operation, body):
        allowed = resolved(operation["requestBody"]["content"]["application/json"]["schema"])
        assert set(body) <= set(allowed["properties"])
        assert set(allowed.get("required", [])) <= set(body)


QUOTE = {
    "product": "metered", "framework": "pytorch", "image": "pytorch", "workspace": "main", "code_path": "train.py",
    "epochs": 1, "lr": "0.1", "batch_size": 1, "node_spec": "nano", "nodes": 1,
}  # fmt: skip
NOTEBOOK = {name: QUOTE[name] for name in ("image", "workspace", "node_spec")}
SWEEP = QUOTE | {"space": {}, "objective": {"metric": "loss", "goal": "minimize"}}
FILES = [{"path": "a", "size": 1, "sha256": "0" * 64}]
CALLS = {
    "whoami": (), "products": (), "node_specs": (), "images": (), "datasets": (), "dataset": ("a/b",),
    "create_dataset": ("a",), "create_upload": {"size_bytes": 3, "metadata": {"purpose": "dataset"}},
    "upload_offset": ("key",), "append_upload": {"upload_id": "key", "offset": 0, "content": [b"abc"], "size": 3},
    "upload": ("key",), "workspaces": (), "workspace": ("a",), "create_workspace": ("a",),
    "differing_files": ("a", FILES), "workspace_entries": ("a", "data"), "write_file": ("a", "x/y z#?%.py", b"1"),
    "delete_file": ("a", "x"), "quote": (QUOTE,), "order": ("1",),
    "jobs": {"state": "running", "tag": "a", "name": "b"}, "job": (1,), "diagnosis": (1,), "cancel": (1,),
    "log": {"job_id": 1, "rank": 1, "attempt": 2, "offset": 3}, "log_events": {"job_id": 1, "timestamps": True},
    "job_events": (1,), "metrics": (1,), "receipt": (1,), "receipts": (), "job_files": (1, "outputs"),
    "job_file": {"job_id": 1, "path": "outputs/a b", "offset": 3, "etag": "e"}, "models": (), "model": ("a",),
    "model_archive": ("a", 2), "quote_sweep": (SWEEP,), "order_sweep": ("1",),
    "quote_extension": (1, {"trials": 2}), "sweeps": (), "sweep": (1,), "trials": (1,), "stop_sweep": (1,),
    "quote_notebook": (NOTEBOOK,), "order_notebook": ("1",), "notebooks": (),
    "notebook": (1,), "stop_notebook": (1,), "quote_notebook_extension": {"notebook_id": 1, "added_seconds": 3600},
}  # fmt: skip
"""The arguments of a call of each method."""


@pytest.mark.parametrize("name", CALLS)
def test_each_call_is_an_operation_of_the_schema(name):
    for is_full in (True, False):
        server, arguments = Server(is_full=is_full), CALLS[name]
        method = getattr(client_of(server), name)
        answer = method(**arguments) if isinstance(arguments, dict) else method(*arguments)
        if hasattr(answer, "__enter__"):
            with answer as response:
                assert response.read() == b"bytes"
        elif inspect.isgenerator(answer):
            assert list(answer)
        assert server.seen or name == "upload_offset"  # this one sends only a HEAD


def test_every_method_of_the_client_is_called():
    methods = {name for name, _function in inspect.getmembers(Client, inspect.isfunction) if not name.startswith("_")}
    assert methods - {"close"} == set(CALLS)


@pytest.mark.parametrize(("kind", "component"), COMPONENTS.items(), ids=COMPONENTS.values())
def test_dataclasses_are_parts_of_the_schema(kind, component):
    properties = schema()["components"]["schemas"][component]
    assert {each.name for each in fields(kind)} <= set(properties["properties"])
    # What an answer may lack has a default in the dataclass. The calls above check the types with examples.
    optional = set(properties["properties"]) - set(properties["required"])
    assert optional & {each.name for each in fields(kind)} == {
        each.name for each in fields(kind) if each.name in optional and each.default is not MISSING
    }
