"""Format log lines with structlog, as JSON for log collectors or as text for people.

Lines show the context fields (`console.observability.context`). Secrets in messages, paths and tracebacks are replaced
by REDACTED.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import structlog
from structlog.typing import EventDict, Processor

from console.observability import context, tracing

REDACTED = "[hidden]"
_SEPARATOR = r"([\"']?\s*[:=]\s*[\"']?)"
"""The text between a name and its value in headers, JSON, Python and shells: a colon or `=`, perhaps with quotes."""
SECRET_PATTERNS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\b(ty|sk_live|sk_test|rk_live|rk_test|whsec)_[A-Za-z0-9_-]{6,}", r"\1_" + REDACTED),
        (rf"(?i)\b(authorization|stripe-signature|cookie|set-cookie){_SEPARATOR}[^\"'\r\n]+", r"\1\2" + REDACTED),
        (r"(?i)\b(bearer|token|basic) +[A-Za-z0-9._~+/=-]{8,}", r"\1 " + REDACTED),
        (rf"(?i)\b(\w*(?:passw(?:or)?d|secret|token|_key|sessionid)){_SEPARATOR}[^\s\"'&,;)}}\]]+", r"\1\2" + REDACTED),
        (r"(://[^\s:/@]*:)[^\s@/]+@", r"\1" + REDACTED + "@"),
        (r"(/accounts/(?:password/reset/key|confirm-email)/|/invitations/)[^\s/?\"']+", r"\1" + REDACTED),
        (r"(?s)-----BEGIN [A-Z ]+-----.*?(-----END [A-Z ]+-----|$)", REDACTED),
    )
)
"""Patterns of secrets, and their replacements: tokens of the API and keys of Stripe, HTTP headers, values with names
such as `password`, passwords in URLs, one-time links, and private keys."""
MAYBE_SECRET = re.compile(r"ty_|sk_|rk_|whsec_|://|/accounts/|/invitations/|-----BEGIN |(?i:secret)"
                     r"|(?i:token|passw|_key|cookie|sessionid|authorization|signature|bearer|basic)")  # fmt: skip
"""Matches every text that one of SECRET_PATTERNS matches. Most lines hold no secret and need only this one search."""
LEVELS = tuple(logging.getLevelNamesMapping())
"""The values of LOG_LEVEL."""
ACCESS_ATTRIBUTE = "access"
"""The attribute of an access log's LogRecord that holds the request's method, path, status, seconds and bytes."""
FIELDS_KEY = "trainyard.bound"
"""The key of a request's context fields in its ASGI scope or WSGI environ."""


def configuration(*, log_format: str, level: str) -> dict[str, Any]:
    """Return the value of Django's setting LOGGING. `log_format` is a key of FORMATS; `level` is one of LEVELS."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": formatter, "log_format": log_format}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
        "root": {"handlers": ["stderr"], "level": level},
        "loggers": {
            **{name: {"level": "WARNING"} for name in ("httpx", "stripe", "urllib3")},
            # Django and uvicorn give these loggers handlers of their own, which would log each line twice.
            "django": {"handlers": [], "propagate": True},
            "uvicorn.access": {"handlers": [], "propagate": False},  # `console.access` replaces it
        },
    }


def formatter(log_format: str) -> structlog.stdlib.ProcessorFormatter:
    """Return the formatter for a key of FORMATS."""
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.processors.TimeStamper(fmt="iso", key="time"),
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            _add_context,
            structlog.processors.format_exc_info,
            _redact_event,
        ],
        processors=FORMATS[log_format],
    )


def redact(text: str) -> str:
    """Replace everything in `text` that looks like a secret."""
    if not MAYBE_SECRET.search(text):
        return text
    for pattern, replacement in SECRET_PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def request_scope(request: Any) -> dict[str, Any]:
    """Return the mapping in which a Django request has FIELDS_KEY: its ASGI scope, or its WSGI environ (`META`)."""
    scope = getattr(request, "scope", None)
    return scope if isinstance(scope, dict) else getattr(request, "META", {})


def log_request(
    *, method: str, path: str, status: int, seconds: float, size: int | None, fields: dict[str, Any], logger: str
) -> None:
    """Log a request to which a response was sent.

    `size` is the size of the response's body in bytes, `fields` are the request's context fields, and `logger` is the
    name of the logger. Callers pass the path without the URL's query, because the query may hold a secret.
    """
    details = {"method": method, "path": redact(path), "status": status, "seconds": round(seconds, 6), "bytes": size}
    message = f"{method} {details['path']} {status} {seconds * 1000:.1f} ms"
    logging.getLogger(logger).info(message, extra={ACCESS_ATTRIBUTE: details, "bound": fields})


def _add_context(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """Add the context fields of the request or task, and the id of its trace."""
    record = event["_record"]
    fields = getattr(record, "bound", None)  # set by `log_request`
    # Django logs a failed response after all middleware, when the context variable is already empty. The record of this
    # line has the attribute `request`.
    request = getattr(record, "request", None)
    if not fields and request is not None:
        fields = request_scope(request).get(FIELDS_KEY)
    if fields is None:
        fields = {**context.fields(), "trace_id": tracing.trace_id()}
    event.update((name, fields[name]) for name in (*context.FIELDS, "trace_id") if fields.get(name))
    return event


def _add_process(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """Add the process id and, to a line of the access log, ACCESS_ATTRIBUTE."""
    event["process"] = event["_record"].process
    event.update(getattr(event["_record"], ACCESS_ATTRIBUTE, {}))
    return event


def _redact_event(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """Replace secrets in the message and the traceback."""
    for name in ("event", "exception"):
        if name in event:
            event[name] = redact(event[name])
    return event


def _join_lines(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """Put the message on one line, so that a quoted text of a customer cannot pretend to be a log line."""
    event["event"] = " | ".join(event["event"].splitlines())
    return event


FORMATS: dict[str, Sequence[Processor]] = {
    "text": (
        _join_lines,
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        structlog.dev.ConsoleRenderer(
            colors=False, pad_event_to=0, pad_level=False, timestamp_key="time",
            exception_formatter=structlog.dev.plain_traceback,
        ),
    ),
    "json": (
        _add_process,
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        structlog.processors.EventRenamer("message"),
        structlog.processors.JSONRenderer(ensure_ascii=False),
    ),
}  # fmt: skip
"""The processors that turn a log event into a line, by the value of the setting LOG_FORMAT."""
