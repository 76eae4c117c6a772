"""What Django's system checks say of the settings of money. The one rule: what can't be charged is refused at start."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error

from billing import currencies


def settings_of_money(**_options: Any) -> list[CheckMessage]:
    """CURRENCY and the limits of a top-up."""
    currency = settings.CURRENCY
    if currency not in currencies.SUPPORTED:
        sentence = f"CURRENCY is {currency!r}: no payments can be taken in it."
        return [Error(sentence, hint="Give the three capital letters of a currency of Stripe's.", id="billing.E001")]
    least, most = settings.TOP_UP_MINIMUM_MINOR, settings.TOP_UP_MAXIMUM_MINOR
    if not 0 < currencies.payable(least, currency) <= most <= currencies.LARGEST_PAYMENT:
        sentence = f"TOP_UP_MINIMUM_MINOR is {least} and TOP_UP_MAXIMUM_MINOR {most}: nothing could be paid."
        unit = f"{currency} has {currencies.decimals(currency)} decimals, payments are multiples of"
        hint = f"{unit} {currencies.step(currency)} and at most {currencies.LARGEST_PAYMENT} minor units."
        return [Error(sentence, hint=hint, id="billing.E002")]
    return []
