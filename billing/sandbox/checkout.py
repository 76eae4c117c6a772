"""Checkout in the sandbox: payment pages, card setup pages and the bank's challenge. Only an open page can change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from billing.sandbox import cards, intents
from billing.sandbox.book import Book, Refused, amount_of, money_of, required
from billing.sandbox.cards import Challenge
from billing.sandbox.store import Object

SESSION_SECONDS = 24 * 3600
"""How long a payment page stays open: Stripe's default."""
TEST_CARDS_ONLY = "This sandbox takes test cards only: use 4242 4242 4242 4242."
EXPIRED = "This payment page has expired. Start again."


@dataclass(frozen=True)
class Step:
    """The payer's next page, or the same page with an error."""

    url: str = ""
    error: str = ""


def make_session(book: Book, form: Object) -> Object:
    """POST /v1/checkout/sessions in mode payment or setup."""
    mode = required(form, "mode")
    customer = form.get("customer")
    if customer:
        book.customer(customer)
    fields: dict[str, Any] = {
        "mode": mode,
        "amount_total": None,
        "currency": str(form.get("currency") or "").lower() or None,
        "client_reference_id": form.get("client_reference_id"),
        "customer": customer,
        "metadata": dict(form.get("metadata") or {}),
        "success_url": required(form, "success_url"),
        "cancel_url": form.get("cancel_url"),
        "expires_at": book.now + SESSION_SECONDS,
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
        raise Refused(f"Invalid mode: {mode} is not of this sandbox.", param="mode")
    session = book.make("checkout.session", "cs_test", **fields)
    return book.change(session, url=f"{book.base_url}/pay/{session['id']}")


def current_session(book: Book, session_id: str) -> Object:
    """Return a session, expiring it if its time is over. Raises Refused (404)."""
    session = book.get("checkout.session", session_id)
    if session["status"] == "open" and session["expires_at"] < book.clock():
        _expire(book, session)
    return session


def expire(book: Book, session: Object) -> Object:
    """POST /v1/checkout/sessions/:id/expire."""
    if session["status"] != "open":
        raise Refused("Only Checkout Sessions with a status in ['open'] can be expired.")
    return _expire(book, session)


def offered(session: Object) -> list[str]:
    """Return the redirect methods that the page offers."""
    if session["mode"] != "payment":
        return []
    return list(cards.OFFERED.get(session["currency"], ()))


def submit(book: Book, session: Object, form: Object) -> Step:
    """Handle the payer's form: a card number or the name of another payment method."""
    if session["status"] != "open":
        is_paid = session["status"] == "complete"
        return Step(url=session["success_url"]) if is_paid else Step(error=EXPIRED)
    method_type = str(form.get("method") or "card")
    if method_type in offered(session):
        method = book.make("payment_method", "pm", type=method_type, customer=None, **{method_type: {}})
    elif (card := cards.card_of(str(form.get("card") or ""))) is not None:
        method = intents.card_method(book, card)
    else:
        return Step(error=TEST_CARDS_ONLY)
    try:
        return (_pay if session["mode"] == "payment" else _save)(book, session, method)
    except Refused as error:
        return Step(error=str(error))


def challenged(book: Book, intent_id: str) -> tuple[Object, Object]:
    """Return the intent and session of a challenge. Raises Refused (404) unless the intent waits for it."""
    kind = "setup_intent" if intent_id.startswith("seti_") else "payment_intent"
    intent = book.get(kind, intent_id)
    session = book.store.get("checkout.session", intent.get("_session", ""))
    if session is None or intent["status"] != "requires_action":
        raise Refused("Nothing is asked here.", status=404)
    return intent, session


def answer_challenge(book: Book, intent_id: str, *, is_agreed: bool) -> Step:
    """Handle the payer's answer to the challenge."""
    intent, session = challenged(book, intent_id)
    if session["status"] != "open":
        return Step(error=EXPIRED)
    if not is_agreed:
        if intent["object"] == "payment_intent":
            intents.fail(book, intent, cards.ABANDONED)
        else:
            error = intents.declined(cards.ABANDONED).answer["error"]
            book.change(intent, status="requires_payment_method", last_setup_error=error)
        return Step(url=session["url"])
    if intent["object"] == "payment_intent":
        intents.authorize(book, intent)
        return _complete_payment(book, session)
    return _complete_setup(book, session, intent)


def _priced_item(form: Object) -> dict[str, Any]:
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


def _expire(book: Book, session: Object) -> Object:
    book.change(session, status="expired", url=None)
    book.emit("checkout.session.expired", session)
    return session


def _pay(book: Book, session: Object, method: Object) -> Step:
    if session["payment_intent"] is None:
        options = session["payment_method_options"].get("card") or {}
        form = session["_intent"] | {
            "amount": str(session["amount_total"]),
            "currency": session["currency"],
            "customer": session["customer"],
            "setup_future_usage": options.get("setup_future_usage") or session["_intent"].get("setup_future_usage"),
        }
        created = intents.make_intent(book, form)
        book.change(created, _session=session["id"])
        book.change(session, payment_intent=created["id"])
    intent = book.get("payment_intent", session["payment_intent"])
    intents.confirm(book, intent, {"payment_method": method["id"]})
    if intent["status"] == "requires_action":
        return Step(url=intent["next_action"]["redirect_to_url"]["url"])
    return _complete_payment(book, session)


def _complete_payment(book: Book, session: Object) -> Step:
    book.change(session, status="complete", payment_status="paid", url=None)
    book.emit("checkout.session.completed", session)
    return Step(url=session["success_url"])


def _save(book: Book, session: Object, method: Object) -> Step:
    card = intents.card_behind(method)
    if card and card.declines:
        raise intents.declined(card.declines)
    needs_challenge = card is not None and card.challenge is not Challenge.NEVER
    intent = book.make(
        "setup_intent",
        "seti",
        customer=session["customer"],
        metadata=session["metadata"],
        payment_method=method["id"],
        status="requires_action" if needs_challenge else "processing",
        usage="off_session",
        _session=session["id"],
    )
    book.change(session, setup_intent=intent["id"])
    if needs_challenge:
        return Step(url=f"{book.base_url}/challenge/{intent['id']}")
    return _complete_setup(book, session, intent)


def _complete_setup(book: Book, session: Object, intent: Object) -> Step:
    method = book.get("payment_method", intent["payment_method"])
    book.change(method, _saved=True)
    intents.attach(book, method, session["customer"])
    book.change(intent, status="succeeded")
    book.emit("setup_intent.succeeded", intent)
    book.change(session, status="complete", url=None)
    book.emit("checkout.session.completed", session)
    return Step(url=session["success_url"])
