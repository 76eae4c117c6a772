"""Amounts of money as people type them. The one rule: a form gives minor units, or says what to type."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation

from django import forms
from django.utils.translation import gettext as _

from billing import wording


class AmountField(forms.CharField):
    """An amount in the currency's major unit; a comma may stand for the decimal point. `clean` gives minor units."""

    currency = ""

    def __init__(self, *, label: object) -> None:
        widget = forms.TextInput(attrs={"inputmode": "decimal", "autocomplete": "off"})
        super().__init__(label=label, max_length=20, widget=widget)  # type: ignore[arg-type]  # a lazy text, too

    def clean(self, value: object) -> int:
        """Minor units. Raises ValidationError."""
        text = super().clean(value).strip().replace(",", ".")
        try:
            return wording.to_minor(Decimal(text), self.currency)
        except (InvalidOperation, ValueError, OverflowError):  # the last two: too many decimals; "NaN", "Infinity"
            raise forms.ValidationError(_("Give an amount such as 50 or 19.90.")) from None
