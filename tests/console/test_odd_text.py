"""Odd text wherever text comes in: NUL bytes, lone surrogates, other scripts' digits, line breaks, too much.

The database refuses some of it, and a console that queries with it anyway answers 500. One table of texts goes through
every body, parameter, path and header of the API, every page and form, and every list and form of the admin.
"""

import json
import re
from itertools import cycle, product, repeat
from urllib.parse import quote as percent
from urllib.parse import urlencode

import pytest
from django.apps import apps
from django.contrib import admin
from django.db import transaction
from django.urls import reverse
from drf_spectacular.generators import SchemaGenerator

from jobs.models import Order
from storage.models import Workspace
from storage.selectors import workspace_folder
from tests.console.routes import routes_of
from tests.console.test_request_matrix import QUOTE, ROUTES, Raw, World
from tests.factories.accounts import UserFactory

pytestmark = pytest.mark.django_db

ODD = {
    "nul": "a\0b",
    "other scripts": "ж☃𝔘٣",
    "many digits": "9" * 40,
    "no number": "NaN",
    "line breaks": "a\r\nb",
    "long": "x" * 3000,
}
ODD_JSON = ODD | {"half a character": "\ud800", "a digit of another script": "٣"}


def rounds_of(texts):
    """Return texts for two rounds: NUL everywhere, since most code forgets it, then the others one after another."""
    return repeat(texts["nul"]), others(texts)


def others(texts):
    """Return an endless iterator over the texts but NUL."""
    return cycle(text for name, text in texts.items() if name != "nul")


FIELDS = {
    "amount", "amount_minor", "method", "threshold_minor", "save_card", "code", "member", "month", "by", "name", "role",
    "email", "language", "next", "quote", "idempotency_key", "folder", "kind", "source", "target", "path", "content",
    "state", "page", "rerun", "organization", "touched", "login", "password", "username", "reason", "reference",
    "legal_name", "address", "tax_id", "country", "registry", "tag", "description", "version", "max_seconds", "order",
} | set(QUOTE)  # fmt: skip
"""The fields of all forms and pages. Each page gets all of them, and ignores those that it does not have."""
HEADERS = (
    "Accept", "Accept-Language", "Content-Type", "Cookie", "Host", "If-Match", "If-None-Match", "If-Modified-Since",
    "Last-Event-ID", "Origin", "Range", "Referer", "Traceparent", "User-Agent", "X-Request-Id", "X-Forwarded-For",
    "HX-Request", "HX-Target", "HX-Current-URL", "X-CSRFToken",
)  # fmt: skip
ELSEWHERE = ("api/", "admin/", "webhooks/", "receipts/<int:pk>/")
"""Routes that other tests of this module request, or that cannot be opened here: this world's receipts have no job."""


@pytest.fixture
def world(api, owner, stranger, provider):
    return World(api, owner, stranger, provider)


@pytest.fixture(scope="module")
def schema():
    return SchemaGenerator().get_schema(request=None, public=True)


def assert_no_server_error(answer, *request):
    """Read an answer, and fail if it is a server error. 503 is none: a library may be missing on this machine."""
    assert answer.status_code < 500 or answer.status_code == 503, (answer.status_code, *request)
    if answer.streaming and not answer.is_async:
        b"".join(answer.streaming_content)


def operation(schema, route, method):
    path = "/api/v1/" + re.sub(r"<\w+:(\w+)>", r"{\1}", route)
    return schema["paths"].get(path, {}).get(method.lower(), {})


def fields_of(schema, route, method):
    """Return the names of a body's fields, also those that the request matrix's example lacks."""
    body = operation(schema, route, method).get("requestBody", {}).get("content", {}).get("application/json", {})
    name = body.get("schema", {}).get("$ref", "").rsplit("/", 1)[-1]
    return dict.fromkeys(schema["components"]["schemas"].get(name, {}).get("properties", {}), "x")


@pytest.mark.slow
def test_no_body_of_the_api_causes_a_server_error(world, schema):
    """One field at a time is odd, and then the whole body: the text, a list of it, or an object."""
    asks = [(route, method, ask) for route, asks in ROUTES.items() for method, ask in asks.items()]
    for texts, (route, method, ask) in product(rounds_of(ODD_JSON), asks):
        if method == "GET" or isinstance(ask.body, Raw):
            continue
        example = fields_of(schema, route, method) | world.filled(ask.body or {})
        send, path = getattr(world.clients["owner"], method.lower()), f"/api/v1/{world.path_of(route)}"
        odd = next(texts)
        for body in [*({**example, field: next(texts)} for field in example), odd, [odd], {odd: odd}]:
            with transaction.atomic():
                assert_no_server_error(
                    send(path, data=json.dumps(body), content_type="application/json"), method, route, body
                )
                transaction.set_rollback(True)


@pytest.mark.slow
def test_no_parameter_path_or_header_of_the_api_causes_a_server_error(world, client, schema):
    owner, texts = world.clients["owner"], others(ODD)
    for route, asks in ROUTES.items():
        if "GET" in asks and not route.endswith("stream/"):
            parameters = operation(schema, route, "GET").get("parameters", [])
            for parameter in {each["name"] for each in parameters if each["in"] == "query"} | {"cursor", "search"}:
                query = urlencode({parameter: next(texts)})
                assert_no_server_error(owner.get(f"/api/v1/{world.path_of(route)}?{query}"), route, query)
    for texts, (route, asks) in product(rounds_of(ODD), ROUTES.items()):
        path = re.sub(r"<\w+:\w+>", percent(next(texts), safe=""), route)
        for method, ask in asks.items() if path != route else ():
            with transaction.atomic():
                assert_no_server_error(world.send("owner", method, path, ask.body), method, path)
                transaction.set_rollback(True)
    client.force_login(world.owner.user)
    for text in (odd.encode().decode("latin-1") for odd in ODD.values()):  # servers read headers as Latin-1
        for header in HEADERS:
            # `bytes=` is the form of a Range. The other headers have no form.
            within = f"sessionid={text}; csrftoken={text}" if header == "Cookie" else f"bytes={text}-"
            assert_no_server_error(owner.get("/api/v1/jobs/", headers={header: text}), header)
            assert_no_server_error(client.get("/jobs/", headers={header: within}), header)
        for scheme in ("Token", "Bearer", "Basic", ""):
            assert_no_server_error(client.get("/api/v1/jobs/", headers={"Authorization": f"{scheme} {text}"}), scheme)


