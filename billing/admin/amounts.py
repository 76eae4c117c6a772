"""Amounts on admin pages, in the currency's major unit: typed as 19.90, shown as $19.90.

Rows store integers in the minor unit. `AmountForm` converts the typed amount. `ShowsAmounts` shows every field whose
name ends in `_minor` as money, in lists, pages and inlines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import cache
from typing import Any, cast

from django import forms
from django.contrib import admin
from django.contrib.admin.utils import label_for_field
from django.db.models import Model
from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from unfold.widgets import UnfoldAdminDecimalFieldWidget

from billing.amounts import money, to_major, to_minor
from billing.currencies import decimals
from billing.selectors import default_currency, wallet

MAX_DIGITS = 15
"""Maximum number of digits of a typed amount. The conversion to minor units appends up to three digits, and any number
of 18 digits fits the 64-bit columns."""
SUFFIX = "_minor"
PARENTS = ("account", "top_up", "dispute", "invoice", "grant", "hold")
"""Relations that lead from a row without a currency of its own to a row that has one, perhaps in several steps."""


def currency_of(row: Any) -> str:
    """Return the currency of a row: its own, its parent's, or else the currency of the organization's wallet."""
    if currency := getattr(row, "currency", ""):
        return str(currency)
    for name in PARENTS:
        if parent := getattr(row, name, None):
            return currency_of(parent)
    organization = getattr(row, "organization", None)
    account = wallet(organization) if organization else None
    return account.currency if account else default_currency()


def input_value(amount: Decimal, currency: str) -> str:
    """Format a number for an input field, with at least the currency's decimals."""
    integer, _point, fraction = f"{amount:f}".partition(".")
    fraction = fraction.rstrip("0").ljust(decimals(currency), "0")
    return f"{integer}.{fraction}" if fraction else integer


class AmountInput(UnfoldAdminDecimalFieldWidget):  # type: ignore[misc]  # unfold publishes no types
    """A number input that allows any number of decimals in the browser. The form checks the currency's decimals."""

    def __init__(self) -> None:
        super().__init__(attrs={"step": "any"})


class AmountForm(forms.ModelForm):  # type: ignore[type-arg]  # at run time Django's class takes no argument
    """A form with a field `amount` in major units. The row stores it in minor units, in its field `minor_name`."""

    minor_name = "amount_minor"
    allows_zero = False

    amount = forms.DecimalField(
        label=gettext_lazy("Amount"),
        max_digits=MAX_DIGITS,
        widget=AmountInput,
        help_text=gettext_lazy("In the major unit of the currency, for example 19.90."),
    )

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        minor, currency = getattr(self.instance, self.minor_name), currency_of(self.instance)
        if minor is not None:
            self.initial.setdefault("amount", input_value(to_major(minor, currency), currency))

    def currency(self, data: dict[str, Any]) -> str:
        """Return the currency of the typed amount. Subclasses find it in `data`, or return "" if a field is missing."""
        return currency_of(self.instance)

    def clean(self) -> dict[str, Any]:
        """Convert the amount to minor units, in the cleaned data and on the instance."""
        data = super().clean() or {}
        amount, currency = data.get("amount"), self.currency(data)
        if amount is None or not currency:
            return data
        try:
            minor = to_minor(amount, currency)
        except ValueError:
            sentence = _("An amount in %(currency)s has at most %(digits)d decimals.")
            self.add_error("amount", sentence % {"currency": currency, "digits": decimals(currency)})
            return data
        if minor < (0 if self.allows_zero else 1):
            self.add_error("amount", _("Enter 0 or more.") if self.allows_zero else _("Enter an amount above 0."))
            return data
        data["amount_minor"] = minor  # for the checks of subclasses
        setattr(self.instance, self.minor_name, minor)
        return data


class ShowsAmounts:
    """Mixin for an admin or inline that shows each `_minor` field as money."""

    def get_list_display(self, request: HttpRequest) -> Sequence[Any]:
        """Return the columns, with amounts as money."""
        return self._with_formatted_amounts(super().get_list_display(request))  # type: ignore[misc]  # of the admin it is mixed into

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Sequence[Any]:
        """Return the read-only fields, with amounts as money."""
        return self._with_formatted_amounts(super().get_readonly_fields(request, obj))  # type: ignore[misc]

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Sequence[Any]:
        """Return a page's fields, with amounts as read-only money. `AmountForm` has the field to type an amount in."""
        return self._with_formatted_amounts(super().get_fields(request, obj))  # type: ignore[misc]

    def _with_formatted_amounts(self, names: Sequence[Any]) -> Sequence[Any]:
        """Return the field names, with each `_minor` field replaced by a column that shows money."""
        return [
            _column(self.model, name) if isinstance(name, str) and name.endswith(SUFFIX) else name  # type: ignore[attr-defined]
            for name in names
        ]


@cache
def _column(model: type[Model], name: str) -> Callable[[Any], str]:
    """Return the column that shows a field as money.

    It is cached because the admin compares columns by identity.
    """

    def show(row: Any) -> str:
        value = getattr(row, name)
        return "–" if value is None else money(value, currency_of(row))

    show.__name__ = name.removesuffix(SUFFIX)  # the admin makes the CSS class of the column from it
    label = cast("str", label_for_field(name, model))  # a lazy text, because each request has its own language
    return admin.display(show, description=label, ordering=name)
