"""The only importer of `stripe`: the payment provider behind a handful of calls of our own.

Hides keys, hosts, versions and the provider's error classes. The one rule: nothing is decided here; what came back is
told. Without keys of Stripe's it speaks to the sandbox (`billing.sandbox`), over the same client. Every call that makes
something carries an idempotency key of its caller's row, so that a repeated call is the same call.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import stripe
from django.conf import settings

from billing.errors import BadSignature, CustomerGone, PaymentDeclined, PaymentRefused, PaymentUnavailable

API_VERSION = "2026-10-28.endive"
"""The version of Stripe's API that this code was written for; the webhook endpoint is to be made with the same one."""
SIGNATURE_TOLERANCE_SECONDS = 300
NETWORK_RETRIES = 2
Given = TypeVar("Given")


@dataclass(frozen=True)
class Checkout:
    """A hosted page of the provider's, made."""

    session_id: str
    url: str


@dataclass(frozen=True)
class Card:
    """A saved means of payment, as much of it as a customer may be shown."""

    method_id: str
    brand: str
    last4: str
    expires: str
    """MM/YY, or empty for what is no card."""

    @property
    def label(self) -> str:
        """How it is named everywhere."""
        return f"{self.brand} •••• {self.last4}" if self.last4 else self.brand


@dataclass(frozen=True)
class Made:
    """Something the provider made for us: its id there, and its status in the provider's word."""

    id: str
    status: str


def is_live() -> bool:
    """Whether real money moves."""
    return "_live_" in settings.STRIPE_SECRET_KEY


def mode() -> str:
    """Which of the provider's worlds we are in: what exists in one (a customer, a card) is unknown in the others."""
    if settings.PAYMENTS_SANDBOX:
        return "sandbox"
    return "live" if is_live() else "test"


# --- Asking the provider ----------------------------------------------------------------------------------------------


def create_customer(*, reference: str, name: str, email: str, after: str = "") -> str:
    """Make the provider's record of an organization; gives its id. Raises PaymentUnavailable, PaymentRefused.

    `after` is the record before, where that was deleted: to make one after it is another call than to make it.
    """
    # The address belongs to the key: another member's call is another request.
    told = hashlib.sha256(f"{name} {email} {after}".encode()).hexdigest()[:16]
    made = _asked(
        lambda: _client().v1.customers.create(
            {"name": name, "email": email, "metadata": {"organization": reference}},
            {"idempotency_key": f"customer-{reference}-{told}"},
        )
    )
    return str(made.id)


def is_gone(customer: str) -> bool:
    """Whether the provider's record was deleted. Raises PaymentUnavailable."""
    try:
        return current("customer", customer).get("deleted") is True
    except CustomerGone:
        return True


def create_checkout(
    *,
    reference: str,
    amount_minor: int,
    currency: str,
    title: str,
    customer: str,
    return_url: str,
    save_card: bool = False,
) -> Checkout:
    """Make a payment page for one amount. The same `reference` again, of the same customer, gives the same page.

    The page offers whatever is switched on at the provider for the currency (cards, Alipay, WeChat Pay ...): no list is
    sent. `save_card` keeps a card for automatic top-ups; other means are offered all the same and not kept.
    Raises PaymentUnavailable, PaymentRefused.
    """
    wanted: dict[str, Any] = {
        "mode": "payment",
        "client_reference_id": reference,
        "customer": customer,
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
        "payment_intent_data": {"metadata": {"top_up": reference}},
        "success_url": f"{return_url}?paid=1",
        "cancel_url": return_url,
    }
    if save_card:
        wanted["payment_method_options"] = {"card": {"setup_future_usage": "off_session"}}
    return _checkout(wanted, f"top-up-{reference}-{customer}")


def create_card_setup(*, reference: str, customer: str, currency: str, return_url: str) -> Checkout:
    """Make a page where a card is saved and nothing is paid. Raises PaymentUnavailable, PaymentRefused."""
    wanted = {
        "mode": "setup",
        "customer": customer,
        "currency": currency.lower(),
        "success_url": f"{return_url}?saved=1",
        "cancel_url": return_url,
    }
    return _checkout(wanted, f"setup-{reference}-{customer}")


def expire_checkout(session_id: str) -> None:
    """Close a payment page. One that was paid or closed already stays what it is. Raises PaymentUnavailable."""
    try:
        _asked(lambda: _client().v1.checkout.sessions.expire(session_id))
    except PaymentRefused:
        return


