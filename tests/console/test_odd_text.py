"""Odd text, wherever text comes in: NUL bytes, halves of characters, other scripts' digits, line breaks, too much.

The database refuses some of it, and a console that asks it all the same answers with 500. One table of texts goes
through every body, parameter, path and header of the API, every page and form, and every list and form of the admin.
"""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import quote as percent
from urllib.parse import urlencode

import pytest
from django.contrib import admin
from django.db import transaction
from django.urls import URLPattern, URLResolver, get_resolver, reverse
from drf_spectacular.generators import SchemaGenerator

from jobs.models import Order
from storage.models import Workspace
from storage.selectors import workspace_folder
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
FIELDS = {
    "amount", "amount_minor", "method", "threshold_minor", "save_card", "code", "member", "month", "by", "name", "role",
    "email", "language", "next", "quote", "idempotency_key", "folder", "kind", "source", "target", "path", "content",
    "state", "page", "rerun", "organization", "touched", "login", "password", "username", "reason", "reference",
    "legal_name", "address", "tax_id", "country", "registry", "tag", "description", "version", "max_seconds", "order",
} | set(QUOTE)  # fmt: skip
"""Of every form and address in the pages; what a page does not know it leaves alone."""
HEADERS = (
    "Accept", "Accept-Language", "Content-Type", "Cookie", "Host", "If-Match", "If-None-Match", "If-Modified-Since",
    "Last-Event-ID", "Origin", "Range", "Referer", "Traceparent", "User-Agent", "X-Request-Id", "X-Forwarded-For",
    "HX-Request", "HX-Target", "HX-Current-URL", "X-CSRFToken",
)  # fmt: skip


@pytest.fixture
def world(api, owner, stranger, provider):
    return World(api, owner, stranger, provider)


@pytest.fixture(scope="module")
def schema():
    return SchemaGenerator().get_schema(request=None, public=True)


def fine(answer: Any, *told: Any) -> None:
    assert answer.status_code < 500 or answer.status_code == 503, (answer.status_code, *told)
    if answer.streaming and not answer.is_async:
        b"".join(answer.streaming_content)


def operation(schema: dict[str, Any], route: str, method: str) -> dict[str, Any]:
    path = "/api/v1/" + re.sub(r"<\w+:(\w+)>", r"{\1}", route)
    return schema["paths"].get(path, {}).get(method.lower(), {})


def fields_of(schema: dict[str, Any], route: str, method: str) -> dict[str, Any]:
    """The names of a body's fields, those that the table's example lacks too."""
    body = operation(schema, route, method).get("requestBody", {}).get("content", {}).get("application/json", {})
    named = body.get("schema", {}).get("$ref", "").rsplit("/", 1)[-1]
    return dict.fromkeys(schema["components"]["schemas"].get(named, {}).get("properties", {}), "x")


@pytest.mark.parametrize("name", ODD_JSON)
def test_in_every_body_of_the_api(world, schema, name):
    """One field at a time is odd, or a list of it, or an object."""
    odd = ODD_JSON[name]
    for route, asks in ROUTES.items():
        for method, ask in asks.items():
            if method == "GET" or isinstance(ask.body, Raw):
                continue
            example = fields_of(schema, route, method) | world.filled(ask.body or {})
            bodies = [example | {field: bent} for field in example for bent in (odd, [odd], {odd: odd})]
            for body in [*bodies, odd, [odd], {odd: odd}]:
                with transaction.atomic():
                    text = json.dumps(body)  # half a character is spelled
                    send = getattr(world.clients["owner"], method.lower())
                    path = f"/api/v1/{world.path_of(route)}"
                    fine(send(path, data=text, content_type="application/json"), method, route, body)
                    transaction.set_rollback(True)


@pytest.mark.parametrize("name", ODD)
def test_in_every_parameter_and_path_of_the_api(world, schema, name):
    for route, asks in ROUTES.items():
        if "GET" in asks and not route.endswith("stream/"):
            asked = operation(schema, route, "GET").get("parameters", [])
            for parameter in sorted({each["name"] for each in asked if each["in"] == "query"} | {"cursor", "search"}):
                query = urlencode({parameter: ODD[name]})
                fine(world.clients["owner"].get(f"/api/v1/{world.path_of(route)}?{query}"), route, query)
        path = re.sub(r"<\w+:\w+>", percent(ODD[name], safe=""), route)
        for method, ask in asks.items() if path != route else ():
            with transaction.atomic():
                fine(world.send("owner", method, path, ask.body), method, path)
                transaction.set_rollback(True)


def test_a_nul_byte_in_a_query_is_told(world, client):
    answer = world.clients["owner"].get("/api/v1/jobs/?state=%00")
    assert (answer.status_code, answer.json()["code"]) == (400, "malformed")
    client.force_login(world.owner.user)
    assert client.get("/jobs/?state=%00").status_code == 400


@pytest.mark.parametrize("name", ODD)
def test_in_every_header(world, client, name):
    client.force_login(world.owner.user)
    text = ODD[name].encode().decode("latin-1")  # as a server hands it over
    for header in HEADERS:
        for given in (text, f"sessionid={text}; csrftoken={text}" if header == "Cookie" else f"bytes={text}-"):
            fine(world.clients["owner"].get("/api/v1/jobs/", headers={header: given}), header)
            fine(client.get("/jobs/", headers={header: given}), header)
    for scheme in ("Token", "Bearer", "Basic", ""):
        fine(client.get("/api/v1/jobs/", headers={"Authorization": f"{scheme} {text}"}), scheme)


