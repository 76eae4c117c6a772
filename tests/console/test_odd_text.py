"""Odd text wherever text comes in: NUL bytes, lone surrogates, other scripts' digits, line breaks, too much.

The database refuses some of it, and a console that queries with it anyway answers 500. One table of texts goes through
every body, parameter, path and header of the API, every page and form, and every list and form of the admin.
"""

import json
import re
from itertools import cycle, product
from urllib.parse import quote as percent
from urllib.parse import urlencode

import pytest
from django.apps import apps
from django.contrib import admin
from django.db import transaction
from django.urls import Resolver404, resolve, reverse
from drf_spectacular.generators import SchemaGenerator

from jobs.models import Order
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


def others(texts):
    """Return an endless iterator over the texts but NUL. NUL has requests of its own, since most code forgets it."""
    return cycle(text for name, text in texts.items() if name != "nul")


FIELDS = {
    "amount", "amount_minor", "method", "threshold_minor", "save_card", "code", "member", "month", "by", "name", "role",
    "email", "language", "next", "quote", "idempotency_key", "folder", "kind", "source", "target", "path", "content",
    "state", "page", "rerun", "organization", "touched", "login", "password", "username", "reason", "reference",
    "legal_name", "address", "tax_id", "country", "registry", "tag", "description", "version", "max_seconds", "order",
} | set(QUOTE)  # fmt: skip
"""The fields of all forms and pages. Each page gets all of them, and ignores those that it does not have."""
HEADERS = (
    "Accept", "Accept-Language", "Content-Type", "Host", "If-Match", "If-None-Match", "If-Modified-Since",
    "Last-Event-ID", "Origin", "Range", "Referer", "Traceparent", "User-Agent", "X-Request-Id", "X-Forwarded-For",
    "HX-Request", "HX-Target", "HX-Current-URL", "X-CSRFToken",
    "Cookie",  # the last, since an unknown session logs the client out
)  # fmt: skip
ELSEWHERE = ("api/", "admin/", "webhooks/", "receipts/<int:pk>/")
"""Routes that other tests request, or that cannot be opened here: this world's receipts have no job."""


@pytest.fixture
def world(api, owner, stranger, provider, monkeypatch):
    return World(api, owner, stranger, provider, monkeypatch)


@pytest.fixture(scope="module")
def schema():
    return SchemaGenerator().get_schema(request=None, public=True)


def assert_no_server_error(answer, *request):
    """Read an answer, and fail if it is a server error. 503 is none: a library may be missing on this machine."""
    assert answer.status_code < 500 or answer.status_code == 503, (answer.status_code, *request)
    if answer.streaming and not answer.is_async:
        b"".join(answer.streaming_content)


def is_served(path):
    try:
        return bool(resolve(path))
    except Resolver404:
        return False


def odd_paths(route, texts):
    """Yield the route's path twice: with NUL as its arguments, and with the next text that its converters accept.

    Skips a path that leads to no route, such as letters for a number: its answer does not depend on the route.
    """
    if "<" in route:
        odd = lambda text: "/" + re.sub(r"<\w+:\w+>", lambda _argument: text, route)
        other_texts = (next(texts) for _ in range(len(ODD) - 1))
        for path in (odd(ODD["nul"]), next(filter(is_served, map(odd, other_texts)), "")):
            if is_served(path):
                yield percent(path)


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
    """Each method gets NUL in one field at a time, and then a body with another text in every field.

    Fields that the answer to this body does not refuse by name are sent alone too, since a refused field may have
    hidden them. At last come bodies with an unknown field, and bodies that are no object.
    """

    def send(method, route, body):
        world.skip_token_look_up()
        with transaction.atomic():
            answer = getattr(world.clients["owner"], method.lower())(
                f"/api/v1/{world.path_of(route)}", data=json.dumps(body), content_type="application/json"
            )
            transaction.set_rollback(True)
        assert_no_server_error(answer, method, route, body)
        return answer.json().get("fields", {}) if answer.status_code == 400 else {}

    texts, all_texts = others(ODD_JSON), cycle(ODD_JSON.values())
    for route, asks in ROUTES.items():
        for method, ask in asks.items():
            if method == "GET" or isinstance(ask.body, Raw):
                continue
            example = fields_of(schema, route, method) | world.replace_placeholders(ask.body or {})
            for field in example:
                send(method, route, {**example, field: ODD["nul"]})
            whole = {field: next(texts) for field in example}
            refused = send(method, route, whole)
            for field in example.keys() - refused.keys():
                send(method, route, {**example, field: whole[field]})
            for odd in (ODD["nul"], next(texts)):
                send(method, route, {odd: odd})
            for body in (next(all_texts), [next(all_texts)]):
                send(method, route, body)


