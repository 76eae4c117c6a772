"""Payments in the sandbox: payment methods, payment intents with capture, refunds, disputes.

A charge moves its money once, when the intent becomes `succeeded`. Refunds and disputes never exceed it.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from billing.sandbox import cards
from billing.sandbox.book import Book, Refused, amount_of, money_of, required, true
from billing.sandbox.cards import Challenge, TestCard
from billing.sandbox.store import Object

EVIDENCE_SECONDS = 7 * 24 * 3600
"""How long evidence about a dispute can be submitted, as at Stripe."""
EXPIRES = (12, 2034)
"""Month and year in which every test card expires."""

# --- Payment methods --------------------------------------------------------------------------------------------------


def make_method(book: Book, form: Object) -> Object:
    """POST /v1/payment_methods with a card's number, or a name of a test card's."""
    details = form.get("card")
    number = details.get("number") or details.get("token") if isinstance(details, dict) else None
    card = cards.card_of(str(number or ""))
    if card is None:
        raise Refused("Your card number is incorrect.", code="incorrect_number", status=402, kind="card_error")
    return card_method(book, card)


def card_method(book: Book, card: TestCard) -> Object:
    """Create a payment method for a test card."""
    month, year = EXPIRES
    details = {"brand": card.brand, "display_brand": card.brand, "last4": card.last4, "exp_month": month}
    details |= {"exp_year": year, "funding": "credit"}
    return book.make(
        "payment_method", "pm", type="card", card=details, customer=None, _number=card.number, _saved=False
    )


def named_method(book: Book, name: str) -> Object:
    """Return a payment method by id, or create one for a Stripe test name."""
    return card_method(book, cards.CARDS[cards.TOKENS[name]]) if name in cards.TOKENS else book.get(
        "payment_method", name
    )  # fmt: skip


def attach(book: Book, method: Object, customer: str) -> Object:
    """Attach a payment method to a customer. A card that always declines is refused."""
    book.customer(customer)
    card = card_behind(method)
    if card and card.declines:
        raise declined(card.declines)
    if method["customer"] not in {None, customer}:
        raise Refused("The payment method you provided has already been attached to a customer.")
    if method["customer"] is None:
        book.change(method, customer=customer)
        book.emit("payment_method.attached", method)
    return method


def detach(book: Book, method: Object) -> Object:
    """Detach a payment method; it cannot be used again."""
    if method["customer"] is None:
        raise Refused("The payment method you provided is not attached to a customer so detachment is impossible.")
    book.change(method, customer=None, _spent=True)
    book.emit("payment_method.detached", method)
    return method


def delete_customer(book: Book, customer: Object) -> Object:
    """DELETE /v1/customers/:id: detaches its payment methods; its id and payments remain."""
    for method in book.store.all("payment_method"):
        if method["customer"] == customer["id"]:
            book.change(method, customer=None, _spent=True)
    book.emit("customer.deleted", customer)
    return book.change(customer, _deleted=True)


def card_behind(method: Object) -> TestCard | None:
    """Return the test card of a payment method, or None for other methods."""
    return cards.CARDS.get(method.get("_number", ""))


def declined(decline: tuple[str, str, str], **more: Any) -> Refused:
    """Return the error of a declined card."""
    code, decline_code, message = decline
    return Refused(
        message, code=code, status=HTTPStatus.PAYMENT_REQUIRED, kind="card_error", decline_code=decline_code, **more
    )


# --- Intents ----------------------------------------------------------------------------------------------------------


def make_intent(book: Book, form: Object) -> Object:
    """POST /v1/payment_intents; `confirm` confirms it at once."""
    customer = form.get("customer")
    if customer:
        book.customer(customer)
    method = form.get("payment_method")
    intent = book.make(
        "payment_intent",
        "pi",
        amount=money_of(form, "amount", required(form, "currency").lower()),
        amount_capturable=0,
        amount_received=0,
        currency=required(form, "currency").lower(),
        customer=customer,
        description=form.get("description"),
        metadata=dict(form.get("metadata") or {}),
        capture_method=form.get("capture_method", "automatic"),
        setup_future_usage=form.get("setup_future_usage"),
        payment_method=named_method(book, method)["id"] if method else None,
        status="requires_confirmation" if method else "requires_payment_method",
        latest_charge=None,
        last_payment_error=None,
        next_action=None,
    )
    book.emit("payment_intent.created", intent)
    return confirm(book, intent, form) if true(form, "confirm") else intent


def confirm(book: Book, intent: Object, form: Object) -> Object:
    """Confirm an intent. Raises Refused with the intent if the card is declined; it can be confirmed again."""
    if intent["status"] not in {"requires_payment_method", "requires_confirmation", "requires_action"}:
        raise _unexpected(intent, "confirm")
    if name := form.get("payment_method"):
        book.change(intent, payment_method=named_method(book, str(name))["id"])
    if not intent["payment_method"]:
        raise Refused("You cannot confirm this PaymentIntent because it's missing a payment method.")
    method = book.get("payment_method", intent["payment_method"])
    if method.get("_spent") or method["customer"] not in {None, intent["customer"]}:
        raise Refused("The provided PaymentMethod was detached, or belongs to another Customer.")
    card = card_behind(method)
    if card is None:
        return _require_action(book, intent)
    if decline := card.declines or (card.declines_later if method["customer"] else None):
        raise fail(book, intent, decline)
    needs_challenge = card.challenge is Challenge.ALWAYS or (
        card.challenge is Challenge.UNLESS_SAVED and not method["_saved"]
    )
    if needs_challenge and true(form, "off_session"):
        raise fail(book, intent, cards.AUTHENTICATE)
    return _require_action(book, intent) if needs_challenge else authorize(book, intent)


def _require_action(book: Book, intent: Object) -> Object:
    url = f"{book.base_url}/challenge/{intent['id']}"
    book.change(
        intent,
        status="requires_action",
        next_action={"type": "redirect_to_url", "redirect_to_url": {"url": url, "return_url": None}},
    )
    book.emit("payment_intent.requires_action", intent)
    return intent


def fail(book: Book, intent: Object, decline: tuple[str, str, str]) -> Refused:
    """Record a failed attempt: the intent needs another payment method. Returns the error."""
    error = declined(decline).answer["error"]
    book.change(
        intent, status="requires_payment_method", payment_method=None, last_payment_error=error, next_action=None
    )
    book.emit("payment_intent.payment_failed", intent)
    return declined(
        decline, payment_intent={"id": intent["id"], "object": "payment_intent", "status": intent["status"]}
    )


def authorize(book: Book, intent: Object) -> Object:
    """Capture the authorized money, or hold it for a manual capture."""
    method = book.get("payment_method", intent["payment_method"])
    if intent["setup_future_usage"] and intent["customer"] and card_behind(method):
        book.change(method, _saved=True)
        attach(book, method, intent["customer"])
    if intent["capture_method"] == "manual":
        book.change(intent, status="requires_capture", amount_capturable=intent["amount"], next_action=None)
        book.emit("payment_intent.amount_capturable_updated", intent)
        return intent
    return _charge(book, intent, intent["amount"])


def capture(book: Book, intent: Object, form: Object) -> Object:
    """Capture all or a part of the authorized amount and release the rest."""
    if intent["status"] != "requires_capture":
        raise _unexpected(intent, "capture")
    authorized = intent["amount_capturable"]
    return _charge(
        book, intent, amount_of(form, "amount_to_capture", authorized) if "amount_to_capture" in form else authorized
    )


def cancel(book: Book, intent: Object) -> Object:
    """Cancel an intent."""
    if intent["status"] in {"succeeded", "canceled", "processing"}:
        raise _unexpected(intent, "cancel")
    book.change(intent, status="canceled", amount_capturable=0, next_action=None)
    book.emit("payment_intent.canceled", intent)
    return intent


def _charge(book: Book, intent: Object, amount: int) -> Object:
    charge = book.make(
        "charge",
        "ch",
        amount=amount,
        amount_captured=amount,
        amount_refunded=0,
        captured=True,
        currency=intent["currency"],
        customer=intent["customer"],
        disputed=False,
        metadata=intent["metadata"],
        paid=True,
        payment_intent=intent["id"],
        payment_method=intent["payment_method"],
        refunded=False,
        status="succeeded",
    )
    book.move("charge", charge["id"], amount, charge["currency"])
    book.change(
        intent,
        status="succeeded",
        amount_received=amount,
        amount_capturable=0,
        latest_charge=charge["id"],
        next_action=None,
        last_payment_error=None,
    )
    book.emit("charge.succeeded", charge)
    book.emit("payment_intent.succeeded", intent)
    card = card_behind(book.get("payment_method", intent["payment_method"]))
    if card and card.disputes:
        open_dispute(book, charge)
    return intent


def _unexpected(intent: Object, act: str) -> Refused:
    message = f"You cannot {act} this PaymentIntent because it has a status of {intent['status']}."
    return Refused(message, code="payment_intent_unexpected_state")


# --- Refunds and disputes ---------------------------------------------------------------------------------------------


def make_refund(book: Book, form: Object) -> Object:
    """POST /v1/refunds: refund all or a part of an intent or charge."""
    if name := form.get("payment_intent"):
        charge = book.get("charge", book.get("payment_intent", name)["latest_charge"])
    else:
        charge = book.get("charge", required(form, "charge"))
    if charge["disputed"]:
        raise Refused(f"Charge {charge['id']} has been charged back; cannot issue a refund.", code="charge_disputed")
    refundable = charge["amount"] - charge["amount_refunded"]
    if refundable == 0:
        raise Refused(f"Charge {charge['id']} has already been refunded.", code="charge_already_refunded")
    amount = money_of(form, "amount", charge["currency"], refundable) if "amount" in form else refundable
    refund = book.make(
        "refund",
        "re",
        amount=amount,
        charge=charge["id"],
        currency=charge["currency"],
        failure_reason=None,
        metadata=dict(form.get("metadata") or {}),
        payment_intent=charge["payment_intent"],
        reason=form.get("reason"),
        status="succeeded",
    )
    _add_refunded(book, charge, amount)
    book.move("refund", refund["id"], -amount, refund["currency"])
    book.emit("refund.created", refund)
    book.emit("charge.refunded", charge)
    response = dict(refund)  # a refund that fails later is answered as succeeded, as at Stripe
    card = card_behind(book.get("payment_method", charge["payment_method"]))
    if card and card.refund_fails:
        book.change(refund, status="failed", failure_reason="expired_or_canceled_card")
        _add_refunded(book, charge, -amount)
        book.move("refund_failure", refund["id"], amount, refund["currency"])
        book.emit("refund.failed", refund)
    return response


def _add_refunded(book: Book, charge: Object, amount: int) -> None:
    refunded = charge["amount_refunded"] + amount
    book.change(charge, amount_refunded=refunded, refunded=refunded == charge["amount"])


def open_dispute(book: Book, charge: Object) -> Object:
    """Open a dispute over the unrefunded part of a charge."""
    amount = charge["amount"] - charge["amount_refunded"]
    dispute = book.make(
        "dispute",
        "du",
        amount=amount,
        balance_transactions=[],
        charge=charge["id"],
        currency=charge["currency"],
        evidence={},
        evidence_details={"due_by": book.now + EVIDENCE_SECONDS, "submission_count": 0},
        metadata={},
        payment_intent=charge["payment_intent"],
        reason="fraudulent",
        status="needs_response",
    )
    _adjust(book, dispute, -amount)
    book.emit("charge.dispute.created", dispute)
    book.emit("charge.dispute.funds_withdrawn", dispute)
    return dispute


def reopen_dispute(book: Book, dispute: Object) -> Object:
    """Reopen a won dispute: the bank withdraws the money again without asking for evidence."""
    if dispute["status"] != "won":
        raise Refused("Only a dispute that was won can be taken up again.")
    book.change(dispute, status="under_review")
    _adjust(book, dispute, -dispute["amount"])
    book.emit("charge.dispute.updated", dispute)
    book.emit("charge.dispute.funds_withdrawn", dispute)
    return dispute


def _adjust(book: Book, dispute: Object, amount: int) -> None:
    """Add a balance transaction of a dispute; negative: the bank withdraws it."""
    transaction = book.move("adjustment", dispute["charge"], amount, dispute["currency"])
    book.change(dispute, balance_transactions=[*dispute["balance_transactions"], dict(transaction)])
    book.change(book.get("charge", dispute["charge"]), disputed=amount < 0)


def answer_dispute(book: Book, dispute: Object, form: Object) -> Object:
    """Submit evidence. As in Stripe's test mode, `winning_evidence` and `losing_evidence` decide at once."""
    submitted = form.get("evidence")
    evidence = dict(submitted) if isinstance(submitted, dict) else {}
    book.change(dispute, evidence=dispute["evidence"] | evidence)
    verdicts = {"winning_evidence": "won", "losing_evidence": "lost"}
    verdict = verdicts.get(str(dispute["evidence"].get("uncategorized_text")))
    return end_dispute(book, dispute, verdict) if verdict else dispute


def end_dispute(book: Book, dispute: Object, verdict: str) -> Object:
    """Close a dispute: `won` returns the money, `lost` does not."""
    if dispute["status"] in {"won", "lost"}:
        raise Refused("This dispute is already closed.")
    book.change(dispute, status=verdict)
    if verdict == "won":
        _adjust(book, dispute, dispute["amount"])
    book.emit("charge.dispute.closed", dispute)
    if verdict == "won":
        book.emit("charge.dispute.funds_reinstated", dispute)
    return dispute
