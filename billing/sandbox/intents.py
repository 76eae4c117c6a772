"""Payments in the sandbox: payment methods, payment intents, refunds, disputes.

A charge moves its money once, when its payment intent becomes `succeeded`. Its refunds and disputes never exceed it.

Fields that begin with an underscore are the sandbox's own; clients do not see them. A payment method has `_number`: the
number of its test card; `_saved`: whether it was saved for later charges; `_spent`: whether it was detached, and cannot
be used again.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from billing.sandbox import cards
from billing.sandbox.account import Form, Refused, StripeAccount, boolean, money_of, required
from billing.sandbox.cards import Challenge, Decline, TestCard
from billing.sandbox.store import StripeObject

EVIDENCE_SECONDS = 7 * 24 * 3600
"""How long evidence about a dispute can be submitted. Stripe gives 7 to 21 days, which depends on the card network."""
CARD_EXPIRY = (12, 2034)
"""Month and year in which every test card expires, fixed so that answers do not change with time. It is not checked."""

# --- Payment methods --------------------------------------------------------------------------------------------------


def make_card_method(account: StripeAccount, card: TestCard) -> StripeObject:
    """Create a payment method for a test card."""
    month, year = CARD_EXPIRY
    details = {"brand": card.brand, "display_brand": card.brand, "last4": card.last4, "exp_month": month}
    details |= {"exp_year": year, "funding": "credit"}
    return account.make(
        "payment_method", "pm", type="card", card=details, customer=None, _number=card.number, _saved=False
    )


def resolve_method(account: StripeAccount, method_id: str) -> StripeObject:
    """Return the payment method with this id. As in Stripe's test mode, the name of a test card creates one."""
    if method_id in cards.TOKENS:
        return make_card_method(account, cards.CARDS[cards.TOKENS[method_id]])
    return account.get("payment_method", method_id)


def attach(account: StripeAccount, method: StripeObject, customer_id: str) -> StripeObject:
    """Attach a payment method to a customer. Raises Refused, for example if the card declines every use."""
    account.customer(customer_id)  # raises Refused if there is none
    card = test_card_of(method)
    if card and card.declines:
        raise decline_error(card.declines)
    if method["customer"] not in {None, customer_id}:
        raise Refused("The payment method you provided has already been attached to a customer.")
    if method["customer"] is None:
        account.change(method, customer=customer_id)
        account.emit("payment_method.attached", method)
    return method


def detach(account: StripeAccount, method: StripeObject) -> StripeObject:
    """Detach a payment method from its customer. As at Stripe, the method cannot be used again (`_spent`)."""
    if method["customer"] is None:
        raise Refused("The payment method you provided is not attached to a customer so detachment is impossible.")
    account.change(method, customer=None, _spent=True)
    account.emit("payment_method.detached", method)
    return method


def delete_customer(account: StripeAccount, customer: StripeObject) -> StripeObject:
    """DELETE /v1/customers/:id: detach the customer's payment methods. The customer's id and payments remain.

    Emits no event for each method: customer.deleted, which the console handles, covers them.
    """
    for method in account.store.all("payment_method"):
        if method["customer"] == customer["id"]:
            account.change(method, customer=None, _spent=True)
    # Emitted before `_deleted` is set: the event shows the whole customer, but a deleted object shows only its id.
    account.emit("customer.deleted", customer)
    return account.change(customer, _deleted=True)


def test_card_of(method: StripeObject) -> TestCard | None:
    """Return the test card of a payment method, or None if the method is not a card."""
    return cards.CARDS.get(method.get("_number", ""))


def decline_error(decline: Decline, **more: Any) -> Refused:
    """Return the error of a declined card. `more` are further fields of the error."""
    return Refused(
        decline.message,
        code=decline.code,
        status=HTTPStatus.PAYMENT_REQUIRED,
        kind="card_error",
        decline_code=decline.decline_code,
        **more,
    )


# --- Intents ----------------------------------------------------------------------------------------------------------


