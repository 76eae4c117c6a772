"""The client of the payment provider, and the only module that imports `stripe`.

Without Stripe keys it talks to our sandbox (`billing.sandbox`) through the same client. Every call that creates an
object carries an idempotency key, so a repeated call has no second effect. The key is made from the caller's row, or
from a random id for a page that saves a card. No business decision is made here.
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
"""The version of Stripe's API that this code is written for. The operator creates the webhook endpoint in Stripe's
Dashboard with the same version; otherwise events have fields that this code does not expect."""
SIGNATURE_TOLERANCE_SECONDS = 300
"""Largest difference between the header's time and ours: the default of Stripe's own libraries."""
NETWORK_RETRIES = 2
"""How often the client repeats a call that got no answer. Two repeats bridge a short failure without making a page wait
for long. The idempotency key makes repeats safe."""
T = TypeVar("T")


@dataclass(frozen=True)
class Checkout:
    """A Checkout Session: a page on the provider's site that takes a payment or saves a card."""

    session_id: str
    url: str


@dataclass(frozen=True)
class Card:
    """A saved payment method, with the details that a customer may see."""

    method_id: str
    brand: str
    last4: str
    expires: str
    """MM/YY, or empty if the payment method is not a card."""

    @property
    def label(self) -> str:
        """Return the display name, for example `Visa •••• 4242`."""
        return f"{self.brand} •••• {self.last4}" if self.last4 else self.brand


@dataclass(frozen=True)
class StripeStatus:
    """The provider's id and status of a payment or refund."""

    id: str
    status: str


def is_live() -> bool:
    """Return whether real money moves. Only keys of Stripe's live mode contain `_live_`."""
    return "_live_" in settings.STRIPE_SECRET_KEY


def mode() -> str:
    """Return `sandbox`, `test` or `live`. Objects of one mode do not exist in the others."""
    if settings.PAYMENTS_SANDBOX:
        return "sandbox"
    return "live" if is_live() else "test"


# --- Calls to the provider --------------------------------------------------------------------------------------------


def create_customer(*, reference: str, name: str, email: str, replaces: str = "") -> str:
    """Create the customer object of an organization and return its id. Raises PaymentUnavailable, PaymentRefused.

    `reference` is the id of the organization's PaymentCustomer row. `replaces` is the id of the deleted customer that
    this one replaces, if any. It changes the idempotency key; with the old key, the provider would return the deleted
    customer again.
    """
    # The key depends on the parameters, because Stripe refuses a repeated key with other parameters.
    fingerprint = hashlib.sha256(f"{name} {email} {replaces}".encode()).hexdigest()[:16]
    created = _call(
        lambda: _client().v1.customers.create(
            {"name": name, "email": email, "metadata": {"organization": reference}},
            {"idempotency_key": f"customer-{reference}-{fingerprint}"},
        )
    )
    return str(created.id)


def is_customer_deleted(customer_id: str) -> bool:
    """Return whether the customer was deleted at the provider. Raises PaymentUnavailable."""
    try:
        return fetch_object("customer", customer_id).get("deleted") is True
    except CustomerGone:
        return True


