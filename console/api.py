"""The HTTP API's roof: its addresses, and the one table from an error to an HTTP status.

The one rule: whatever goes wrong under /api/, the body is `{"code", "message", "fields"?}`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.urls import path
from django.utils.translation import gettext_lazy as _
from django.views import defaults
from drf_spectacular.views import SpectacularAPIView, SpectacularSwaggerView
from rest_framework import exceptions
from rest_framework.renderers import JSONRenderer
from rest_framework.response import Response

from billing import api as billing
from console.accounts import api as accounts
from console.accounts.errors import CustomerError, NotAllowed, NotFound, Text
from jobs import api as jobs
from storage import api as storage

API_PREFIXES = ("/api/", "/webhooks/")

STATUS_OF_CODE = {
    "not_found": 404,
    "file_not_found": 404,
    "run_not_found": 404,
    "name_taken": 409,
    "in_use": 409,
    "idempotency_conflict": 409,
    "already_ended": 409,
    "stale_transition": 409,
    "quote_expired": 409,
    "quota_exceeded": 409,
    "budget_exceeded": 409,
    "last_owner": 409,
    "too_large": 413,
    "storage_full": 507,
    "insufficient_funds": 402,
    "service_inactive": 403,
    "not_allowed": 403,
    "backend_unavailable": 503,
    "payments_unavailable": 503,
    "pdf_unavailable": 503,
}
"""A customer error whose code is not here is a 400. By code, so that no room need be imported."""

CODE_OF_REFUSAL: dict[type[exceptions.APIException], str] = {
    exceptions.ParseError: "malformed",
    exceptions.AuthenticationFailed: "authentication_failed",
    exceptions.NotAuthenticated: "not_authenticated",
    exceptions.MethodNotAllowed: "method_not_allowed",
    exceptions.NotAcceptable: "not_acceptable",
    exceptions.UnsupportedMediaType: "unsupported_media_type",
    exceptions.Throttled: "throttled",
    exceptions.PermissionDenied: "not_allowed",
    exceptions.NotFound: "not_found",
}
INVALID: Text = _("Some values need correcting.")
NOT_AUTHENTICATED: Text = _("Log in, or send an API token: Authorization: Token ty_...")
INTERNAL: Text = _("Something went wrong on our side. It was logged. Try again later.")
REFUSED: Text = _("This request can't be understood.")
OF_THE_WHOLE = "non_field_errors"


def exception_handler(error: Exception, context: Mapping[str, Any]) -> Response | None:
    """DRF's hook: the answer to an error. None for one that nobody foresaw: Django logs it and answers with 500."""
    if isinstance(error, Http404):
        error = NotFound()
    elif isinstance(error, PermissionDenied):
        error = exceptions.PermissionDenied()
    if isinstance(error, CustomerError):
        answer = Response(
            error_body(error.code, error.message, error.fields), status=STATUS_OF_CODE.get(error.code, 400)
        )
    elif isinstance(error, exceptions.APIException):
        answer = _refusal(error)
    else:
        return None
    if request := context.get("request"):
        # Whatever was asked for (an event stream, say), an error is JSON.
        request.accepted_renderer, request.accepted_media_type = JSONRenderer(), JSONRenderer.media_type
    return answer


def error_body(code: str, message: Text, fields: Mapping[str, Text] | None = None) -> dict[str, Any]:
    """The body of every error."""
    body: dict[str, Any] = {"code": code, "message": _utf8(message)}
    if fields:
        body["fields"] = {_utf8(name): _utf8(sentence) for name, sentence in fields.items()}
    return body


def _utf8(sentence: Text) -> str:
    """A sentence may quote what was sent, and JSON can spell halves of characters, which no answer can carry."""
    return str(sentence).encode("utf-8", "replace").decode()


def _refusal(error: exceptions.APIException) -> Response:
    """The answer to what the framework itself refuses."""
    if isinstance(error, exceptions.ValidationError):
        fields = dict(_sentences(error.detail))
        whole = fields.pop(OF_THE_WHOLE, None)
        return Response(error_body("invalid", whole or INVALID, fields), status=400)
    code = next((code for kind, code in CODE_OF_REFUSAL.items() if isinstance(error, kind)), "error")
    message: Text = str(error.detail)
    if type(error) is exceptions.NotAuthenticated:
        message = NOT_AUTHENTICATED
    elif isinstance(error, exceptions.PermissionDenied) and error.detail == exceptions.PermissionDenied.default_detail:
        message = NotAllowed.message
    headers = {}
    if challenge := getattr(error, "auth_header", None):
        headers["WWW-Authenticate"] = challenge
    if (wait := getattr(error, "wait", None)) is not None:
        headers["Retry-After"] = str(int(wait))
    return Response(error_body(code, message), status=error.status_code, headers=headers)


def _sentences(detail: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """(field, sentence) of DRF's nested details, with names such as `nodes.0.count` for what lies deeper."""
    if isinstance(detail, Mapping):
        for key, value in detail.items():
            inner = name if key == OF_THE_WHOLE and name else f"{name}.{key}" if name else str(key)
            yield from _sentences(value, inner)
    elif isinstance(detail, Sequence) and not isinstance(detail, str):
        if any(isinstance(item, Mapping) for item in detail):
            for number, item in enumerate(detail):
                yield from _sentences(item, f"{name}.{number}" if name else str(number))
        elif detail:
            yield name or OF_THE_WHOLE, " ".join(str(item) for item in detail)
    else:
        yield name or OF_THE_WHOLE, str(detail)


# --- What goes wrong before or outside a view -------------------------------------------------------------------------


def _answer(
    request: HttpRequest, status: int, code: str, message: Text, page: Callable[[], HttpResponse]
) -> HttpResponseBase:
    """JSON under the API, the page everywhere else."""
    if request.path.startswith(API_PREFIXES):
        return JsonResponse(error_body(code, message), status=status)
    return page()


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponseBase:
    """Django's handler400."""
    return _answer(request, 400, "malformed", REFUSED, lambda: defaults.bad_request(request, exception))


def permission_denied(request: HttpRequest, exception: Exception) -> HttpResponseBase:
    """Django's handler403."""
    message = NotAllowed.message
    return _answer(request, 403, "not_allowed", message, lambda: defaults.permission_denied(request, exception))


def page_not_found(request: HttpRequest, exception: Exception) -> HttpResponseBase:
    """Django's handler404."""
    return _answer(request, 404, "not_found", NotFound.message, lambda: defaults.page_not_found(request, exception))


def server_error(request: HttpRequest) -> HttpResponseBase:
    """Django's handler500; the error itself is in the log."""
    return _answer(request, 500, "internal_error", INTERNAL, lambda: defaults.server_error(request))


# --- Addresses --------------------------------------------------------------------------------------------------------

urlpatterns = [
    path("schema/", SpectacularAPIView.as_view(), name="api_schema"),
    path("docs/", SpectacularSwaggerView.as_view(url_name="api_schema"), name="api_docs"),
    *accounts.urlpatterns,
    *storage.urlpatterns,
    *billing.urlpatterns,
    *jobs.urlpatterns,
]
