"""The routes of the HTTP API, and the responses to its errors.

The body of every error is `{"code", "message"}`, with `"fields"` if values are invalid. `console.core.error_codes`
lists the codes with their HTTP status.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import redis
from django.conf import settings
from django.core.exceptions import PermissionDenied
from django.db import InterfaceError, OperationalError
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.shortcuts import render
from django.urls import path
from django.utils.translation import gettext_lazy as _
from django.views import defaults
from drf_spectacular.views import SpectacularAPIView, SpectacularSwaggerSplitView
from rest_framework import exceptions
from rest_framework.renderers import JSONRenderer
from rest_framework.response import Response

from billing import api as billing
from console.accounts import api as accounts
from console.core.error_codes import (
    CODE_OF_EXCEPTION,
    DATABASE_UNAVAILABLE,
    INTERNAL,
    MALFORMED,
    REDIS_UNAVAILABLE,
    STATUS_OF_CODE,
)
from console.core.errors import CustomerError, NotAllowed, NotFound, Text
from jobs import api as jobs
from jobs import closure_api, model_api, notebook_api, search_api, storage_api, sweep_api
from jobs import dataset_api as dataset_publishing_api
from storage import api as storage
from storage import (
    dataset_api,
    registries_api,
    secrets_api,
    sharing_api,
    uploads_api,
    usage_api,
    workspace_api,
)

API_PREFIXES = ("/api/", "/webhooks/")
"""Paths below which errors are JSON. Everywhere else they are pages."""
ERRORS_PATH = "/docs/errors/"
"""The page that explains all error codes (`console.web.docs`). Each code is the anchor of its explanation."""

INVALID: Text = _("Some values are invalid. Correct them and try again.")
NOT_AUTHENTICATED: Text = _("Log in, or send an API token: Authorization: Token ty_...")
UNAVAILABLE_SQLSTATES = frozenset({"57P01", "57P02", "57P03", "53300"})
"""PostgreSQL's codes for: shut down by an administrator, crashed, still starting, too many connections."""
RETRY_AFTER_SECONDS = 5
"""The value of Retry-After in every response with status 503. Most outages, such as a restart, last seconds."""
NON_FIELD_ERRORS = "non_field_errors"
"""DRF's key for errors that belong to no field."""


def exception_handler(error: Exception, context: Mapping[str, Any]) -> Response | None:
    """Return the response to an error that a view raised (the function that DRF's EXCEPTION_HANDLER names).

    Return None for an unexpected error, which Django then logs and answers with 500.
    """
    if isinstance(error, Http404):
        error = NotFound()
    elif isinstance(error, PermissionDenied):
        error = exceptions.PermissionDenied()
    if isinstance(error, CustomerError):
        response = Response(
            error_body(error.code, error.message, error.fields), status=STATUS_OF_CODE.get(error.code, 400)
        )
    elif isinstance(error, exceptions.APIException):
        response = _framework_error_response(error)
    else:
        return None
    response["Link"] = _help_link(response.data["code"])
    if response.status_code == 503:
        response["Retry-After"] = str(RETRY_AFTER_SECONDS)
    if request := context.get("request"):
        # Errors are JSON even if the request asked for an event stream.
        request.accepted_renderer, request.accepted_media_type = JSONRenderer(), JSONRenderer.media_type
    return response


def _help_link(code: str) -> str:
    """Return the value of the header Link (RFC 8288) that leads from an error to its documentation."""
    return f'<{settings.TRAINYARD_URL}{ERRORS_PATH}#{code}>; rel="help"'


def error_body(code: str, message: Text, fields: Mapping[str, Text] | None = None) -> dict[str, Any]:
    """Return the body of an error."""
    body: dict[str, Any] = {"code": code, "message": _replace_surrogates(message)}
    if fields:
        body["fields"] = {_replace_surrogates(name): _replace_surrogates(sentence) for name, sentence in fields.items()}
    return body


def _replace_surrogates(sentence: Text) -> str:
    """Return the sentence with each lone surrogate replaced: it may quote input that UTF-8 cannot encode."""
    return str(sentence).encode("utf-8", "replace").decode()


def _framework_error_response(error: exceptions.APIException) -> Response:
    """Return the response to an error that DRF raised, such as an invalid value or a missing token."""
    if isinstance(error, exceptions.ValidationError):
        fields = dict(_flatten_errors(error.detail))
        form_error = fields.pop(NON_FIELD_ERRORS, None)
        return Response(error_body("invalid", form_error or INVALID, fields), status=400)
    # Other errors of DRF get the general code, as a CustomerError without a code of its own.
    codes = (code for error_class, code in CODE_OF_EXCEPTION.items() if isinstance(error, error_class))
    code = next(codes, CustomerError.code)
    message: Text = str(error.detail)
    if isinstance(error, exceptions.NotAuthenticated):
        message = NOT_AUTHENTICATED
    elif isinstance(error, exceptions.PermissionDenied) and error.detail == exceptions.PermissionDenied.default_detail:
        message = NotAllowed.message
    headers = {}
    if challenge := getattr(error, "auth_header", None):
        headers["WWW-Authenticate"] = challenge
    if (wait := getattr(error, "wait", None)) is not None:
        headers["Retry-After"] = str(int(wait))
    return Response(error_body(code, message), status=error.status_code, headers=headers)


