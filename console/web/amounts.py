"""Amounts of money, times and rows as people type them, or whoever it is that fills a form in.

The one rule: a form gives minor units, seconds or a number of a row, or says what to type.
"""

from __future__ import annotations

from decimal import Decimal, InvalidOperation

from django import forms
from django.utils.translation import gettext as _

from billing import wording

LONGEST_NUMBER = 18
"""Digits: what has more is no row's number, and no time."""


def row_number(text: str) -> int | None:
    """The number of a row, as an address or a form has it; None for what is none."""
    return int(text) if text.isdecimal() and len(text) <= LONGEST_NUMBER else None


def seconds(text: str, unit: int) -> int:
    """A time in units of so many seconds; a comma may stand for the decimal point. Raises ValueError."""
    try:
        number = Decimal(text.replace(",", "."))
    except InvalidOperation as error:
        raise ValueError("This is no time.") from error
    if not number.is_finite() or number.adjusted() >= LONGEST_NUMBER:
        raise ValueError("This is no time.")
    return int(number * unit)


class AmountField(forms.CharField):
    """An amount in the currency's major unit; a comma may stand for the decimal point. `clean` gives minor units."""

    currency = ""

    def __init__(self, *, label: object) -> None:
        widget = forms.TextInput(attrs={"inputmode": "decimal", "autocomplete": "off"})
        super().__init__(label=label, max_length=20, widget=widget)  # type: ignore[arg-type]  # a lazy text, too

    def clean(self, value: object) -> int:
        """Minor units. Raises ValidationError."""
        try:
            return wording.typed_minor(super().clean(value), self.currency)
        except ValueError:
            sentence = _("Give an amount such as 50 or 19.90, without marks between thousands.")
            raise forms.ValidationError(sentence) from None
