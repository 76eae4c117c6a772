"""Checkout Sessions in the sandbox: pages that take a payment or save a card, and the bank's challenge page.

A Checkout Session changes only while its status is `open`. The docstring of a function that serves a route of Stripe's
API begins with the route. Fields that begin with `_` are the sandbox's own, and responses omit them: `_title` is the
line item's name, `_intent` the parameters for the payment intent, `_session` the id of an intent's session.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from billing.sandbox import cards, intents
from billing.sandbox.account import Form, Refused, StripeAccount, amount_of, money_of, required
from billing.sandbox.cards import Challenge
from billing.sandbox.store import StripeObject

SESSION_SECONDS = 24 * 3600
"""How long a payment page stays open: Stripe's default."""
# Messages on the pages.
TEST_CARDS_ONLY = "This sandbox takes test cards only: use 4242 4242 4242 4242."
EXPIRED = "This payment page has expired. Start again."


@dataclass(frozen=True)
class FormResult:
    """The result of a form that the payer submitted: a redirect to `next_url`, or an `error` to show on the same page.

    Exactly one of the two is not empty.
    """

    next_url: str = ""
    error: str = ""


def make_session(account: StripeAccount, form: Form) -> StripeObject:
    """POST /v1/checkout/sessions in mode payment or setup."""
    mode = required(form, "mode")
    customer_id = form.get("customer")
    if customer_id:
        account.customer(customer_id)  # raises Refused if there is none
    fields: dict[str, Any] = {
        "mode": mode,
        "amount_total": None,
        "currency": str(form.get("currency") or "").lower() or None,
        "client_reference_id": form.get("client_reference_id"),
        "customer": customer_id,
        "metadata": dict(form.get("metadata") or {}),
        "success_url": required(form, "success_url"),
        "cancel_url": form.get("cancel_url"),
        "expires_at": account.now + SESSION_SECONDS,
        "payment_intent": None,
        "setup_intent": None,
        "payment_method_options": dict(form.get("payment_method_options") or {}),
        "payment_status": "unpaid" if mode == "payment" else "no_payment_required",
        "status": "open",
        "url": None,
        "_intent": dict(form.get("payment_intent_data") or {}),
        "_title": "",
    }
    if mode == "payment":
        fields |= _priced_item(form)
    elif mode != "setup":
        raise Refused(f"Invalid mode: {mode} is not supported by this sandbox.", param="mode")
    session = account.make("checkout.session", "cs_test", **fields)
    return account.change(session, url=f"{account.base_url}/pay/{session['id']}")


def current_session(account: StripeAccount, session_id: str) -> StripeObject:
    """Return a session, after expiring it if its time has passed. Raises Refused (404)."""
    session = account.get("checkout.session", session_id)
    if session["status"] == "open" and session["expires_at"] < account.clock():
        _mark_expired(account, session)
    return session


def expire(account: StripeAccount, session: StripeObject) -> StripeObject:
    """POST /v1/checkout/sessions/:id/expire."""
    if session["status"] != "open":
        raise Refused("Only Checkout Sessions with a status in ['open'] can be expired.")
    return _mark_expired(account, session)


def redirect_methods(session: StripeObject) -> list[str]:
    """Return the names of the redirect payment methods that the page offers."""
    if session["mode"] != "payment":
        return []
    return list(cards.REDIRECT_METHODS_BY_CURRENCY.get(session["currency"], ()))


def submit(account: StripeAccount, session: StripeObject, form: Form) -> FormResult:
    """Handle the form of a payment page: `card` is a card number, `method` the name of another payment method."""
    if session["status"] == "complete":
        return FormResult(next_url=session["success_url"])
    if session["status"] != "open":
        return FormResult(error=EXPIRED)
    method_type = str(form.get("method") or "card")
    if method_type in redirect_methods(session):
        method = account.make("payment_method", "pm", type=method_type, customer=None, **{method_type: {}})
    elif (card := cards.find_card(str(form.get("card") or ""))) is not None:
        method = intents.make_card_method(account, card)
    else:
        return FormResult(error=TEST_CARDS_ONLY)
    try:
        use_method = _pay if session["mode"] == "payment" else _save_card
        return use_method(account, session, method)
    except Refused as error:
        return FormResult(error=str(error))


def pending_challenge(account: StripeAccount, intent_id: str) -> tuple[StripeObject, StripeObject]:
    """Return the intent that a challenge is about, and the intent's session.

    Raises Refused (404) unless the intent waits for the payer's answer.
    """
    kind = "setup_intent" if intent_id.startswith("seti_") else "payment_intent"
    intent = account.get(kind, intent_id)
    session = account.store.get("checkout.session", intent.get("_session", ""))
    if session is None or intent["status"] != "requires_action":
        raise Refused("No authentication is pending here.", status=404)
    return intent, session


