"""Schemathesis sends every operation of the API's schema requests that fit it and requests that do not.

None ends in a server error, and no answer differs from what the schema says: status, content type and body. The
*request matrix* is `test_request_matrix`: `ROUTES` has a request that works for each route, and `World` the objects
that these requests name. Half of the requests here name them too. `FUZZ_EXAMPLES=500` sends each operation 500
requests, different ones each time.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import hypothesis
import pytest
import requests
from django.db import transaction
from drf_spectacular.generators import SchemaGenerator
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st
from schemathesis import openapi, serializer
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.core.transport import Response
from schemathesis.generation import GenerationMode
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from runtime.specs import Outcome
from tests.console.test_request_matrix import ROUTES, Ask, Raw, World
from tests.factories.jobs import Customer
from tests.fakes import FakeBackend

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
INPUT_EXAMPLES, PATH_EXAMPLES = 6, 3
"""How many requests an operation gets without FUZZ_EXAMPLES: the first if it has a body or a query, else the second."""
FUZZED = hypothesis.settings(
    derandomize=not EXAMPLES,
    phases=[Phase.generate, Phase.shrink] if EXAMPLES else [Phase.generate],
    database=None,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
serializer.alias("application/offset+octet-stream", "application/octet-stream")  # the content of uploads


class Owner(Customer):
    """The owner of the request matrix's organization, who here buys jobs that run and end on the fake cluster."""

    def __init__(self, world: World, backend: FakeBackend) -> None:
        self.backend, self.membership, self.organization = backend, world.owner, world.owner.organization
        self.workspace = self.organization.workspaces.get(name="matrix")


@dataclass(frozen=True)
class Known:
    """What the request matrix knows of an operation: the paths of objects that exist, and a request that works."""

    paths: list[dict[str, str]]
    ask: Ask

    @property
    def fields(self) -> dict[str, Any]:
        """The body's fields."""
        return self.ask.body if isinstance(self.ask.body, dict) else {}


def known_of(world: World, jobs: list[str], operation: APIOperation) -> Known:
    """Return what the request matrix knows of the operation. `jobs` are the ids for paths that name a job."""
    # Without the parameters' names: `{id}` of the schema is `<int:pk>` in the route.
    shape = re.sub(r"{\w+}", "{}", operation.path)
    route = next(route for route in ROUTES if "/api/v1/" + re.sub(r"<[\w:]+>", "{}", route) == shape)
    values = re.fullmatch(re.sub(r"<[\w:]+>", "(.+)", route), world.path_of(route))
    assert values is not None
    path = dict(zip(re.findall(r"{(\w+)}", operation.path), values.groups(), strict=True))
    paths = [path | {"id": job} for job in jobs] if route.startswith("jobs/<") else [path]
    return Known(paths if path else [], ROUTES[route][operation.method.upper()])


@st.composite
def requests_of(draw: st.DrawFn, cases: list[st.SearchStrategy], known: Known) -> Any:
    """Draw a request from one of the strategies: with the path of an object that exists or a drawn one, and a body.

    The body is drawn, or it is the one that works, with up to two of its fields drawn. The simplest of these requests,
    which hypothesis tries first, works.
    """
    case = draw(draw(st.sampled_from(cases)))
    if known.paths and not draw(st.booleans()):
        case.path_parameters = draw(st.sampled_from(known.paths))
    if known.fields and isinstance(case.body, dict) and not draw(st.booleans()):
        drawn = draw(st.sets(st.sampled_from(sorted(case.body)), max_size=2)) if case.body else ()
        case.body = known.fields | {name: case.body[name] for name in drawn}
    return case


def send(world: World, case: Any, raw: Raw | None) -> Response:
    """Send a request as the owner of the organization, with the body `raw` if given, and roll back what it changed."""
    if isinstance(case.body, dict):
        case.body = world.replace_placeholders(case.body)  # such as `<quote>`, in the body of `Known.ask`
    request = requests.Request(**case.as_transport_kwargs(base_url="http://testserver")).prepare()
    headers = dict(request.headers)
    content, content_type = request.body or b"", headers.pop("Content-Type", "")
    headers.pop("Content-Length", None)
    if raw is not None:
        content, content_type, headers = raw.content, raw.content_type, headers | raw.headers
    world.skip_token_look_up()
    with transaction.atomic():
        answer = world.clients["owner"].generic(
            request.method, request.path_url, content, content_type=content_type, headers=headers
        )
        body = b"" if answer.streaming and answer.is_async else answer.getvalue()
        transaction.set_rollback(True)
    return Response(
        answer.status_code, {name: [value] for name, value in answer.items()}, body, request, elapsed=0, verify=False
    )


def modes_of(operation: APIOperation) -> list[GenerationMode]:
    """Return the modes of an operation: without parameters and a body, no request of it can be wrong."""
    is_empty = not any(
        [operation.path_parameters, operation.query, operation.headers, operation.cookies, operation.body]
    )
    return [GenerationMode.POSITIVE] if is_empty else list(GenerationMode)


def fuzz(world: World, jobs: list[str], operation: APIOperation) -> None:
    """Send requests of an operation, and check the answers."""
    known = known_of(world, jobs, operation)
    raw = known.ask.body if isinstance(known.ask.body, Raw) else None
    has_input = bool(operation.body or operation.query)
    # Built once: each takes longer to build than to draw from.
    cases = [operation.as_strategy(generation_mode=mode) for mode in modes_of(operation)]

    # `is_drawn`: whether the body is the drawn one, also where the request matrix has a Raw body that works.
    @hypothesis.settings(FUZZED, max_examples=EXAMPLES or (INPUT_EXAMPLES if has_input else PATH_EXAMPLES))
    @given(requests_of(cases, known), st.booleans())
    def answers_as_documented(case: Any, is_drawn: bool) -> None:
        case.validate_response(send(world, case, None if is_drawn else raw), checks=CHECKS)

    answers_as_documented()


def failures(world: World, jobs: list[str], operations: Iterator[Any]) -> Iterator[str]:
    """Yield what is wrong with each operation."""
    for operation in (result.ok() for result in operations):
        world.restore_files()  # of which the operation before may have changed some: `send` rolls back only rows
        world.restore_card()
        try:
            fuzz(world, jobs, operation)
        except FailureGroup as group:
            yield f"{operation.label}: {group}"
        except Exception as error:
            yield f"{operation.label}: {''.join(traceback.format_exception(error, limit=-6))}"


@pytest.fixture
def world(api, owner, stranger, provider, monkeypatch):
    return World(api, owner, stranger, provider, monkeypatch)


def test_every_operation_answers_as_its_schema_says(backend, world):
    owner = Owner(world, backend)
    completed = owner.ended_with_log()
    failed = owner.end(owner.started(), Outcome.CODE_FAILED, message="Rank 1: ValueError: no such shape")
    jobs = [str(job) for job in (world.job, completed.pk, failed.pk)]
    schema = openapi.from_dict(SchemaGenerator().get_schema(request=None, public=True))
    schema.config.generation.update(with_security_parameters=False)  # the client sends the owner's token
    found = list(failures(world, jobs, schema.get_all_operations()))
    assert not found, "\n\n".join(found)
