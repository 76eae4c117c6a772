"""The table from errors to statuses, and the shape of every error."""

import logging

import pytest
from django.core.exceptions import FieldDoesNotExist, PermissionDenied
from django.http import Http404
from django.test import Client
from django.urls import path
from rest_framework import exceptions, serializers
from rest_framework.test import APIRequestFactory

from console import api as console_api
from console.accounts.permissions import TenantView
from console.core.errors import CustomerError, InvalidInput
from console.core.sse import EventStreamRenderer


class Coded(CustomerError):
    """A customer's error with a given code."""

    def __init__(self, code):
        self.code = code
        super().__init__("Say what to do.")


def answer(error, **headers):
    """Return the response of a view of the API that raises the error."""

    class View(TenantView):
        permission_classes = ()
        renderer_classes = (*TenantView.renderer_classes, EventStreamRenderer)

        def get(self, request):
            raise error

    response = View.as_view()(APIRequestFactory().get("/", headers=headers))
    response.render()
    return response


def test_a_customer_error_has_the_status_of_its_code():
    for code, status in (("in_use", 409), ("anything_else", 400)):
        response = answer(Coded(code))
        assert response.status_code == status
        assert response.data == {"code": code, "message": "Say what to do."}
    assert answer(InvalidInput(fields={"lr": "Give a number."})).data["fields"] == {"lr": "Give a number."}


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (Http404(), 404, "not_found"),
        (PermissionDenied(), 403, "not_allowed"),
        (exceptions.PermissionDenied(), 403, "not_allowed"),
        (exceptions.NotAuthenticated(), 401, "not_authenticated"),
        (exceptions.ParseError(), 400, "malformed"),
        (exceptions.MethodNotAllowed("PUT"), 405, "method_not_allowed"),
        (exceptions.UnsupportedMediaType("text/x"), 415, "unsupported_media_type"),
        (exceptions.Throttled(wait=3), 429, "throttled"),
        (exceptions.APIException(), 500, "error"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_an_error_of_a_framework_has_a_code_and_a_message(error, status, code):
    response = answer(error)
    assert (response.status_code, response.data["code"]) == (status, code)
    assert response.data["message"]


@pytest.mark.parametrize(
    ("errors", "data"),
    [
        ({"lr": ["Give a number."]}, {"fields": {"lr": "Give a number."}}),
        (
            {"lines": [{}, {"count": ["Too few."]}], "names": {1: ["Too long."]}, "tags": {"a": ["No number."]}},
            {"fields": {"lines.1.count": "Too few.", "names.1": "Too long.", "tags.a": "No number."}},
        ),
        ({"non_field_errors": ["These two exclude each other."]}, {"message": "These two exclude each other."}),
    ],
    ids=["a field", "nested fields", "the whole form"],
)
def test_errors_of_a_form_are_named_by_field(errors, data):
    response = answer(exceptions.ValidationError(errors))
    assert (response.status_code, response.data["code"]) == (400, "invalid")
    assert response.data.items() >= data.items()
    assert ("fields" in response.data) == ("fields" in data)


def test_a_temporary_error_says_when_to_retry_and_a_stream_gets_its_errors_as_json():
    assert int(answer(Coded("cluster_away"))["Retry-After"]) > 0
    assert answer(exceptions.Throttled(wait=3))["Retry-After"] == "3"
    assert "Retry-After" not in answer(Coded("in_use"))
    assert answer(Http404(), accept="text/event-stream")["Content-Type"] == "application/json"


@pytest.mark.django_db
def test_json_that_is_nested_too_deeply_is_refused(api, owner):
    body = "[" * 100_000 + "]" * 100_000
    response = api(owner).post("/api/v1/datasets/", body, content_type="application/json")
    assert (response.status_code, response.json()["code"]) == (400, "malformed")


def _serializers(base=serializers.ModelSerializer):
    """Yield the console's own serializers of models."""
    for kind in base.__subclasses__():
        yield from _serializers(kind)
        if kind.__module__.startswith(("console.", "billing.", "jobs.", "storage.")):
            yield kind


def _is_nullable(model, source):
    """Return whether `source`, a path such as `hold.receipt.pk`, goes through a nullable column."""
    for name in source.split("."):
        try:
            column = model._meta.get_field(name)
        except FieldDoesNotExist:
            return False
        if column.one_to_many or column.many_to_many:
            return False
        if column.null:
            return True
        model = column.related_model
    return False


def test_the_schema_names_nullable_fields():
    wrong = [
        f"{kind.__name__}.{name}"
        for kind in _serializers()
        for name, field in kind().fields.items()
        if field.read_only and not field.allow_null and _is_nullable(kind.Meta.model, field.source)
    ]
    assert wrong == []


def broken(request):
    raise RuntimeError("the detail")


def forbidden(request):
    raise PermissionDenied


urlpatterns = [path("api/v1/broken/", broken), path("api/v1/forbidden/", forbidden)]
handler400, handler403, handler404, handler500 = (
    console_api.bad_request, console_api.permission_denied, console_api.page_not_found, console_api.server_error,
)  # fmt: skip


@pytest.mark.urls(__name__)
def test_an_unexpected_error_is_logged_and_hides_its_detail(caplog):
    client = Client(raise_request_exception=False)
    with caplog.at_level(logging.ERROR, "django.request"):
        response = client.get("/api/v1/broken/")
    assert (response.status_code, response.json()["code"]) == (500, "internal_error")
    assert "the detail" not in response.content.decode()
    assert "the detail" in caplog.text


@pytest.mark.urls(__name__)
def test_djangos_own_errors_under_the_api_are_json(client):
    for name, host, status, code in (
        ("forbidden", "testserver", 403, "not_allowed"),
        ("nowhere", "testserver", 404, "not_found"),
        ("broken", "evil.example", 400, "malformed"),  # refused before the view: no host of this console
    ):
        answer = client.get(f"/api/v1/{name}/", headers={"host": host})
        assert (answer.status_code, answer.json()["code"]) == (status, code)
