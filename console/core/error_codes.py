"""All error codes of the API, with their HTTP status and their meanings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from django.utils import translation
from django.utils.translation import gettext_lazy as _
from rest_framework import exceptions

from console.core.errors import CustomerError, Text

STATUS_OF_CODE = {
    "not_found": 404,
    "file_not_found": 404,
    "name_taken": 409,
    "in_use": 409,
    "idempotency_conflict": 409,
    "already_ended": 409,
    "no_logs": 409,
    "no_notebooks": 409,
    "not_extensible": 409,
    "logs_unreachable": 409,
    "stale_transition": 409,
    "quote_expired": 409,
    "quota_exceeded": 409,
    "budget_exceeded": 409,
    "last_owner": 409,
    "sole_owner": 409,
    "organization_closing": 409,
    "offset_conflict": 409,
    "upload_ended": 410,
    "file_changed": 412,
    "unsupported_version": 412,
    "too_large": 413,
    "storage_full": 507,
    "too_many_invitations": 429,
    "too_many_uploads": 429,
    "too_many_tools": 429,
    "checksum_mismatch": 460,  # defined by tus
    "insufficient_funds": 402,
    "service_inactive": 403,
    "not_allowed": 403,
    "second_factor_required": 403,
    "cluster_away": 503,
    "tools_away": 503,
    "bucket_unavailable": 503,
    "payments_unavailable": 503,
    "pdf_unavailable": 503,
}
"""The HTTP status by the code of a CustomerError; codes that are missing here have the status 400. The keys are codes
and not classes, because this module may not import the packages that define the classes."""

CODE_OF_EXCEPTION: dict[type[exceptions.APIException], str] = {
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
"""The code by the class of DRF's exceptions. A subclass must come before its base class."""
INTERNAL: Text = _("Something went wrong on our side. The error was logged. Try again later.")
MALFORMED: Text = _("The request is malformed. Check its syntax.")
DATABASE_UNAVAILABLE: Text = _("The database cannot be reached. Try again in a few seconds.")
REDIS_UNAVAILABLE: Text = _(
    "The console cannot check its limits, because its Redis cannot be reached. Try again in a few seconds."
)
ERRORS_WITHOUT_CLASS: dict[str, tuple[int, Text]] = {
    "malformed": (400, MALFORMED),
    "internal_error": (500, INTERNAL),
    "database_unavailable": (503, DATABASE_UNAVAILABLE),
    "redis_unavailable": (503, REDIS_UNAVAILABLE),
}
"""Status and message, by code, of errors that no error class stands for. They can also happen outside of the API's
views, where the handlers of `console.api` answer them."""


@dataclass(frozen=True)
class ErrorCode:
    """A code with its status. Several error classes may share a code, so it may have several meanings."""

    code: str
    status: int
    meanings: tuple[str, ...]
    """The explanations of the error, in English: the first paragraph of each class's docstring."""
    messages: tuple[Text, ...]
    """The messages that customers get; none if every message is written where the error is raised."""


def reference() -> list[ErrorCode]:
    """Return all codes in alphabetical order, as collected from the error classes."""
    # Status, meanings and messages by code. The keys of the inner dicts are meanings and messages, without repetitions.
    by_code: dict[str, tuple[int, dict[str, None], dict[Text, None]]] = {}
    for error_class in _error_classes(CustomerError):
        status = STATUS_OF_CODE.get(error_class.code, 400)
        _status, meanings, messages = by_code.setdefault(error_class.code, (status, {}, {}))
        first_paragraph = " ".join((error_class.__doc__ or "").split("\n\n")[0].split())
        meanings[first_paragraph] = None
        if "message" in vars(error_class):
            messages[error_class.message] = None
    with translation.override("en"):  # DRF translates its explanations, but those of the other classes are English
        for exception, code in CODE_OF_EXCEPTION.items():
            by_code.setdefault(code, (exception.status_code, {str(exception.default_detail): None}, {}))
    for code, (status, message) in ERRORS_WITHOUT_CLASS.items():
        # Replaces DRF's explanation of the same code (`malformed`): this message also says what to do.
        by_code[code] = (status, {}, {message: None})
    return [
        ErrorCode(code, status, tuple(meanings), tuple(messages))
        for code, (status, meanings, messages) in sorted(by_code.items())
    ]


def _error_classes(root: type[CustomerError]) -> Iterator[type[CustomerError]]:
    """Yield the subclasses of `root` at any depth, without each package's root class, which is never raised itself."""
    for error_class in root.__subclasses__():
        if not (error_class.__doc__ or "").startswith("Root of"):
            yield error_class
        yield from _error_classes(error_class)