def _flatten_errors(detail: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield (field, sentence) pairs from the nested `detail` of DRF's ValidationError.

    `name` is the field that `detail` belongs to. A nested field has a name such as `nodes.0.count`.
    """
    if isinstance(detail, Mapping):
        for key, value in detail.items():
            nested_name = name if key == NON_FIELD_ERRORS else f"{name}.{key}"
            yield from _flatten_errors(value, nested_name if name else str(key))
    elif isinstance(detail, Sequence) and not isinstance(detail, str):
        if any(isinstance(item, Mapping) for item in detail):
            for index, item in enumerate(detail):
                yield from _flatten_errors(item, f"{name}.{index}" if name else str(index))
        elif detail:
            yield name or NON_FIELD_ERRORS, " ".join(str(item) for item in detail)
    else:
        yield name or NON_FIELD_ERRORS, str(detail)


# --- Errors outside a view --------------------------------------------------------------------------------------------


def _error_response(
    request: HttpRequest, status: int, code: str, message: Text, page: Callable[[], HttpResponse]
) -> HttpResponseBase:
    """Return the error as JSON if the request is for the API, else what `page` returns."""
    if request.path.startswith(API_PREFIXES):
        return JsonResponse(error_body(code, message), status=status, headers={"Link": _help_link(code)})
    return page()


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponseBase:
    """Django's handler400."""
    return _error_response(request, 400, "malformed", MALFORMED, lambda: defaults.bad_request(request, exception))


def permission_denied(request: HttpRequest, exception: Exception) -> HttpResponseBase:
    """Django's handler403."""
    message = NotAllowed.message
    return _error_response(request, 403, "not_allowed", message, lambda: defaults.permission_denied(request, exception))


def page_not_found(request: HttpRequest, exception: Exception) -> HttpResponseBase:
    """Django's handler404. The page shows the message of a NotFound from which the view raised Http404."""
    cause = exception.__cause__
    message = cause.message if isinstance(cause, NotFound) else NotFound.message
    reason = "" if message == NotFound.message else message
    return _error_response(
        request, 404, "not_found", NotFound.message, lambda: render(request, "404.html", {"reason": reason}, status=404)
    )


def server_error(request: HttpRequest) -> HttpResponseBase:
    """Django's handler500. Django has logged the error. The status is 503 if the database or Redis is unavailable."""
    error = sys.exception()
    if _is_database_unavailable(error):
        return _unavailable_response(request, "database_unavailable", DATABASE_UNAVAILABLE)
    if isinstance(error, redis.RedisError):
        return _unavailable_response(request, "redis_unavailable", REDIS_UNAVAILABLE)
    return _error_response(request, 500, "internal_error", INTERNAL, lambda: defaults.server_error(request))


def _unavailable_response(request: HttpRequest, code: str, message: Text) -> HttpResponseBase:
    """Return a response with status 503."""
    # `render` gets no request: with one, the context processors would read the database.
    page = lambda: render(None, "503.html", {"message": message}, status=503)
    response = _error_response(request, 503, code, message, page)
    response["Retry-After"] = str(RETRY_AFTER_SECONDS)
    return response


def _is_database_unavailable(error: BaseException | None) -> bool:
    """Return whether the connection to the database failed, in contrast to a statement that PostgreSQL refused."""
    if not isinstance(error, OperationalError | InterfaceError):
        return False
    state: str | None = getattr(error.__cause__, "sqlstate", None)
    # Codes that begin with 08 are connection exceptions. An error without a code is the client's own: it could not
    # connect, or the connection broke.
    return state is None or state in UNAVAILABLE_SQLSTATES or state.startswith("08")


# --- Routes -----------------------------------------------------------------------------------------------------------

urlpatterns = [
    path("schema/", SpectacularAPIView.as_view(), name="api_schema"),
    path(
        "docs/",
        SpectacularSwaggerSplitView.as_view(url_name="api_schema", template_name="api/reference.html"),
        name="api_docs",
    ),
    *accounts.urlpatterns,
    *storage.urlpatterns,
    *uploads_api.urlpatterns,
    *dataset_api.urlpatterns,
    *sharing_api.urlpatterns,
    *usage_api.urlpatterns,
    *registries_api.urlpatterns,
    *secrets_api.urlpatterns,
    *workspace_api.urlpatterns,
    *billing.urlpatterns,
    *jobs.urlpatterns,
    *closure_api.urlpatterns,
    *search_api.urlpatterns,
    *storage_api.urlpatterns,
    *dataset_publishing_api.urlpatterns,
    *model_api.urlpatterns,
    *sweep_api.urlpatterns,
    *notebook_api.urlpatterns,
]
