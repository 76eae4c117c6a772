"""Make JSON data that others wrote storable. Pure, standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def storable(value: Any) -> Any:
    """Return JSON data in which U+FFFD replaces the characters that PostgreSQL cannot store: NUL and lone surrogates.

    Customers' code and payers can write any text. If the console could not store how a run ended, the run would never
    end; if it could not store an event of a payment, Stripe would repeat its delivery for days.
    """
    if isinstance(value, Mapping):
        return {storable(name): storable(item) for name, item in value.items()}
    if isinstance(value, list):
        return [storable(item) for item in value]
    if isinstance(value, str):
        # By UTF-16, in which the two halves of a surrogate pair become one character.
        return value.replace("\0", "\ufffd").encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value