def make_intent(account: StripeAccount, form: Form) -> StripeObject:
    """POST /v1/payment_intents; with the parameter `confirm`, the intent is confirmed at once.

    The function `confirm` then resolves the form's `payment_method` again. For the name of a test card, this creates a
    second payment method, which replaces the first.
    """
    customer_id = form.get("customer")
    if customer_id:
        account.customer(customer_id)  # raises Refused if there is none
    method_id = form.get("payment_method")
    intent = account.make(
        "payment_intent",
        "pi",
        amount=money_of(form, "amount", required(form, "currency").lower()),
        amount_received=0,
        currency=required(form, "currency").lower(),
        customer=customer_id,
        description=form.get("description"),
        metadata=dict(form.get("metadata") or {}),
        setup_future_usage=form.get("setup_future_usage"),
        payment_method=resolve_method(account, method_id)["id"] if method_id else None,
        status="requires_confirmation" if method_id else "requires_payment_method",
        latest_charge=None,
        last_payment_error=None,
        next_action=None,
    )
    account.emit("payment_intent.created", intent)
    return confirm(account, intent, form) if boolean(form, "confirm") else intent


def confirm(account: StripeAccount, intent: StripeObject, form: Form) -> StripeObject:
    """Charge the card of an intent, or wait for the payer's authentication.

    Raises Refused, with the intent in the error, if the card is declined. The intent can be confirmed again.
    """
    if intent["status"] not in {"requires_payment_method", "requires_confirmation", "requires_action"}:
        message = f"You cannot confirm this PaymentIntent because it has a status of {intent['status']}."
        raise Refused(message, code="payment_intent_unexpected_state")
    if method_id := form.get("payment_method"):
        account.change(intent, payment_method=resolve_method(account, str(method_id))["id"])
    if not intent["payment_method"]:
        raise Refused("You cannot confirm this PaymentIntent because it's missing a payment method.")
    method = account.get("payment_method", intent["payment_method"])
    if method.get("_spent") or method["customer"] not in {None, intent["customer"]}:
        raise Refused("The provided PaymentMethod was detached, or belongs to another Customer.")
    card = test_card_of(method)
    if card is None:  # a redirect method: the payer confirms on another page
        return _require_action(account, intent)
    # `declines_later` applies to a card that is attached to a customer.
    if decline := card.declines or (card.declines_later if method["customer"] else None):
        raise fail(account, intent, decline)
    needs_challenge = card.challenge is Challenge.ALWAYS or (
        card.challenge is Challenge.UNLESS_SAVED and not method["_saved"]
    )
    if needs_challenge and boolean(form, "off_session"):
        raise fail(account, intent, cards.AUTHENTICATION_REQUIRED)
    return _require_action(account, intent) if needs_challenge else charge(account, intent)


def _require_action(account: StripeAccount, intent: StripeObject) -> StripeObject:
    """Let an intent wait until the payer has answered on the challenge page."""
    url = f"{account.base_url}/challenge/{intent['id']}"
    account.change(
        intent,
        status="requires_action",
        next_action={"type": "redirect_to_url", "redirect_to_url": {"url": url, "return_url": None}},
    )
    account.emit("payment_intent.requires_action", intent)
    return intent


def fail(account: StripeAccount, intent: StripeObject, decline: Decline) -> Refused:
    """Record a declined payment: the intent needs another payment method. Returns the error for the caller to raise."""
    error = decline_error(decline).answer["error"]
    account.change(
        intent, status="requires_payment_method", payment_method=None, last_payment_error=error, next_action=None
    )
    account.emit("payment_intent.payment_failed", intent)
    return decline_error(
        decline, payment_intent={"id": intent["id"], "object": "payment_intent", "status": intent["status"]}
    )


