"""Read the JSON object and the idempotency key of an API request."""

from __future__ import annotations

from typing import Any

from django.utils.translation import gettext as _
from rest_framework.request import Request

from console.core.errors import InvalidInput
from jobs.fields import is_storable_text

MAX_KEY_LENGTH = 255
"""Characters of an idempotency key: the length of its column."""


def json_object(request: Request) -> dict[str, Any]:
    """Return the body. Raises InvalidInput if it is no JSON object."""
    if not isinstance(request.data, dict):
        raise InvalidInput(_("Send a JSON object."))
    return dict(request.data)


def idempotency_key(request: Request) -> str:
    """Return the header `Idempotency-Key`, or an empty string. Raises InvalidInput."""
    key = request.headers.get("Idempotency-Key", "")
    if len(key) > MAX_KEY_LENGTH:
        raise InvalidInput(fields={"Idempotency-Key": _("Use at most 255 characters.")})
    if not is_storable_text(key) or any(character < " " or character == "\x7f" for character in key):
        raise InvalidInput(
            fields={"Idempotency-Key": _("Use only letters, digits and punctuation, for example a UUID.")}
        )
    return key
