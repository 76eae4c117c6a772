"""Parse amounts, times and ids from forms and URLs into minor units, seconds and integers."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation

from django import forms
from django.utils.translation import gettext as _

from billing.amounts import parse_amount

MAX_DIGITS = 18
"""Largest number of digits of an id or a time. PostgreSQL's bigint holds every number of 18 digits, but not of 19."""


def parse_row_id(text: str) -> int | None:
    """Parse a row id from a URL or form. Returns None if it is invalid."""
    return int(text) if text.isdecimal() and len(text) <= MAX_DIGITS else None


def parse_seconds(text: str, unit: int) -> int:
    """Parse a time in units of `unit` seconds, with a decimal point or comma, into seconds. Raises ValueError.

    A part of a second is rounded, so that a text of `time_text` becomes the same seconds again. Three digits after a
    comma are refused: "1,000" may mean a thousand.
    """
    if len(text.strip().partition(",")[2]) == 3:
        raise ValueError("The comma may separate thousands.")
    try:
        number = Decimal(text.replace(",", "."))
    except InvalidOperation as error:
        raise ValueError("This is not a number.") from error
    # Decimal also parses "NaN", "Infinity" and "1e999999", whose conversion to int would take very long.
    if not number.is_finite() or number.adjusted() >= MAX_DIGITS:
        raise ValueError("This is not a number.")
    return round(number * unit)


def time_text(seconds: int, unit: int) -> str:
    """Return a time in units of `unit` seconds, at most an hour, for a form."""
    return f"{seconds / unit:.4f}".rstrip("0").rstrip(".")  # four decimals of an hour are exact to a second


class AmountField(forms.CharField):
    """A field for an amount in major units, with a decimal point or comma. `clean` returns minor units."""

    currency = ""
    """Each form sets its fields' currency in its constructor: the number of decimals depends on the currency."""

    def __init__(self, *, label: object) -> None:
        widget = forms.TextInput(attrs={"inputmode": "decimal", "autocomplete": "off"})
        super().__init__(label=label, max_length=20, widget=widget)  # type: ignore[arg-type]  # Django accepts lazy texts too

    def clean(self, value: object) -> int:
        """Return minor units. Raises ValidationError."""
        try:
            return parse_amount(super().clean(value), self.currency)
        except ValueError:
            message = _("Enter an amount such as 50 or 19.90, without thousands separators.")
            raise forms.ValidationError(message) from None