def cards(customer: str) -> list[Card]:
    """The customer's saved means of payment, newest first. Raises PaymentUnavailable, PaymentRefused."""
    page = _asked(lambda: _client().v1.customers.payment_methods.list(customer, {"limit": 100}))
    return [_card(method.to_dict()) for method in page.data]


def remove_card(method_id: str) -> None:
    """Forget a saved card. One that is gone already is fine. Raises PaymentUnavailable."""
    try:
        _asked(lambda: _client().v1.payment_methods.detach(method_id))
    except PaymentRefused:
        return


def charge_card(*, reference: str, customer: str, method_id: str, amount_minor: int, currency: str, title: str) -> Made:
    """Take an amount from a saved card while the customer is away. The same `reference` again charges nothing more.

    Raises PaymentDeclined (with the bank's code), PaymentRefused, PaymentUnavailable: then nobody knows whether it was
    charged, and the same call is to be made again.
    """
    made = _asked(
        lambda: _client().v1.payment_intents.create(
            {
                "amount": amount_minor,
                "currency": currency.lower(),
                "customer": customer,
                "payment_method": method_id,
                "description": title,
                "metadata": {"top_up": reference},
                "off_session": True,
                "confirm": True,
            },
            {"idempotency_key": f"top-up-{reference}"},
        )
    )
    return Made(str(made.id), str(made.status))


def charge_with(*, reference: str, customer: str) -> Made | None:
    """The payment of a customer that was made for a `reference`, if there is one. Raises as `charge_card`."""
    page = _asked(lambda: _client().v1.payment_intents.list({"customer": customer, "limit": 100}))
    return _made_for("top_up", reference, page.data)


def refund(*, reference: str, payment_intent: str, amount_minor: int) -> Made:
    """Pay an amount back the way it came. The same `reference` again pays nothing more.

    Raises PaymentRefused, PaymentUnavailable: then nobody knows, and the same call is to be made again.
    """
    made = _asked(
        lambda: _client().v1.refunds.create(
            {"payment_intent": payment_intent, "amount": amount_minor, "metadata": {"refund": reference}},
            {"idempotency_key": f"refund-{reference}"},
        )
    )
    return Made(str(made.id), str(made.status))


def refund_with(*, reference: str, payment_intent: str) -> Made | None:
    """The refund of a payment that was made for a `reference`, if there is one. Raises PaymentUnavailable."""
    page = _asked(lambda: _client().v1.refunds.list({"payment_intent": payment_intent, "limit": 100}))
    return _made_for("refund", reference, page.data)


def current(kind: str, object_id: str) -> dict[str, Any]:
    """An object as it is now (`kind` in the provider's word). Raises PaymentUnavailable; PaymentRefused if unknown."""
    v1 = _client().v1
    read: dict[str, Callable[[str], stripe.StripeObject]] = {
        "checkout.session": v1.checkout.sessions.retrieve,
        "customer": v1.customers.retrieve,
        "payment_intent": v1.payment_intents.retrieve,
        "refund": v1.refunds.retrieve,
        "dispute": v1.disputes.retrieve,
    }
    found: dict[str, Any] = _asked(lambda: read[kind](object_id)).to_dict()
    return found


def session_of(payment_intent: str) -> dict[str, Any] | None:
    """The payment page that a payment was made on; None for one made without. Raises PaymentUnavailable."""
    page = _asked(lambda: _client().v1.checkout.sessions.list({"payment_intent": payment_intent, "limit": 1}))
    return page.data[0].to_dict() if page.data else None


def events_since(created: int) -> Iterator[dict[str, Any]]:
    """Every event the provider made since a Unix time, newest first. Raises PaymentUnavailable."""
    page = _asked(lambda: _client().v1.events.list({"created": {"gte": created}, "limit": 100}))
    events = page.auto_paging_iter()
    while (event := _asked(lambda: next(events, None))) is not None:
        yield event.to_dict()


# --- Being told by the provider ---------------------------------------------------------------------------------------


