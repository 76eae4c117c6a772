"""Which fields of a form are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from console.core.errors import InvalidInput


def refused_fields(act: Callable[..., Any], **values: Any) -> list[str]:
    """Return the fields that a call refuses with InvalidInput; an empty list if it accepts the values."""
    try:
        act(**values)
    except InvalidInput as error:
        return sorted(error.fields)
    return []
