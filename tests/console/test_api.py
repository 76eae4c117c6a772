"""The table from errors to statuses, and the shape of every error."""

import logging

import pytest
from django.core.exceptions import PermissionDenied
from django.http import Http404
from django.test import Client, override_settings
from django.urls import path
from rest_framework import exceptions, serializers
from rest_framework.test import APIRequestFactory

from console import api as roof
from console.accounts.errors import CustomerError, InvalidInput, LastOwner, ServiceInactive
from console.accounts.permissions import TenantView
from console.accounts.sse import EventStreamRenderer


class Coded(CustomerError):
    def __init__(self, code):
        self.code = code
        super().__init__("Say what to do.")


def answer(error, **headers):
    class View(TenantView):
        permission_classes = ()
        renderer_classes = (*TenantView.renderer_classes, EventStreamRenderer)

        def get(self, request):
            raise error

    response = View.as_view()(APIRequestFactory().get("/", headers=headers))
    response.render()
    return response


@pytest.mark.parametrize(("code", "status"), [*roof.STATUS_OF_CODE.items(), ("anything_else", 400)])
def test_a_customer_error_has_the_status_of_its_code(code, status):
    response = answer(Coded(code))
    assert response.status_code == status
    assert response.data == {"code": code, "message": "Say what to do."}


def test_fields_are_named():
    response = answer(InvalidInput(fields={"lr": "Give a number."}))
    assert response.data["fields"] == {"lr": "Give a number."}
    assert response.data["code"] == "invalid"


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
        (ServiceInactive(), 403, "service_inactive"),
        (LastOwner(), 409, "last_owner"),
    ],
)
def test_what_frameworks_refuse(error, status, code):
    response = answer(error)
    assert (response.status_code, response.data["code"]) == (status, code)
    assert response.data["message"]


def test_throttled_says_when():
    assert answer(exceptions.Throttled(wait=3))["Retry-After"] == "3"


def test_nested_sentences_are_flattened():
    class Line(serializers.Serializer):
        count = serializers.IntegerField(min_value=1)

    class Shape(serializers.Serializer):
        lines = Line(many=True)
        names = serializers.ListField(child=serializers.CharField(max_length=2))
        tags = serializers.DictField(child=serializers.IntegerField())

        def validate(self, attrs):
            raise serializers.ValidationError("never reached")

    shape = Shape(data={"lines": [{"count": 1}, {"count": 0}], "names": ["ok", "long"], "tags": {"a": "x"}})
    assert not shape.is_valid()
    response = answer(exceptions.ValidationError(shape.errors))
    assert set(response.data["fields"]) == {"lines.1.count", "names.1", "tags.a"}


def test_a_sentence_about_the_whole_becomes_the_message():
    response = answer(exceptions.ValidationError({"non_field_errors": ["These two exclude each other."]}))
    assert response.data == {"code": "invalid", "message": "These two exclude each other."}


def test_errors_of_streams_are_json():
    response = answer(Http404(), accept="text/event-stream")
    assert response["Content-Type"] == "application/json"


def broken(request):
    raise RuntimeError("the detail")


def forbidden(request):
    raise PermissionDenied


urlpatterns = [
    path("api/v1/broken/", broken),
    path("broken", broken),
    path("api/v1/forbidden/", forbidden),
]
handler400, handler403, handler404, handler500 = (
    roof.bad_request, roof.permission_denied, roof.page_not_found, roof.server_error,
)  # fmt: skip


@override_settings(ROOT_URLCONF=__name__)
def test_unforeseen_errors_are_logged_and_tell_nothing(caplog):
    client = Client(raise_request_exception=False)
    with caplog.at_level(logging.ERROR, "django.request"):
        response = client.get("/api/v1/broken/")
    assert (response.status_code, response.json()["code"]) == (500, "internal_error")
    assert "the detail" not in response.content.decode()
    assert "the detail" in caplog.text


@override_settings(ROOT_URLCONF=__name__)
def test_under_the_api_django_answers_in_json_too():
    client = Client(raise_request_exception=False)
    assert client.get("/api/v1/forbidden/").json()["code"] == "not_allowed"
    missing = client.get("/api/v1/nowhere/")
    assert (missing.status_code, missing.json()["code"]) == (404, "not_found")
    odd_host = client.get("/api/v1/broken/", headers={"host": "evil.example"})
    assert (odd_host.status_code, odd_host.json()["code"]) == (400, "malformed")