@pytest.mark.slow
def test_no_parameter_path_or_header_of_the_api_causes_a_server_error(world, api, client, schema):
    owner, texts = world.clients["owner"], others(ODD)
    for route, asks in ROUTES.items():
        if "GET" in asks and not route.endswith("stream/"):
            parameters = operation(schema, route, "GET").get("parameters", [])
            for parameter in {each["name"] for each in parameters if each["in"] == "query"} | {"cursor", "search"}:
                query = urlencode({parameter: next(texts)})
                world.skip_token_look_up()
                assert_no_server_error(owner.get(f"/api/v1/{world.path_of(route)}?{query}"), route, query)
        for path, (method, ask) in product(odd_paths(f"api/v1/{route}", texts), asks.items()):
            world.skip_token_look_up()
            with transaction.atomic():
                assert_no_server_error(
                    world.send("owner", method, path.removeprefix("/api/v1/"), ask.body), method, path
                )
                transaction.set_rollback(True)
    owner = api(world.owner)  # a new client: `skip_token_look_up` leaves the other one authenticated
    for odd in ODD.values():
        client.force_login(world.owner.user)
        for path in ("/api/v1/jobs/", "/jobs/", "/"):
            assert_no_server_error(client.get(path + percent(odd, safe="")), path, odd)  # no route takes the text
        text = odd.encode().decode("latin-1")  # servers read headers as Latin-1
        for header in HEADERS:
            # The prefix `bytes=` leads Range's parser to the text. The other headers do not mind it.
            within = f"sessionid={text}; csrftoken={text}" if header == "Cookie" else f"bytes={text}-"
            assert_no_server_error(owner.get("/api/v1/jobs/", headers={header: text}), header)
            # htmx gets only the rows of the list.
            assert_no_server_error(client.get("/jobs/", headers={"HX-Request": "true", header: within}), header)
        for scheme in ("Token", "Bearer", "Basic", ""):
            assert_no_server_error(client.get("/api/v1/jobs/", headers={"Authorization": f"{scheme} {text}"}), scheme)


def test_an_idempotency_key_is_refused_at_its_field_or_names_one_order(api, customer):
    accepted = ("x" * 255, "ключ", "☃" * 255, "a b", "", "\xa0")
    refused = ("a\0b", "\0", "x" * 256, "x" * 300, "☃" * 256, "a\tb", "a\x7fb", "\ud800")
    job, quote = customer.job().pk, str(customer.quote().pk)
    client, before = api(customer.membership), Order.objects.count()
    for path, body in (("orders/", {"quote": quote}), ("probes/", customer.form()), (f"jobs/{job}/rerun/", {})):
        for key in (*accepted, *refused):
            ask = lambda key=key, path=path, body=body: client.post(
                f"/api/v1/{path}", body, format="json", headers={"Idempotency-Key": key}
            )
            with transaction.atomic():
                first = ask()
                second = ask() if key in accepted else first
                created = Order.objects.count() - before
                transaction.set_rollback(True)
            if key in refused:
                assert (first.status_code, set(first.data["fields"]), created) == (400, {"Idempotency-Key"}, 0), key
            else:
                assert first.status_code == 201, (path, key, first.data)
                if key:  # an empty key counts as no key
                    assert (second.status_code, second.data["id"], created) == (201, first.data["id"], 1), key


@pytest.mark.slow
def test_no_request_of_a_page_or_form_causes_a_server_error(world, client):
    ids = {"<int:pk>": world.job, "<int:attempt>": 1, "<uuid:quote_id>": world.quote, "<file:path>": "train.py"}

    def send(method, path, form):
        with transaction.atomic():
            assert_no_server_error(getattr(client, method)(path, form), method, path)
            transaction.set_rollback(True)

    texts = others(ODD)
    for route, _pattern in routes_of():
        if route.startswith(ELSEWHERE) or "^" in route:  # "^": a regular expression, of a library's route
            continue
        path = "/" + route.replace("<slug:name>", "matrix" if route.startswith("workspaces") else "digits")
        for part, value in ids.items():
            path = path.replace(part, str(value))
        client.force_login(world.owner.user)  # again, since a form may log out
        form = {field: next(texts) for field in sorted(FIELDS)}
        send("get", path, form)  # without NUL: such a query is refused before it reaches a page
        for odd_path in odd_paths(route, texts):
            send("get", odd_path, None)
            send("post", odd_path, form)
        for posted in (dict.fromkeys(FIELDS, ODD["nul"]), form):
            client.force_login(world.owner.user)
            send("post", path, posted)


def test_files_with_odd_names_are_listed_opened_and_deleted_and_a_nul_in_a_query_is_refused(api, customer, client):
    client.force_login(customer.membership.user)
    by_token = api(customer.membership)
    answer = by_token.get("/api/v1/jobs/?state=%00")
    assert (answer.status_code, answer.json()["code"]) == (400, "malformed")
    assert client.get("/jobs/?state=%00").status_code == 400
    folder = customer.folder
    for odd in ("a\nb", "ж☃𝔘", "a?b#c%d", " ", "a\x07b", "--help", "<b>"):
        (folder / odd).mkdir()
        (folder / odd / odd).write_text("hello")
        for path in ("", f"folder/{percent(odd)}"):
            assert client.get(f"/workspaces/w/main/{path}").status_code == 200, (odd, path)
        file = percent(f"{odd}/{odd}")
        for act in ("file", "download"):
            assert b"hello" in client.get(f"/workspaces/w/main/{act}/{file}").getvalue(), (odd, act)
        assert by_token.get(f"/api/v1/workspaces/main/files/{file}").getvalue() == b"hello"
        client.post("/workspaces/w/main/delete-entry/", {"path": odd})
        assert not (folder / odd).exists()


@pytest.mark.slow
def test_no_list_or_form_of_the_admin_causes_a_server_error(client):
    """Each request has the next text. The admin's code is the same for all models, so all texts reach it."""
    client.force_login(UserFactory(is_staff=True, is_superuser=True))
    for route, _pattern in routes_of():
        if route.startswith("admin/") and "<path:object_id>" in route:
            for text in (ODD["nul"], ODD["no number"]):
                path = "/" + route.replace("<path:object_id>", percent(text))
                assert_no_server_error(client.get(path), path)
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
            names = re.findall(r'<(?:input|textarea)[^>]*\bname="([^"]+)"', form.text)
            for _turn in range(2):
                with transaction.atomic():
                    assert_no_server_error(client.post(add, {name: next(texts) for name in names}), label)
                    transaction.set_rollback(True)
