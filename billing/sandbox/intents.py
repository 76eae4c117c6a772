"""Payments at the sandbox: saved cards, payment intents with capture, refunds, disputes.

The one rule: a charge's money is moved once, with the intent's step to `succeeded`; what goes back is never more.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from billing.sandbox import cards
from billing.sandbox.book import Book, Refused, amount_of, money_of, required, true
from billing.sandbox.cards import Challenge, TestCard
from billing.sandbox.store import Object

EVIDENCE_SECONDS = 7 * 24 * 3600
EXPIRES = (12, 2034)

# --- Means of payment -------------------------------------------------------------------------------------------------


def make_method(book: Book, form: Object) -> Object:
    """POST /v1/payment_methods with a card's number, or a name of a test card's."""
    details = form.get("card")
    given = details.get("number") or details.get("token") if isinstance(details, dict) else None
    card = cards.card_of(str(given or ""))
    if card is None:
        raise Refused("Your card number is incorrect.", code="incorrect_number", status=402, kind="card_error")
    return card_method(book, card)


def card_method(book: Book, card: TestCard) -> Object:
    """A means of payment for a test card."""
    month, year = EXPIRES
    shown = {"brand": card.brand, "display_brand": card.brand, "last4": card.last4, "exp_month": month}
    shown |= {"exp_year": year, "funding": "credit"}
    return book.make("payment_method", "pm", type="card", card=shown, customer=None, _number=card.number, _saved=False)


def named_method(book: Book, name: str) -> Object:
    """A means of payment by its id, or made for one of Stripe's names."""
    return card_method(book, cards.CARDS[cards.TOKENS[name]]) if name in cards.TOKENS else book.get(
        "payment_method", name
    )  # fmt: skip


def attach(book: Book, method: Object, customer: str) -> Object:
    """Save a means of payment. A card that always declines can't be saved."""
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
    """Forget a saved means of payment; it can't be used again."""
    if method["customer"] is None:
        raise Refused("The payment method you provided is not attached to a customer so detachment is impossible.")
    book.change(method, customer=None, _spent=True)
    book.emit("payment_method.detached", method)
    return method


def delete_customer(book: Book, customer: Object) -> Object:
    """DELETE /v1/customers/:id: its saved means of payment can't be used again; its id and what was paid stay."""
    for method in book.store.all("payment_method"):
        if method["customer"] == customer["id"]:
            book.change(method, customer=None, _spent=True)
    book.emit("customer.deleted", customer)
    return book.change(customer, _deleted=True)


def card_behind(method: Object) -> TestCard | None:
    """The test card of a means of payment; None for another means."""
    return cards.CARDS.get(method.get("_number", ""))


