"""Django's checks of the payment settings. The console starts only if Stripe can charge some amount in its currency."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error

from billing import currencies


def check_payment_settings(**_options: Any) -> list[CheckMessage]:
    """Check the kind of the key and CURRENCY, and that some amount lies within the limits of top-ups and of Stripe."""
    if settings.STRIPE_SECRET_KEY.startswith(("pk_", "whsec_")):
        message = "STRIPE_SECRET_KEY is not a secret key: every payment would be refused."
        return [Error(message, hint="Use a key that begins with sk_ or rk_.", id="billing.E003")]
    currency = settings.CURRENCY
    if currency not in currencies.SUPPORTED:
        message = f"CURRENCY is {currency!r}, which Stripe does not support."
        return [
            Error(message, hint="Use a three-letter ISO 4217 code in capitals, for example USD.", id="billing.E001")
        ]
    minimum, maximum = settings.TOP_UP_MINIMUM_MINOR, settings.TOP_UP_MAXIMUM_MINOR
    if not 0 < currencies.round_up_for_payment(minimum, currency) <= maximum <= currencies.LARGEST_PAYMENT:
        message = f"No amount lies between TOP_UP_MINIMUM_MINOR ({minimum}) and TOP_UP_MAXIMUM_MINOR ({maximum})."
        unit = f"{currency} has {currencies.decimals(currency)} decimals; payments are multiples of"
        hint = f"{unit} {currencies.step(currency)} and at most {currencies.LARGEST_PAYMENT} minor units."
        return [Error(message, hint=hint, id="billing.E002")]
    return []