def create_checkout(
    *,
    reference: str,
    amount_minor: int,
    currency: str,
    title: str,
    customer_id: str,
    return_url: str,
    save_card: bool = False,
) -> Checkout:
    """Create a payment page for one amount. Idempotent on `reference`, the top-up's id, and the customer.

    The page shows `title` and sends the payer back to `return_url`. It offers all payment methods that are enabled at
    the provider for the currency (cards, Alipay, WeChat Pay …). With `save_card`, a card is saved for automatic
    top-ups; other methods stay available but are not saved. Raises PaymentUnavailable, PaymentRefused.
    """
    parameters: dict[str, Any] = {
        "mode": "payment",
        "client_reference_id": reference,
        "customer": customer_id,
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
        parameters["payment_method_options"] = {"card": {"setup_future_usage": "off_session"}}
    return _create_session(parameters, f"top-up-{reference}-{customer_id}")


def create_card_setup(*, reference: str, customer_id: str, currency: str, return_url: str) -> Checkout:
    """Create a page that saves a card without a payment. Idempotent on `reference` and the customer.

    No row stands for such a page, so `reference` is a random id. Raises PaymentUnavailable, PaymentRefused.
    """
    parameters = {
        "mode": "setup",
        "customer": customer_id,
        "currency": currency.lower(),
        "success_url": f"{return_url}?saved=1",
        "cancel_url": return_url,
    }
    return _create_session(parameters, f"setup-{reference}-{customer_id}")


def expire_checkout(session_id: str) -> None:
    """Close a payment page. Does nothing if the page was paid or closed before. Raises PaymentUnavailable."""
    try:
        _call(lambda: _client().v1.checkout.sessions.expire(session_id))
    except PaymentRefused:
        return


def open_pages(customer_id: str) -> list[str]:
    """Return the ids of the customer's open pages (at most 100, Stripe's largest page), which pay or save a card.

    Raises PaymentUnavailable, PaymentRefused.
    """
    page = _call(lambda: _client().v1.checkout.sessions.list({"customer": customer_id, "status": "open", "limit": 100}))
    return [str(session.id) for session in page.data]


def cards(customer_id: str) -> list[Card]:
    """Return the customer's saved payment methods (at most 100, Stripe's largest page), newest first.

    Raises PaymentUnavailable, PaymentRefused.
    """
    page = _call(lambda: _client().v1.customers.payment_methods.list(customer_id, {"limit": 100}))
    return [_card(method.to_dict()) for method in page.data]


def remove_card(method_id: str) -> None:
    """Delete a saved card. No error if it does not exist. Raises PaymentUnavailable."""
    try:
        _call(lambda: _client().v1.payment_methods.detach(method_id))
    except PaymentRefused:
        return


def charge_card(
    *, reference: str, customer_id: str, method_id: str, amount_minor: int, currency: str, title: str
) -> StripeStatus:
    """Charge a saved card while the cardholder is absent ("off-session"). Idempotent on `reference`, the top-up's id.

    Raises PaymentDeclined (with the bank's code) and PaymentRefused. After PaymentUnavailable it is unknown whether the
    card was charged: repeat the same call.
    """
    intent = _call(
        lambda: _client().v1.payment_intents.create(
            {
                "amount": amount_minor,
                "currency": currency.lower(),
                "customer": customer_id,
                "payment_method": method_id,
                "description": title,
                "metadata": {"top_up": reference},
                "off_session": True,
                "confirm": True,
            },
            {"idempotency_key": f"top-up-{reference}"},
        )
    )
    return StripeStatus(str(intent.id), str(intent.status))


def find_charge(*, reference: str, customer_id: str) -> StripeStatus | None:
    """Return the payment with this `reference` among the customer's last 100 payments (Stripe's largest page), or None.

    Raises PaymentUnavailable, PaymentRefused.
    """
    page = _call(lambda: _client().v1.payment_intents.list({"customer": customer_id, "limit": 100}))
    return _find_by_reference("top_up", reference, page.data)


def refund(*, reference: str, payment_intent_id: str, amount_minor: int) -> StripeStatus:
    """Refund an amount to the original payment method. Idempotent on `reference`, the id of our Refund.

    Raises PaymentRefused. After PaymentUnavailable the result is unknown: repeat the same call.
    """
    created = _call(
        lambda: _client().v1.refunds.create(
            {"payment_intent": payment_intent_id, "amount": amount_minor, "metadata": {"refund": reference}},
            {"idempotency_key": f"refund-{reference}"},
        )
    )
    return StripeStatus(str(created.id), str(created.status))


def find_refund(*, reference: str, payment_intent_id: str) -> StripeStatus | None:
    """Return the refund with this `reference` among the payment's last 100 refunds (Stripe's largest page), or None.

    Raises PaymentUnavailable, PaymentRefused.
    """
    page = _call(lambda: _client().v1.refunds.list({"payment_intent": payment_intent_id, "limit": 100}))
    return _find_by_reference("refund", reference, page.data)


def fetch_object(kind: str, object_id: str) -> dict[str, Any]:
    """Return the current fields of an object. Raises PaymentUnavailable, and PaymentRefused if it does not exist."""
    v1 = _client().v1
    retrieve: dict[str, Callable[[str], stripe.StripeObject]] = {
        "checkout.session": v1.checkout.sessions.retrieve,
        "customer": v1.customers.retrieve,
        "payment_intent": v1.payment_intents.retrieve,
        "refund": v1.refunds.retrieve,
        "dispute": v1.disputes.retrieve,
    }
    fields: dict[str, Any] = _call(lambda: retrieve[kind](object_id)).to_dict()
    return fields


def find_session(payment_intent_id: str) -> dict[str, Any] | None:
    """Return the Checkout Session of a payment, or None if it had none. Raises PaymentUnavailable."""
    page = _call(lambda: _client().v1.checkout.sessions.list({"payment_intent": payment_intent_id, "limit": 1}))
    return page.data[0].to_dict() if page.data else None


def events_since(created: int) -> Iterator[dict[str, Any]]:
    """Yield the provider's events since a Unix time, newest first. Raises PaymentUnavailable."""
    page = _call(lambda: _client().v1.events.list({"created": {"gte": created}, "limit": 100}))
    events = page.auto_paging_iter()
    # Each `next` may request another page, so it goes through `_call`, too.
    while (event := _call(lambda: next(events, None))) is not None:
        yield event.to_dict()


# --- Webhooks from the provider ---------------------------------------------------------------------------------------


def verify(payload: bytes, header: str) -> dict[str, Any]:
    """Verify a webhook's signature and return its event. `header` is Stripe-Signature.

    The header is `t=<Unix time>,v1=<HMAC-SHA256 of "time.body">,...`. Raises BadSignature if no secret matches, if the
    header's time and ours differ by more than the tolerance, or if the body is not an event.
    """
    stamp, signatures = _parse_header(header)
    if abs(time.time() - stamp) > SIGNATURE_TOLERANCE_SECONDS:
        raise BadSignature
    signed = b"%d.%b" % (stamp, payload)
    # All pairs are compared in constant time, so the duration reveals nothing about a secret.
    matches = [
        hmac.compare_digest(hmac.digest(secret.encode(), signed, "sha256").hex().encode(), signature)
        for secret in webhook_secrets()
        for signature in signatures
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
    """Return the secrets that may sign a webhook: two while an administrator rotates them, otherwise one."""
    return [sandbox_secret()] if settings.PAYMENTS_SANDBOX else list(settings.STRIPE_WEBHOOK_SECRETS)


def sandbox_secret() -> str:
    """Return the secret with which the sandbox signs webhooks, derived from SECRET_KEY."""
    return "whsec_" + _derived_secret(settings.SECRET_KEY, "payments sandbox")


def sandbox_key() -> str:
    """Return the key that the sandbox's API requires, derived from SECRET_KEY.

    It is secret, because customers' code can reach the sandbox on loopback and could otherwise read events of other
    organizations.
    """
    return "sk_test_" + _derived_secret(settings.SECRET_KEY, "payments sandbox key")


@cache
def _derived_secret(key: str, purpose: str) -> str:
    return hmac.new(key.encode(), purpose.encode(), hashlib.sha256).hexdigest()


def _parse_header(header: str) -> tuple[int, list[bytes]]:
    """Parse a signature header into its time and signatures. Raises BadSignature."""
    stamp, signatures = "", []
    for part in header.split(","):
        name, _, value = part.partition("=")
        if name == "t":
            stamp = value
        elif name == "v1":
            # As bytes, because `compare_digest` refuses strings that are not ASCII.
            signatures.append(value.encode("utf-8", "surrogateescape"))
    # `isdecimal` and `int` also accept digits of other scripts. Unix times have ten digits until the year 2286; more
    # than eleven are an attack.
    if not (stamp.isascii() and stamp.isdecimal() and len(stamp) < 12):
        raise BadSignature
    return int(stamp), signatures


# --- The client -------------------------------------------------------------------------------------------------------


def _create_session(parameters: dict[str, Any], key: str) -> Checkout:
    session = _call(lambda: _client().v1.checkout.sessions.create(parameters, {"idempotency_key": key}))  # type: ignore[arg-type]  # a dict of ours, checked by the tests
    return Checkout(str(session.id), str(session.url))


def _find_by_reference(name: str, reference: str, objects: Sequence[Any]) -> StripeStatus | None:
    """Return the id and status of the object whose metadata has our reference under `name`, or None."""
    for stripe_object in objects:
        if (stripe_object.to_dict().get("metadata") or {}).get(name) == reference:
            return StripeStatus(str(stripe_object.id), str(stripe_object.status))
    return None


def _card(method: dict[str, Any]) -> Card:
    """Convert a payment method of the provider. Methods other than cards have neither last digits nor expiry."""
    # The details are in a field that is named after the type, for example `card`.
    details = method.get(method["type"]) or {}
    brand = str(details.get("display_brand") or details.get("brand") or method["type"]).replace("_", " ").title()
    year, month = details.get("exp_year"), details.get("exp_month")
    expires = f"{month:02}/{year % 100:02}" if isinstance(month, int) and isinstance(year, int) else ""
    return Card(str(method["id"]), brand, str(details.get("last4") or ""), expires)


def _call(call: Callable[[], T]) -> T:
    """Return the result of `call`, a call to the provider, and translate its exceptions to ours.

    Raises PaymentDeclined, CustomerGone, PaymentRefused, PaymentUnavailable.
    """
    try:
        return call()
    except stripe.CardError as error:
        code = str(getattr(error.error, "decline_code", None) or error.code or "card_declined")
        raise PaymentDeclined(reason=code) from error
    except stripe.InvalidRequestError as error:
        reason = str(error.user_message or error)
        # If the missing customer is a parameter of the request, the error names that parameter. If the customer's id is
        # in the request's URL, only the message names the customer.
        is_customer_gone = error.code == "resource_missing" and (
            error.param == "customer" or reason.startswith("No such customer")
        )
        raise (CustomerGone if is_customer_gone else PaymentRefused)(reason=reason) from error
    except stripe.StripeError as error:
        raise PaymentUnavailable from error


def _client() -> stripe.StripeClient:
    if settings.PAYMENTS_SANDBOX:
        return _client_for(sandbox_key(), settings.SANDBOX_URL)
    return _client_for(settings.STRIPE_SECRET_KEY, "")


@cache
def _client_for(key: str, base: str) -> stripe.StripeClient:
    """Return the client for a key and an API address (empty: Stripe's own). It is cached to keep its connections."""
    addresses: Any = {"api": base} if base else {}
    return stripe.StripeClient(
        key, base_addresses=addresses, max_network_retries=NETWORK_RETRIES, stripe_version=API_VERSION
    )