def declined(why: tuple[str, str, str], **more: Any) -> Refused:
    """The error of a card that was declined."""
    code, decline, sentence = why
    return Refused(
        sentence, code=code, status=HTTPStatus.PAYMENT_REQUIRED, kind="card_error", decline_code=decline, **more
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
    """Try to pay. Raises Refused for a card that was declined, with the intent, which can be tried again."""
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
    if why := card.declines or (card.declines_later if method["customer"] else None):
        raise fail(book, intent, why)
    asked = card.challenge is Challenge.ALWAYS or (card.challenge is Challenge.UNLESS_SAVED and not method["_saved"])
    if asked and true(form, "off_session"):
        raise fail(book, intent, cards.AUTHENTICATE)
    return _require_action(book, intent) if asked else authorize(book, intent)


def _require_action(book: Book, intent: Object) -> Object:
    url = f"{book.base_url}/challenge/{intent['id']}"
    book.change(
        intent,
        status="requires_action",
        next_action={"type": "redirect_to_url", "redirect_to_url": {"url": url, "return_url": None}},
    )
    book.emit("payment_intent.requires_action", intent)
    return intent


def fail(book: Book, intent: Object, why: tuple[str, str, str]) -> Refused:
    """A try that failed: the intent waits for another means of payment. Gives the error."""
    error = declined(why).answer["error"]
    book.change(
        intent, status="requires_payment_method", payment_method=None, last_payment_error=error, next_action=None
    )
    book.emit("payment_intent.payment_failed", intent)
    return declined(why, payment_intent={"id": intent["id"], "object": "payment_intent", "status": intent["status"]})


def authorize(book: Book, intent: Object) -> Object:
    """The bank agreed: take the money, or set it aside where it is to be captured by hand."""
    method = book.get("payment_method", intent["payment_method"])
    if intent["setup_future_usage"] and intent["customer"] and card_behind(method):
        book.change(method, _saved=True)
        attach(book, method, intent["customer"])
    if intent["capture_method"] == "manual":
        book.change(intent, status="requires_capture", amount_capturable=intent["amount"], next_action=None)
        book.emit("payment_intent.amount_capturable_updated", intent)
        return intent
    return _take(book, intent, intent["amount"])


def capture(book: Book, intent: Object, form: Object) -> Object:
    """Take what was set aside, or a part of it; the rest is let go."""
    if intent["status"] != "requires_capture":
        raise _unexpected(intent, "capture")
    whole = intent["amount_capturable"]
    return _take(book, intent, amount_of(form, "amount_to_capture", whole) if "amount_to_capture" in form else whole)


def cancel(book: Book, intent: Object) -> Object:
    """Give an intent up."""
    if intent["status"] in {"succeeded", "canceled", "processing"}:
        raise _unexpected(intent, "cancel")
    book.change(intent, status="canceled", amount_capturable=0, next_action=None)
    book.emit("payment_intent.canceled", intent)
    return intent


def _take(book: Book, intent: Object, amount: int) -> Object:
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
    sentence = f"You cannot {act} this PaymentIntent because it has a status of {intent['status']}."
    return Refused(sentence, code="payment_intent_unexpected_state")


# --- What goes back ---------------------------------------------------------------------------------------------------


def make_refund(book: Book, form: Object) -> Object:
    """POST /v1/refunds of an intent or a charge, in part or whole."""
    if name := form.get("payment_intent"):
        charge = book.get("charge", book.get("payment_intent", name)["latest_charge"])
    else:
        charge = book.get("charge", required(form, "charge"))
    if charge["disputed"]:
        raise Refused(f"Charge {charge['id']} has been charged back; cannot issue a refund.", code="charge_disputed")
    left = charge["amount"] - charge["amount_refunded"]
    if left == 0:
        raise Refused(f"Charge {charge['id']} has already been refunded.", code="charge_already_refunded")
    amount = money_of(form, "amount", charge["currency"], left) if "amount" in form else left
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
    _returned(book, charge, amount)
    book.move("refund", refund["id"], -amount, refund["currency"])
    book.emit("refund.created", refund)
    book.emit("charge.refunded", charge)
    answer = dict(refund)
    card = card_behind(book.get("payment_method", charge["payment_method"]))
    if card and card.refund_fails:
        book.change(refund, status="failed", failure_reason="expired_or_canceled_card")
        _returned(book, charge, -amount)
        book.move("refund_failure", refund["id"], amount, refund["currency"])
        book.emit("refund.failed", refund)
    return answer


def _returned(book: Book, charge: Object, amount: int) -> None:
    back = charge["amount_refunded"] + amount
    book.change(charge, amount_refunded=back, refunded=back == charge["amount"])


def open_dispute(book: Book, charge: Object) -> Object:
    """The cardholder's bank takes back what is left of a charge."""
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
    """The bank does not agree with an end in our favour, and takes the money once more; nobody's evidence is asked."""
    if dispute["status"] != "won":
        raise Refused("Only a dispute that was won can be taken up again.")
    book.change(dispute, status="under_review")
    _adjust(book, dispute, -dispute["amount"])
    book.emit("charge.dispute.updated", dispute)
    book.emit("charge.dispute.funds_withdrawn", dispute)
    return dispute


def _adjust(book: Book, dispute: Object, amount: int) -> None:
    """Move money of a dispute (negative: the bank takes it)."""
    moved = book.move("adjustment", dispute["charge"], amount, dispute["currency"])
    book.change(dispute, balance_transactions=[*dispute["balance_transactions"], dict(moved)])
    book.change(book.get("charge", dispute["charge"]), disputed=amount < 0)


def answer_dispute(book: Book, dispute: Object, form: Object) -> Object:
    """Hand evidence in. As in Stripe's test mode, the texts `winning_evidence` and `losing_evidence` decide at once."""
    given = form.get("evidence")
    evidence = dict(given) if isinstance(given, dict) else {}
    book.change(dispute, evidence=dispute["evidence"] | evidence)
    ends = {"winning_evidence": "won", "losing_evidence": "lost"}
    verdict = ends.get(str(dispute["evidence"].get("uncategorized_text")))
    return end_dispute(book, dispute, verdict) if verdict else dispute


def end_dispute(book: Book, dispute: Object, verdict: str) -> Object:
    """Decide a dispute: `won` gives the money back, `lost` does not."""
    if dispute["status"] in {"won", "lost"}:
        raise Refused("This dispute is already closed.")
    book.change(dispute, status=verdict)
    if verdict == "won":
        _adjust(book, dispute, dispute["amount"])
    book.emit("charge.dispute.closed", dispute)
    if verdict == "won":
        book.emit("charge.dispute.funds_reinstated", dispute)
    return dispute
