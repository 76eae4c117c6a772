"""Log lines: as JSON for collectors or as text for people, each with what it is about, and never with a secret.

Hides the formats, and what is taken for a secret. The one rule: whatever is written passes
`redacted`, the traceback too.
"""

from __future__ import annotations

import json
import logging
import re
import time
from typing import Any

from console.operations import context, tracing

FORMATS = ("text", "json")
HIDDEN = "[hidden]"
_MARK = r"([\"']?\s*[:=]\s*[\"']?)"
SECRETS = tuple(
    (re.compile(pattern), put)
    for pattern, put in (
        (r"\b(ty|sk_live|sk_test|rk_live|rk_test|whsec)_[A-Za-z0-9_-]{6,}", r"\1_" + HIDDEN),
        (rf"(?i)\b(authorization|stripe-signature|cookie|set-cookie){_MARK}[^\"'\r\n]+", r"\1\2" + HIDDEN),
        (r"(?i)\b(bearer|token|basic) +[A-Za-z0-9._~+/=-]{8,}", r"\1 " + HIDDEN),
        (rf"(?i)\b(\w*(?:passw(?:or)?d|secret|token|_key|sessionid)){_MARK}[^\s\"'&,;)}}\]]+", r"\1\2" + HIDDEN),
        (r"(://[^\s:/@]*:)[^\s@/]+@", r"\1" + HIDDEN + "@"),
        (r"(/accounts/(?:password/reset/key|confirm-email)/)[^\s/?\"']+", r"\1" + HIDDEN),
        (r"(?s)-----BEGIN [A-Z ]+-----.*?(-----END [A-Z ]+-----|$)", HIDDEN),
    )
)
"""Patterns of what may never be read in a log, and what stands there instead."""
SUSPECT = re.compile(r"ty_|sk_|rk_|whsec_|://|/accounts/|-----BEGIN |(?i:secret|token|passw|_key|cookie|sessionid)"
                     r"|(?i:authorization|signature|bearer|basic)")  # fmt: skip
"""Without one of these no pattern can be there: most lines are let through by one look."""
ACCESS = "access"
"""Where a record keeps the facts of a request."""
BOUND = "trainyard.bound"
"""Where a request keeps what was bound for it, for whoever logs its end: in its environ or scope."""


def configuration(*, form: str, level: str) -> dict[str, Any]:
    """Django's LOGGING. Raises ValueError for a format that is not there."""
    if form not in FORMATS:
        raise ValueError(f"LOG_FORMAT is {form!r}. It can be: {', '.join(FORMATS)}.")
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": f"console.operations.logs.{form.capitalize()}Lines"}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
        "root": {"handlers": ["stderr"], "level": level},
        "loggers": {
            **{name: {"level": "WARNING"} for name in ("httpx", "stripe", "urllib3")},
            # they bring handlers of their own unless told otherwise
            **{name: {"handlers": [], "propagate": True} for name in ("django", "gunicorn.error", "gunicorn.access")},
        },
    }


def place_of(request: Any) -> dict[str, Any]:
    """Where a Django request keeps things for whoever serves it: its environ, or its ASGI scope."""
    scope = getattr(request, "scope", None)
    return scope if isinstance(scope, dict) else getattr(request, "META", {})


def redacted(text: str) -> str:
    """`text` without what looks like a secret."""
    if not SUSPECT.search(text):
        return text
    for pattern, put in SECRETS:
        text = pattern.sub(put, text)
    return text


class JsonLines(logging.Formatter):
    """One JSON object for each record: time, level, logger, message, what is bound, the exception if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """See the class."""
        line: dict[str, Any] = {
            "time": _time_of(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redacted(record.getMessage()),
            "process": record.process,
            **_bound_to(record),
        }
        line.update(getattr(record, ACCESS, None) or {})
        if record.exc_info:
            line["exception"] = redacted(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False, default=str)


class TextLines(logging.Formatter):
    """The same for people: a line, and behind it what is bound."""

    def format(self, record: logging.LogRecord) -> str:
        """See the class."""
        message = _one_line(redacted(record.getMessage()))
        text = f"{_time_of(record)} {record.levelname} {record.name} {message}"
        if about := " ".join(f"{name}={value}" for name, value in _bound_to(record).items()):
            text = f"{text} [{about}]"
        return f"{text}\n{redacted(self.formatException(record.exc_info))}" if record.exc_info else text


def access(
    *, method: str, path: str, status: int, seconds: float, size: int | None, fields: dict[str, Any], logger: str
) -> None:
    """One line for a request that was answered. The query is left out: it may hold what only its sender should know."""
    facts = {"method": method, "path": redacted(path), "status": status, "seconds": round(seconds, 6), "bytes": size}
    message = f"{method} {facts['path']} {status} {seconds * 1000:.1f} ms"
    logging.getLogger(logger).info(message, extra={ACCESS: facts, "bound": fields})


def _bound_to(record: logging.LogRecord) -> dict[str, Any]:
    """The fields of a record: those it was made with, or those of the work that made it; and its trace."""
    request = getattr(record, "request", None)  # Django's own lines about an answer are written after all middleware
    given = getattr(record, "bound", None) or (place_of(request).get(BOUND) if request is not None else None)
    if given is not None:
        return {name: given[name] for name in (*context.FIELDS, "trace_id") if name in given}
    found: dict[str, Any] = context.fields()
    if trace := tracing.trace_id():
        found["trace_id"] = trace
    return found


def _one_line(text: str) -> str:
    """So that no message, whatever a stranger put into it, looks like two."""
    return " | ".join(text.splitlines())


def _time_of(record: logging.LogRecord) -> str:
    """ISO 8601 in UTC, with milliseconds."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"