def charge(account: StripeAccount, intent: StripeObject) -> StripeObject:
    """Charge an intent after the bank agreed, and return it. With `setup_future_usage`, the card is saved first."""
    method = account.get("payment_method", intent["payment_method"])
    if intent["setup_future_usage"] and intent["customer"] and test_card_of(method):
        account.change(method, _saved=True)
        attach(account, method, intent["customer"])
    amount = intent["amount"]
    new_charge = account.make(
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
    account.add_balance_transaction("charge", new_charge["id"], amount, new_charge["currency"])
    account.change(
        intent,
        status="succeeded",
        amount_received=amount,
        latest_charge=new_charge["id"],
        next_action=None,
        last_payment_error=None,
    )
    account.emit("charge.succeeded", new_charge)
    account.emit("payment_intent.succeeded", intent)
    card = test_card_of(method)
    if card and card.disputes:
        open_dispute(account, new_charge)
    return intent


# --- Refunds and disputes ---------------------------------------------------------------------------------------------


def make_refund(account: StripeAccount, form: Form) -> StripeObject:
    """POST /v1/refunds: refund all or a part of an intent or charge."""
    if intent_id := form.get("payment_intent"):
        charge = account.get("charge", account.get("payment_intent", intent_id)["latest_charge"])
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
    response = dict(refund)  # a copy: at Stripe, a refund fails only after the answer said that it succeeded
    card = test_card_of(account.get("payment_method", charge["payment_method"]))
    if card and card.refund_fails:
        account.change(refund, status="failed", failure_reason="expired_or_canceled_card")
        _add_refunded(account, charge, -amount)
        account.add_balance_transaction("refund_failure", refund["id"], amount, refund["currency"])
        account.emit("refund.failed", refund)
    return response


def _add_refunded(account: StripeAccount, charge: StripeObject, amount: int) -> None:
    refunded = charge["amount_refunded"] + amount
    account.change(charge, amount_refunded=refunded, refunded=refunded == charge["amount"])


def open_dispute(account: StripeAccount, charge: StripeObject) -> StripeObject:
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
    _move_disputed(account, dispute, -amount)
    account.emit("charge.dispute.created", dispute)
    account.emit("charge.dispute.funds_withdrawn", dispute)
    return dispute


def reopen_dispute(account: StripeAccount, dispute: StripeObject) -> StripeObject:
    """Reopen a won dispute: the bank withdraws the money again without asking for evidence."""
    if dispute["status"] != "won":
        raise Refused("Only a dispute that was won can be reopened.")
    account.change(dispute, status="under_review")
    _move_disputed(account, dispute, -dispute["amount"])
    account.emit("charge.dispute.updated", dispute)
    account.emit("charge.dispute.funds_withdrawn", dispute)
    return dispute


def _move_disputed(account: StripeAccount, dispute: StripeObject, amount: int) -> None:
    """Add a balance transaction of a dispute. The bank withdraws the money if `amount` is negative, else returns it."""
    transaction = account.add_balance_transaction("adjustment", dispute["charge"], amount, dispute["currency"])
    account.change(dispute, balance_transactions=[*dispute["balance_transactions"], dict(transaction)])
    account.change(account.get("charge", dispute["charge"]), disputed=amount < 0)


def answer_dispute(account: StripeAccount, dispute: StripeObject, form: Form) -> StripeObject:
    """POST /v1/disputes/:id: submit evidence.

    As in Stripe's test mode, the strings `winning_evidence` and `losing_evidence` decide the dispute at once.
    """
    submitted = form.get("evidence")
    evidence = dict(submitted) if isinstance(submitted, dict) else {}
    account.change(dispute, evidence=dispute["evidence"] | evidence)
    verdicts = {"winning_evidence": "won", "losing_evidence": "lost"}
    verdict = verdicts.get(str(dispute["evidence"].get("uncategorized_text")))
    return end_dispute(account, dispute, verdict) if verdict else dispute


def end_dispute(account: StripeAccount, dispute: StripeObject, verdict: str) -> StripeObject:
    """Close a dispute with the verdict `won` (by the merchant, who gets the money back) or `lost`."""
    if dispute["status"] in {"won", "lost"}:
        raise Refused("This dispute is already closed.")
    account.change(dispute, status=verdict)
    if verdict == "won":
        _move_disputed(account, dispute, dispute["amount"])
    account.emit("charge.dispute.closed", dispute)
    if verdict == "won":
        account.emit("charge.dispute.funds_reinstated", dispute)
    return dispute