def test_in_an_idempotency_key(world):
    """Refused at the field, or kept as it came: the same key again is the same order."""
    kept = ("x" * 255, "ключ", "☃" * 255, "a b", "", "\xa0")
    refused = ("a\0b", "\0", "x" * 256, "x" * 300, "☃" * 256, "a\tb", "a\x7fb", "\ud800")
    before = Order.objects.count()
    for path, body in (("orders/", {"quote": str(world.quote)}), ("probes/", QUOTE), (f"jobs/{world.job}/rerun/", {})):
        for key in (*kept, *refused):
            ask = lambda key=key, path=path, body=body: world.clients["owner"].post(
                f"/api/v1/{path}", body, format="json", headers={"Idempotency-Key": key}
            )
            with transaction.atomic():
                first, second = ask(), ask()
                made = Order.objects.count() - before
                transaction.set_rollback(True)
            if key in refused:
                assert (first.status_code, set(first.data["fields"]), made) == (400, {"Idempotency-Key"}, 0), key
            else:
                assert first.status_code == 201, (path, key, first.data)
                if key:
                    assert (second.status_code, second.data["id"], made) == (201, first.data["id"], 1), key


def pages(resolver: URLResolver, before: str = "") -> list[str]:
    found = []
    for entry in resolver.url_patterns:
        route = before + str(entry.pattern)
        found += [route] if isinstance(entry, URLPattern) else pages(entry, route)
    return found


LEFT_OUT = ("api/", "admin/", "webhooks/", "receipts/<int:pk>/")
"""Tried elsewhere here, or without a form; the receipts of this world are of no jobs."""


def page_path(world: World, route: str) -> str:
    filled = route.replace("<int:pk>", str(world.job)).replace("<int:attempt>", "1")
    filled = filled.replace("<uuid:quote_id>", str(world.quote)).replace("<file:path>", "train.py")
    return "/" + filled.replace("<slug:name>", "matrix" if route.startswith("workspaces") else "digits")


@pytest.mark.parametrize("name", ODD)
def test_in_every_page_and_form(world, client, name):
    odd = ODD[name]
    told = dict.fromkeys(sorted(FIELDS), odd)
    for route in pages(get_resolver()):
        if route.startswith(LEFT_OUT) or "^" in route:
            continue
        path = page_path(world, route)
        client.force_login(world.owner.user)
        with transaction.atomic():
            fine(client.get(f"{path}?{urlencode(told)}"), "GET", path)
            fine(client.post(path, told), "POST", path)
            bent = "/" + re.sub(r"<\w+:\w+>", percent(odd, safe=""), route)
            fine(client.get(bent), "GET", bent)
            fine(client.post(bent, told), "POST", bent)
            transaction.set_rollback(True)


def test_in_the_names_of_files_that_code_wrote(world, client):
    """They are listed, opened and deleted, as any."""
    client.force_login(world.owner.user)
    folder = workspace_folder(Workspace.objects.get(name="matrix", organization=world.owner.organization))
    for odd in ("a\nb", "ж☃𝔘", "a?b#c%d", " ", "a\x07b", "--help", "<b>"):
        inner = folder / odd
        inner.mkdir()
        (inner / odd).write_text("hello")
        for path in ("", f"folder/{percent(odd)}"):
            assert client.get(f"/workspaces/w/matrix/{path}").status_code == 200, (odd, path)
        for act in ("file", "download"):
            answer = client.get(f"/workspaces/w/matrix/{act}/{percent(f'{odd}/{odd}')}")
            assert answer.status_code == 200, (odd, act)
            assert b"hello" in answer.getvalue()
        answer = world.clients["owner"].get(f"/api/v1/workspaces/matrix/files/{percent(f'{odd}/{odd}')}")
        assert answer.getvalue() == b"hello"
        client.post("/workspaces/w/matrix/delete-entry/", {"path": odd})
        assert not inner.exists()


def names_in(html: str) -> set[str]:
    """Of what is typed. A choice that was not offered is sent by no browser; the staff alone could write it."""
    return set(re.findall(r'<(?:input|textarea)[^>]*\bname="([^"]+)"', html))


@pytest.mark.parametrize("name", ODD)
def test_in_every_list_and_form_of_the_admin(world, client, name):
    client.force_login(UserFactory(is_staff=True, is_superuser=True))
    odd = ODD[name]
    for model, options in admin.site._registry.items():
        label = f"admin:{model._meta.app_label}_{model._meta.model_name}"
        changes = reverse(f"{label}_changelist")
        for parameter in ("q", "o", "p", "e", "all", *(str(each) for each in options.list_filter)):
            fine(client.get(f"{changes}?{urlencode({parameter: odd})}"), label, parameter)
        fine(client.get(f"{changes}{percent(odd, safe='')}/change/"), label)
        add = reverse(f"{label}_add")
        form = client.get(add)
        if form.status_code == 200:
            told = dict.fromkeys(names_in(form.content.decode()), odd)
            with transaction.atomic():
                fine(client.post(add, told), label)
                transaction.set_rollback(True)