def verify(payload: bytes, header: str) -> dict[str, Any]:
    """The event in a webhook's raw body, where one of our secrets signed it within the tolerance, either way.

    The header is `t=<Unix time>,v1=<HMAC-SHA256 of "time.body">,...`. Raises BadSignature for anything else, a body
    that is no event included.
    """
    stamp, signatures = _read_header(header)
    if abs(time.time() - stamp) > SIGNATURE_TOLERANCE_SECONDS:
        raise BadSignature
    signed = b"%d.%b" % (stamp, payload)
    # Every pair is compared, and each in constant time: how long it takes says nothing of a secret.
    matches = [
        hmac.compare_digest(hmac.digest(secret.encode(), signed, "sha256").hex().encode(), given)
        for secret in webhook_secrets()
        for given in signatures
    ]
    if not any(matches):
        raise BadSignature
    try:
        event = json.loads(payload)
    except ValueError:
        raise BadSignature from None
    if not (isinstance(event, dict) and isinstance(event.get("id"), str) and isinstance(event.get("type"), str)):
        raise BadSignature
    return event


def webhook_secrets() -> list[str]:
    """The secrets a webhook may be signed with; two while one is rolled."""
    return [sandbox_secret()] if settings.PAYMENTS_SANDBOX else list(settings.STRIPE_WEBHOOK_SECRETS)


def sandbox_secret() -> str:
    """The secret our sandbox signs with: this installation's own, never sent anywhere."""
    return "whsec_" + _own_secret(settings.SECRET_KEY, "payments sandbox")


def sandbox_key() -> str:
    """The API key of our sandbox: a secret too, since customers' code reaches loopback and events name other people."""
    return "sk_test_" + _own_secret(settings.SECRET_KEY, "payments sandbox key")


@cache
def _own_secret(key: str, purpose: str) -> str:
    return hmac.new(key.encode(), purpose.encode(), hashlib.sha256).hexdigest()


def _read_header(header: str) -> tuple[int, list[bytes]]:
    """The time and the signatures in a header. Raises BadSignature where it has none that can be read."""
    stamp, signatures = "", []
    for part in header.split(","):
        name, _, value = part.partition("=")
        if name == "t":
            stamp = value
        elif name == "v1":
            signatures.append(value.encode("utf-8", "surrogateescape"))
    # isdecimal() also knows the digits of other scripts, which int() reads; what Stripe sends has ten of ours.
    if not (stamp.isascii() and stamp.isdecimal() and len(stamp) < 12):
        raise BadSignature
    return int(stamp), signatures


# --- The client -------------------------------------------------------------------------------------------------------


def _checkout(wanted: dict[str, Any], key: str) -> Checkout:
    session = _asked(lambda: _client().v1.checkout.sessions.create(wanted, {"idempotency_key": key}))  # type: ignore[arg-type]  # a dict of ours, checked by the tests
    return Checkout(str(session.id), str(session.url))


def _made_for(name: str, reference: str, things: Sequence[Any]) -> Made | None:
    """The one of the provider's objects that carries our reference."""
    for each in things:
        if (each.to_dict().get("metadata") or {}).get(name) == reference:
            return Made(str(each.id), str(each.status))
    return None


def _card(method: dict[str, Any]) -> Card:
    details = method.get(method["type"]) or {}
    brand = str(details.get("display_brand") or details.get("brand") or method["type"]).replace("_", " ").title()
    year, month = details.get("exp_year"), details.get("exp_month")
    expires = f"{month:02}/{year % 100:02}" if isinstance(month, int) and isinstance(year, int) else ""
    return Card(str(method["id"]), brand, str(details.get("last4") or ""), expires)


def _asked(call: Callable[[], Given]) -> Given:
    """What a call to the provider gives, its errors in our words."""
    try:
        return call()
    except stripe.CardError as error:
        code = str(getattr(error.error, "decline_code", None) or error.code or "card_declined")
        raise PaymentDeclined(reason=code) from error
    except stripe.InvalidRequestError as error:
        reason = str(error.user_message or error)
        gone = error.code == "resource_missing" and (error.param == "customer" or reason.startswith("No such customer"))
        raise (CustomerGone if gone else PaymentRefused)(reason=reason) from error
    except stripe.StripeError as error:
        raise PaymentUnavailable from error


def _client() -> stripe.StripeClient:
    if settings.PAYMENTS_SANDBOX:
        return _made_client(sandbox_key(), settings.SANDBOX_URL)
    return _made_client(settings.STRIPE_SECRET_KEY, "")


@cache
def _made_client(key: str, base: str) -> stripe.StripeClient:
    """One client for each key and host: it keeps its connections."""
    addresses: Any = {"api": base} if base else {}
    return stripe.StripeClient(
        key, base_addresses=addresses, max_network_retries=NETWORK_RETRIES, stripe_version=API_VERSION
    )
