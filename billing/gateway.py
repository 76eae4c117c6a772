"""The only importer of `stripe`: the payment provider behind a handful of calls of our own.

Hides keys, hosts, versions and the provider's error classes. The one rule: nothing is decided here; what came back is
told. Without keys of Stripe's it speaks to the sandbox (`billing.sandbox`), over the same client.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import stripe
from django.conf import settings

from billing.errors import BadSignature, PaymentUnavailable

SIGNATURE_TOLERANCE_SECONDS = 300


@dataclass(frozen=True)
class Checkout:
    """A hosted payment page, made."""

    session_id: str
    url: str


def is_live() -> bool:
    """Whether real money moves."""
    return "_live_" in settings.STRIPE_SECRET_KEY


def create_checkout(
    *, reference: str, amount_minor: int, currency: str, title: str, email: str, return_url: str
) -> Checkout:
    """Make a payment page for one amount. The same `reference` again gives the same page. Raises PaymentUnavailable."""
    try:
        session = _client().v1.checkout.sessions.create(
            {
                "mode": "payment",
                "client_reference_id": reference,
                "customer_email": email,
                "line_items": [
                    {
                        "quantity": 1,
                        "price_data": {
                            "currency": currency.lower(),
                            "unit_amount": amount_minor,
                            "product_data": {"name": title},
                        },
                    }
                ],
                "success_url": f"{return_url}?paid=1",
                "cancel_url": return_url,
            },
            {"idempotency_key": f"top-up-{reference}"},
        )
    except stripe.StripeError as error:
        raise PaymentUnavailable from error
    return Checkout(session_id=session.id, url=str(session.url))


def verify(payload: bytes, header: str) -> dict[str, Any]:
    """The event in a webhook's raw body, where one of our secrets signed it within the tolerance, either way.

    Raises BadSignature for anything else, a body that is no event included.
    """
    for secret in webhook_secrets():
        try:
            stripe.WebhookSignature.verify_header(
                payload.decode("utf-8"), header, secret, tolerance=SIGNATURE_TOLERANCE_SECONDS
            )
            stamp = next(int(part[2:]) for part in header.split(",") if part.startswith("t="))
            event = json.loads(payload)
        except (stripe.SignatureVerificationError, ValueError, TypeError, StopIteration):
            continue  # TypeError: a signature that is no ASCII
        if stamp > time.time() + SIGNATURE_TOLERANCE_SECONDS or not _is_event(event):
            continue
        return dict(event)
    raise BadSignature


def events_since(created: int) -> Iterator[dict[str, Any]]:
    """Every event the provider made since a Unix time, newest first. Raises PaymentUnavailable."""
    try:
        page = _client().v1.events.list({"created": {"gte": created}, "limit": 100})
        for event in page.auto_paging_iter():
            yield event.to_dict()
    except stripe.StripeError as error:
        raise PaymentUnavailable from error


def webhook_secrets() -> list[str]:
    """The secrets a webhook may be signed with; two while one is rolled."""
    return [sandbox_secret()] if settings.PAYMENTS_SANDBOX else list(settings.STRIPE_WEBHOOK_SECRETS)


def sandbox_secret() -> str:
    """The secret our sandbox signs with: this installation's own, never sent anywhere."""
    return "whsec_" + _own_secret(b"payments sandbox")


def sandbox_key() -> str:
    """The API key of our sandbox: a secret too, since customers' code reaches loopback and events name other people."""
    return "sk_test_" + _own_secret(b"payments sandbox key")


def _own_secret(purpose: bytes) -> str:
    return hmac.new(settings.SECRET_KEY.encode(), purpose, hashlib.sha256).hexdigest()


def _is_event(event: Any) -> bool:
    return isinstance(event, dict) and isinstance(event.get("id"), str) and isinstance(event.get("type"), str)


def _client() -> stripe.StripeClient:
    if settings.PAYMENTS_SANDBOX:
        return stripe.StripeClient(sandbox_key(), base_addresses={"api": settings.SANDBOX_URL}, max_network_retries=2)
    return stripe.StripeClient(settings.STRIPE_SECRET_KEY, max_network_retries=2)