def test_an_idempotency_key_is_refused_at_its_field_or_names_one_order(world):
    accepted = ("x" * 255, "ключ", "☃" * 255, "a b", "", "\xa0")
    refused = ("a\0b", "\0", "x" * 256, "x" * 300, "☃" * 256, "a\tb", "a\x7fb", "\ud800")
    before = Order.objects.count()
    for path, body in (("orders/", {"quote": str(world.quote)}), ("probes/", QUOTE), (f"jobs/{world.job}/rerun/", {})):
        for key in (*accepted, *refused):
            ask = lambda key=key, path=path, body=body: world.clients["owner"].post(
                f"/api/v1/{path}", body, format="json", headers={"Idempotency-Key": key}
            )
            with transaction.atomic():
                first, second = ask(), ask()
                created = Order.objects.count() - before
                transaction.set_rollback(True)
            if key in refused:
                assert (first.status_code, set(first.data["fields"]), created) == (400, {"Idempotency-Key"}, 0), key
            else:
                assert first.status_code == 201, (path, key, first.data)
                if key:  # an empty one is none
                    assert (second.status_code, second.data["id"], created) == (201, first.data["id"], 1), key


@pytest.mark.slow
def test_no_request_of_a_page_or_form_causes_a_server_error(world, client):
    ids = {"<int:pk>": world.job, "<int:attempt>": 1, "<uuid:quote_id>": world.quote, "<file:path>": "train.py"}
    for texts, (route, _pattern) in product(rounds_of(ODD), routes_of()):
        if route.startswith(ELSEWHERE) or "^" in route:  # "^": a regular expression, of a library's route
            continue
        path = "/" + route.replace("<slug:name>", "matrix" if route.startswith("workspaces") else "digits")
        for part, value in ids.items():
            path = path.replace(part, str(value))
        client.force_login(world.owner.user)
        odd = next(texts)
        form = {field: next(texts) for field in sorted(FIELDS)}
        with transaction.atomic():
            if odd != ODD["nul"]:  # a query with a NUL is refused before it reaches a page
                assert_no_server_error(client.get(f"{path}?{urlencode(form)}"), "GET", path)
            assert_no_server_error(client.post(path, form), "POST", path)
            odd_path = "/" + re.sub(r"<\w+:\w+>", percent(odd, safe=""), route)
            if odd_path != path:
                assert_no_server_error(client.get(odd_path), "GET", odd_path)
                assert_no_server_error(client.post(odd_path, form), "POST", odd_path)
            transaction.set_rollback(True)


def test_files_with_odd_names_are_listed_opened_and_deleted_and_a_nul_in_a_query_is_refused(world, client):
    client.force_login(world.owner.user)
    answer = world.clients["owner"].get("/api/v1/jobs/?state=%00")
    assert (answer.status_code, answer.json()["code"]) == (400, "malformed")
    assert client.get("/jobs/?state=%00").status_code == 400
    folder = workspace_folder(Workspace.objects.get(name="matrix", organization=world.owner.organization))
    for odd in ("a\nb", "ж☃𝔘", "a?b#c%d", " ", "a\x07b", "--help", "<b>"):
        (folder / odd).mkdir()
        (folder / odd / odd).write_text("hello")
        for path in ("", f"folder/{percent(odd)}"):
            assert client.get(f"/workspaces/w/matrix/{path}").status_code == 200, (odd, path)
        file = percent(f"{odd}/{odd}")
        for act in ("file", "download"):
            assert b"hello" in client.get(f"/workspaces/w/matrix/{act}/{file}").getvalue(), (odd, act)
        assert world.clients["owner"].get(f"/api/v1/workspaces/matrix/files/{file}").getvalue() == b"hello"
        client.post("/workspaces/w/matrix/delete-entry/", {"path": odd})
        assert not (folder / odd).exists()


@pytest.mark.slow
def test_no_list_or_form_of_the_admin_causes_a_server_error(client):
    """Each request has the next text. The admin's code is the same for all models, so all texts reach it."""
    client.force_login(UserFactory(is_staff=True, is_superuser=True))
    texts = cycle(ODD.values())
    for model in filter(admin.site.is_registered, apps.get_models()):
        options = admin.site.get_model_admin(model)
        label = f"admin:{model._meta.app_label}_{model._meta.model_name}"
        changes, add = reverse(f"{label}_changelist"), reverse(f"{label}_add")
        for parameter in ("q", *(str(each) for each in options.list_filter)):
            assert_no_server_error(client.get(f"{changes}?{urlencode({parameter: next(texts)})}"), label, parameter)
        assert_no_server_error(client.get(f"{changes}{percent(next(texts), safe='')}/change/"), label)
        form = client.get(add)
        if form.status_code == 200:
            # Only fields into which people type: a browser sends no choice that was not offered.
            names = re.findall(r'<(?:input|textarea)[^>]*\bname="([^"]+)"', form.content.decode())
            for _turn in range(2):
                with transaction.atomic():
                    assert_no_server_error(client.post(add, {name: next(texts) for name in names}), label)
                    transaction.set_rollback(True)
