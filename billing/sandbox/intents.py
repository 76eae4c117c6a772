"""Payments in the sandbox: payment methods, payment intents with capture, refunds, disputes.

A charge moves its money once, when the intent becomes `succeeded`. Refunds and disputes never exceed it.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from billing.sandbox import cards
from billing.sandbox.account import Refused, StripeAccount, amount_of, boolean, money_of, required
from billing.sandbox.cards import Challenge, TestCard
from billing.sandbox.store import Object

EVIDENCE_SECONDS = 7 * 24 * 3600
"""How long evidence about a dispute can be submitted, as at Stripe."""
CARD_EXPIRY = (12, 2034)
"""Month and year in which every test card expires."""

# --- Payment methods --------------------------------------------------------------------------------------------------


def make_method(account: StripeAccount, form: Object) -> Object:
    """POST /v1/payment_methods with a card number or the name of a test card."""
    details = form.get("card")
    number = details.get("number") or details.get("token") if isinstance(details, dict) else None
    card = cards.card_of(str(number or ""))
    if card is None:
        raise Refused("Your card number is incorrect.", code="incorrect_number", status=402, kind="card_error")
    return card_method(account, card)


def card_method(account: StripeAccount, card: TestCard) -> Object:
    """Create a payment method for a test card."""
    month, year = CARD_EXPIRY
    details = {"brand": card.brand, "display_brand": card.brand, "last4": card.last4, "exp_month": month}
    details |= {"exp_year": year, "funding": "credit"}
    return account.make(
        "payment_method", "pm", type="card", card=details, customer=None, _number=card.number, _saved=False
    )


def named_method(account: StripeAccount, name: str) -> Object:
    """Return a payment method by id, or create one for a Stripe test name."""
    return card_method(account, cards.CARDS[cards.TOKENS[name]]) if name in cards.TOKENS else account.get(
        "payment_method", name
    )  # fmt: skip


def attach(account: StripeAccount, method: Object, customer: str) -> Object:
    """Attach a payment method to a customer. A card that always declines is refused."""
    account.customer(customer)
    card = test_card_of(method)
    if card and card.declines:
        raise declined(card.declines)
    if method["customer"] not in {None, customer}:
        raise Refused("The payment method you provided has already been attached to a customer.")
    if method["customer"] is None:
        account.change(method, customer=customer)
        account.emit("payment_method.attached", method)
    return method


def detach(account: StripeAccount, method: Object) -> Object:
    """Detach a payment method; it cannot be used again."""
    if method["customer"] is None:
        raise Refused("The payment method you provided is not attached to a customer so detachment is impossible.")
    account.change(method, customer=None, _spent=True)
    account.emit("payment_method.detached", method)
    return method


def delete_customer(account: StripeAccount, customer: Object) -> Object:
    """DELETE /v1/customers/:id: detaches its payment methods; its id and payments remain."""
    for method in account.store.all("payment_method"):
        if method["customer"] == customer["id"]:
            account.change(method, customer=None, _spent=True)
    account.emit("customer.deleted", customer)
    return account.change(customer, _deleted=True)


def test_card_of(method: Object) -> TestCard | None:
    """Return the test card of a payment method, or None for other methods."""
    return cards.CARDS.get(method.get("_number", ""))


def declined(decline: tuple[str, str, str], **more: Any) -> Refused:
    """Return the error of a declined card."""
    code, decline_code, message = decline
    return Refused(
        message, code=code, status=HTTPStatus.PAYMENT_REQUIRED, kind="card_error", decline_code=decline_code, **more
    )


# --- Intents ----------------------------------------------------------------------------------------------------------


def make_intent(account: StripeAccount, form: Object) -> Object:
    """POST /v1/payment_intents; `confirm` confirms it at once."""
    customer = form.get("customer")
    if customer:
        account.customer(customer)
    method = form.get("payment_method")
    intent = account.make(
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
        payment_method=named_method(account, method)["id"] if method else None,
        status="requires_confirmation" if method else "requires_payment_method",
        latest_charge=None,
        last_payment_error=None,
        next_action=None,
    )
    account.emit("payment_intent.created", intent)
    return confirm(account, intent, form) if boolean(form, "confirm") else intent


def confirm(account: StripeAccount, intent: Object, form: Object) -> Object:
    """Confirm an intent. Raises Refused with the intent if the card is declined; it can be confirmed again."""
    if intent["status"] not in {"requires_payment_method", "requires_confirmation", "requires_action"}:
        raise _unexpected(intent, "confirm")
    if name := form.get("payment_method"):
        account.change(intent, payment_method=named_method(account, str(name))["id"])
    if not intent["payment_method"]:
        raise Refused("You cannot confirm this PaymentIntent because it's missing a payment method.")
    method = account.get("payment_method", intent["payment_method"])
    if method.get("_spent") or method["customer"] not in {None, intent["customer"]}:
        raise Refused("The provided PaymentMethod was detached, or belongs to another Customer.")
    card = test_card_of(method)
    if card is None:
        return _require_action(account, intent)
    if decline := card.declines or (card.declines_later if method["customer"] else None):
        raise fail(account, intent, decline)
    needs_challenge = card.challenge is Challenge.ALWAYS or (
        card.challenge is Challenge.UNLESS_SAVED and not method["_saved"]
    )
    if needs_challenge and boolean(form, "off_session"):
        raise fail(account, intent, cards.AUTHENTICATION_REQUIRED)
    return _require_action(account, intent) if needs_challenge else authorize(account, intent)


def _require_action(account: StripeAccount, intent: Object) -> Object:
    url = f"{account.base_url}/challenge/{intent['id']}"
    account.change(
        intent,
        status="requires_action",
        next_action={"type": "redirect_to_url", "redirect_to_url": {"url": url, "return_url": None}},
    )
    account.emit("payment_intent.requires_action", intent)
    return intent


def fail(account: StripeAccount, intent: Object, decline: tuple[str, str, str]) -> Refused:
    """Record a failed attempt: the intent needs another payment method. Returns the error."""
    error = declined(decline).answer["error"]
    account.change(
        intent, status="requires_payment_method", payment_method=None, last_payment_error=error, next_action=None
    )
    account.emit("payment_intent.payment_failed", intent)
    return declined(
        decline, payment_intent={"id": intent["id"], "object": "payment_intent", "status": intent["status"]}
    )


def authorize(account: StripeAccount, intent: Object) -> Object:
    """Capture the authorized money, or hold it for a manual capture."""
    method = account.get("payment_method", intent["payment_method"])
    if intent["setup_future_usage"] and intent["customer"] and test_card_of(method):
        account.change(method, _saved=True)
        attach(account, method, intent["customer"])
    if intent["capture_method"] == "manual":
        account.change(intent, status="requires_capture", amount_capturable=intent["amount"], next_action=None)
        account.emit("payment_intent.amount_capturable_updated", intent)
        return intent
    return _charge(account, intent, intent["amount"])


def capture(account: StripeAccount, intent: Object, form: Object) -> Object:
    """Capture all or a part of the authorized amount and release the rest."""
    if intent["status"] != "requires_capture":
        raise _unexpected(intent, "capture")
    authorized = intent["amount_capturable"]
    return _charge(
        account, intent, amount_of(form, "amount_to_capture", authorized) if "amount_to_capture" in form else authorized
    )


def cancel(account: StripeAccount, intent: Object) -> Object:
    """Cancel an intent."""
    if intent["status"] in {"succeeded", "canceled", "processing"}:
        raise _unexpected(intent, "cancel")
    account.change(intent, status="canceled", amount_capturable=0, next_action=None)
    account.emit("payment_intent.canceled", intent)
    return intent


def _charge(account: StripeAccount, intent: Object, amount: int) -> Object:
    charge = account.make(
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
    account.add_balance_transaction("charge", charge["id"], amount, charge["currency"])
    account.change(
        intent,
        status="succeeded",
        amount_received=amount,
        amount_capturable=0,
        latest_charge=charge["id"],
        next_action=None,
        last_payment_error=None,
    )
    account.emit("charge.succeeded", charge)
    account.emit("payment_intent.succeeded", intent)
    card = test_card_of(account.get("payment_method", intent["payment_method"]))
    if card and card.disputes:
        open_dispute(account, charge)
    return intent


def _unexpected(intent: Object, action: str) -> Refused:
    message = f"You cannot {action} this PaymentIntent because it has a status of {intent['status']}."
    return Refused(message, code="payment_intent_unexpected_state")


# --- Refunds and disputes ---------------------------------------------------------------------------------------------


def make_refund(account: StripeAccount, form: Object) -> Object:
    """POST /v1/refunds: refund all or a part of an intent or charge."""
    if name := form.get("payment_intent"):
        charge = account.get("charge", account.get("payment_intent", name)["latest_charge"])
    else:
        charge = account.get("charge", required(form, "charge"))
    if charge["disputed"]:
        raise Refused(f"Charge {charge['id']} has been charged back; cannot issue a refund.", code="charge_disputed")
    refundable = charge["amount"] - charge["amount_refunded"]
    if refundable == 0:
        raise Refused(f"Charge {charge['id']} has already been refunded.", code="charge_already_refunded")
    amount = money_of(form, "amount", charge["currency"], refundable) if "amount" in form else refundable
    refund = account.make(
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
    _add_refunded(account, charge, amount)
    account.add_balance_transaction("refund", refund["id"], -amount, refund["currency"])
    account.emit("refund.created", refund)
    account.emit("charge.refunded", charge)
    response = dict(refund)  # a refund that fails later is answered as succeeded, as at Stripe
    card = test_card_of(account.get("payment_method", charge["payment_method"]))
    if card and card.refund_fails:
        account.change(refund, status="failed", failure_reason="expired_or_canceled_card")
        _add_refunded(account, charge, -amount)
        account.add_balance_transaction("refund_failure", refund["id"], amount, refund["currency"])
        account.emit("refund.failed", refund)
    return response


def _add_refunded(account: StripeAccount, charge: Object, amount: int) -> None:
    refunded = charge["amount_refunded"] + amount
    account.change(charge, amount_refunded=refunded, refunded=refunded == charge["amount"])


def open_dispute(account: StripeAccount, charge: Object) -> Object:
    """Open a dispute over the unrefunded part of a charge."""
    amount = charge["amount"] - charge["amount_refunded"]
    dispute = account.make(
        "dispute",
        "du",
        amount=amount,
        balance_transactions=[],
        charge=charge["id"],
        currency=charge["currency"],
        evidence={},
        evidence_details={"due_by": account.now + EVIDENCE_SECONDS, "submission_count": 0},
        metadata={},
        payment_intent=charge["payment_intent"],
        reason="fraudulent",
        status="needs_response",
    )
    _adjust(account, dispute, -amount)
    account.emit("charge.dispute.created", dispute)
    account.emit("charge.dispute.funds_withdrawn", dispute)
    return dispute


def reopen_dispute(account: StripeAccount, dispute: Object) -> Object:
    """Reopen a won dispute: the bank withdraws the money again without asking for evidence."""
    if dispute["status"] != "won":
        raise Refused("Only a dispute that was won can be reopened.")
    account.change(dispute, status="under_review")
    _adjust(account, dispute, -dispute["amount"])
    account.emit("charge.dispute.updated", dispute)
    account.emit("charge.dispute.funds_withdrawn", dispute)
    return dispute


def _adjust(account: StripeAccount, dispute: Object, amount: int) -> None:
    """Add a balance transaction of a dispute. A negative amount is withdrawn by the bank."""
    transaction = account.add_balance_transaction("adjustment", dispute["charge"], amount, dispute["currency"])
    account.change(dispute, balance_transactions=[*dispute["balance_transactions"], dict(transaction)])
    account.change(account.get("charge", dispute["charge"]), disputed=amount < 0)


def answer_dispute(account: StripeAccount, dispute: Object, form: Object) -> Object:
    """Submit evidence. As in Stripe's test mode, `winning_evidence` and `losing_evidence` decide at once."""
    submitted = form.get("evidence")
    evidence = dict(submitted) if isinstance(submitted, dict) else {}
    account.change(dispute, evidence=dispute["evidence"] | evidence)
    verdicts = {"winning_evidence": "won", "losing_evidence": "lost"}
    verdict = verdicts.get(str(dispute["evidence"].get("uncategorized_text")))
    return end_dispute(account, dispute, verdict) if verdict else dispute


def end_dispute(account: StripeAccount, dispute: Object, verdict: str) -> Object:
    """Close a dispute: `won` returns the money, `lost` does not."""
    if dispute["status"] in {"won", "lost"}:
        raise Refused("This dispute is already closed.")
    account.change(dispute, status=verdict)
    if verdict == "won":
        _adjust(account, dispute, dispute["amount"])
    account.emit("charge.dispute.closed", dispute)
    if verdict == "won":
        account.emit("charge.dispute.funds_reinstated", dispute)
    return dispute
