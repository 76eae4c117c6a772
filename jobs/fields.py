"""Raw values, from a form or from JSON, read one field after the other.

The one rule: what is wrong with a field is a sentence for who filled it in (ValueError, or a CustomerError), and one
field's fault keeps no other from being read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from django.utils.translation import gettext as _

from console.accounts.errors import CustomerError, Text

T = TypeVar("T")


class Reader:
    """Reads one field after the other and remembers what was wrong with each."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data
        self.faults: dict[str, Text] = {}

    def field(self, name: str, read: Callable[[Any], T]) -> T | None:
        """The value of a field, or None where it is at fault."""
        try:
            return read(self.data.get(name))
        except CustomerError as error:
            self.faults[name] = error.fields.get(name) or error.message
        except ValueError as error:
            self.faults[name] = str(error)
        return None


def or_zero(value: Any, least: int, most: int) -> int:
    """A number within bounds; 0 and nothing both mean: as the framework has it."""
    return 0 if is_empty(value) or str(value).strip() == "0" else whole(value, least, most)


def optional(value: Any, least: int, most: int) -> int | None:
    """A whole number within bounds, or None where it was left out."""
    return None if is_empty(value) else whole(value, least, most)


def is_empty(value: Any) -> bool:
    """Whether a field was left out: a form sends an empty text for that."""
    return value is None or value == ""


def whole(value: Any, least: int, most: int) -> int:
    """A whole number within bounds. Raises ValueError."""
    sentence = _("Give a whole number from %(least)d to %(most)d.") % {"least": least, "most": most}
    try:
        # Through its text: 2.5 and True are no whole numbers, "2" from a form is one.
        number = int(str(value).strip())
    except ValueError:
        raise ValueError(sentence) from None
    if not least <= number <= most:
        raise ValueError(sentence)
    return number


def name(value: Any) -> str:
    """A name that was chosen. Raises ValueError."""
    if not isinstance(value, str) or not value.strip() or not is_text(value):
        raise ValueError(_("Choose one."))
    return value.strip()


def is_text(value: str) -> bool:
    """Whether the database can keep it: JSON can also spell a NUL, and halves of characters."""
    return "\0" not in value and not any("\ud800" <= character <= "\udfff" for character in value)