def answer_challenge(account: StripeAccount, intent_id: str, *, is_agreed: bool) -> FormResult:
    """Handle the payer's answer to a challenge. Raises Refused (404) unless the intent waits for it."""
    intent, session = pending_challenge(account, intent_id)
    if session["status"] != "open":
        return FormResult(error=EXPIRED)
    if not is_agreed:
        if intent["object"] == "payment_intent":
            # Stores the error, which the payment page then shows. The returned exception is for API requests only.
            intents.fail(account, intent, cards.FAILED_CHALLENGE)
        else:
            error = intents.decline_error(cards.FAILED_CHALLENGE).answer["error"]
            account.change(intent, status="requires_payment_method", last_setup_error=error)
        return FormResult(next_url=session["url"])
    if intent["object"] == "payment_intent":
        intents.charge(account, intent)
        return _complete_payment(account, session)
    return _complete_setup(account, session, intent)


def _priced_item(form: Form) -> dict[str, Any]:
    """Return the fields of a session that come from its only line item: amount, currency, title. Raises Refused."""
    items = form.get("line_items")
    if not isinstance(items, list) or len(items) != 1:
        raise Refused("Give exactly one line item.", code="parameter_missing", param="line_items")
    price = items[0].get("price_data") or {}
    quantity = amount_of(items[0], "quantity") if "quantity" in items[0] else 1
    return {
        "amount_total": money_of(price, "unit_amount", required(price, "currency").lower()) * quantity,
        "currency": required(price, "currency").lower(),
        "_title": str((price.get("product_data") or {}).get("name", "")),
    }


def _mark_expired(account: StripeAccount, session: StripeObject) -> StripeObject:
    account.change(session, status="expired", url=None)
    account.emit("checkout.session.expired", session)
    return session


def _pay(account: StripeAccount, session: StripeObject, method: StripeObject) -> FormResult:
    """Pay a session with a payment method. Raises Refused if the card is declined."""
    if session["payment_intent"] is None:
        options = session["payment_method_options"].get("card") or {}
        intent_data = session["_intent"]
        form = intent_data | {
            "amount": str(session["amount_total"]),
            "currency": session["currency"],
            "customer": session["customer"],
            "setup_future_usage": options.get("setup_future_usage") or intent_data.get("setup_future_usage"),
        }
        new_intent = intents.make_intent(account, form)
        account.change(new_intent, _session=session["id"])
        account.change(session, payment_intent=new_intent["id"])
    intent = account.get("payment_intent", session["payment_intent"])
    intents.confirm(account, intent, {"payment_method": method["id"]})
    if intent["status"] == "requires_action":
        return FormResult(next_url=intent["next_action"]["redirect_to_url"]["url"])
    return _complete_payment(account, session)


def _complete_payment(account: StripeAccount, session: StripeObject) -> FormResult:
    """Complete a session whose intent has been charged, and send the payer back to the console."""
    account.change(session, status="complete", payment_status="paid", url=None)
    account.emit("checkout.session.completed", session)
    return FormResult(next_url=session["success_url"])


def _save_card(account: StripeAccount, session: StripeObject, method: StripeObject) -> FormResult:
    """Save a payment method for later charges. Raises Refused if the card is declined."""
    card = intents.test_card_of(method)
    if card and card.declines:
        raise intents.decline_error(card.declines)
    # Also with UNLESS_SAVED, because the card is not saved yet.
    needs_challenge = card is not None and card.challenge is not Challenge.NEVER
    intent = account.make(
        "setup_intent",
        "seti",
        customer=session["customer"],
        metadata=session["metadata"],
        payment_method=method["id"],
        status="requires_action" if needs_challenge else "processing",
        usage="off_session",
        _session=session["id"],
    )
    account.change(session, setup_intent=intent["id"])
    if needs_challenge:
        return FormResult(next_url=f"{account.base_url}/challenge/{intent['id']}")
    return _complete_setup(account, session, intent)


def _complete_setup(account: StripeAccount, session: StripeObject, intent: StripeObject) -> FormResult:
    """Save the card of a setup intent, complete its session, and send the payer back to the console."""
    method = account.get("payment_method", intent["payment_method"])
    account.change(method, _saved=True)
    intents.attach(account, method, session["customer"])
    account.change(intent, status="succeeded")
    account.emit("setup_intent.succeeded", intent)
    account.change(session, status="complete", url=None)
    account.emit("checkout.session.completed", session)
    return FormResult(next_url=session["success_url"])
