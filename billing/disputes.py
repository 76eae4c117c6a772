"""Disputes (chargebacks): a cardholder's bank withdraws a payment, may return it, and may withdraw it again.

Stripe reports each withdrawal and each return as a balance transaction of the dispute. Each is booked once in the
ledger, under a reference with its id. So it does not matter how often and in which order the provider's events arrive.
The status of a dispute moves no money.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from django.utils import timezone
from django.utils.translation import gettext_noop

from billing import receivables
from billing.errors import Quarantined
from billing.models import AutoTopUp, Dispute, DisputeMovement, TopUp, Transaction
from billing.payments import parse_timestamp
from billing.refunds import find_top_up
from console.accounts.emails import forget_sent

STATE_BY_FINAL_STATUS = {
    "won": Dispute.States.WON,
    "lost": Dispute.States.LOST,
    "warning_closed": Dispute.States.WON,
    "prevented": Dispute.States.WON,
}
"""Our state for each final status of Stripe. Other statuses mean open. `warning_closed` is a bank's inquiry that
ended without a dispute. `prevented` never became a dispute."""


def apply_dispute(dispute_object: Mapping[str, Any], *, livemode: object) -> None:
    """Store the current state of a dispute, and book its new balance transactions.

    Call it in a transaction. Raises Quarantined if the dispute contradicts our rows, Parked if its payment is not
    credited yet.
    """
    top_up = find_top_up(dispute_object, livemode=livemode)
    amount = dispute_object["amount"]
    if not 0 < amount <= top_up.amount_minor:
        raise Quarantined(f"The dispute's amount {amount} is not between 1 and the top-up's {top_up.amount_minor}.")
    evidence_due = (dispute_object.get("evidence_details") or {}).get("due_by")
    row, is_new = Dispute.objects.select_for_update().get_or_create(
        dispute_id=dispute_object["id"],
        defaults={
            "top_up": top_up,
            "amount_minor": amount,
            "reason": str(dispute_object.get("reason") or "")[:100],
            "opened_at": parse_timestamp(dispute_object.get("created")),
        },
    )
    has_withdrawn = _book_new_movements(row, dispute_object, top_up=top_up)
    if is_new or has_withdrawn:  # the cardholder of the saved card may dispute the next charge too
        AutoTopUp.objects.filter(account=top_up.account, is_on=True).update(is_on=False, last_failure="disputed")
    state = STATE_BY_FINAL_STATUS.get(str(dispute_object.get("status")), Dispute.States.OPEN)
    if not _is_outdated(row, dispute_object, state):
        row.evidence_due_at = parse_timestamp(evidence_due) if evidence_due else None
        row.state = state
        row.ended_at = (row.ended_at or timezone.now()) if state != Dispute.States.OPEN else None
    row.save()


def _is_outdated(row: Dispute, dispute_object: Mapping[str, Any], state: Dispute.States) -> bool:
    """Return whether the object, which was fetched before the row was locked, is older than the row.

    `state` is the object's state. An older object may lack the row's latest movement, or be open although the row has
    ended. A dispute is open again only if it was won and the bank then withdrew the money again.
    """
    received = {transaction["id"] for transaction in dispute_object.get("balance_transactions") or ()}
    latest = row.movements.last()
    if latest and not latest.lacks_provider_id and latest.balance_transaction not in received:
        return True
    if state != Dispute.States.OPEN or row.state == Dispute.States.OPEN:
        return False
    return row.state == Dispute.States.LOST or not _withdrawn(row)


def _book_new_movements(row: Dispute, dispute_object: Mapping[str, Any], *, top_up: TopUp) -> bool:
    """Book the balance transactions that are not booked yet, oldest first. Raises Quarantined.

    Returns whether one of them withdrew money.
    """
    _import_earlier_bookings(row)
    booked = list(row.movements.all())
    booked_ids = {movement.balance_transaction for movement in booked}
    has_withdrawn = False
    # Without Stripe's fee for the dispute, which the operator pays and not the customer.
    transactions = [
        transaction
        for transaction in dispute_object.get("balance_transactions") or ()
        if transaction.get("type") != "stripe_fee"
    ]
    for transaction in sorted(transactions, key=itemgetter("created")):
        if transaction["id"] in booked_ids:
            continue
        amount = _withdrawal_minor(row, transaction, currency=top_up.currency)
        without_id = [
            movement
            for movement in booked
            if movement.lacks_provider_id and (movement.amount_minor > 0) == (amount > 0)  # the same direction
        ]
        if without_id:
            # Version 0.1 booked this movement without the id: add the id instead of booking it twice.
            earlier = without_id[0]
            earlier.balance_transaction = transaction["id"]
            earlier.save(update_fields=["balance_transaction"])
            continue
        _book(row, transaction["id"], amount, top_up=top_up)
        has_withdrawn = has_withdrawn or amount > 0
    row.is_withdrawn = row.is_withdrawn or row.movements.filter(amount_minor__gt=0).exists()
    row.is_reinstated = row.is_withdrawn and not row.withdrawn_minor
    if not 0 <= _withdrawn(row) <= top_up.amount_minor:
        raise Quarantined(f"The dispute withdrew {row.withdrawn_minor} of a top-up of {top_up.amount_minor}.")
    if has_withdrawn and booked:
        row.mailed_at = None  # a second withdrawal needs another email, to the same recipients too
        forget_sent(row)
    return has_withdrawn


def _withdrawal_minor(row: Dispute, transaction: Mapping[str, Any], *, currency: str) -> int:
    """Return the amount that a balance transaction withdraws from the wallet; negative if it returns money.

    The transaction's amount cannot be used if the operator's Stripe account has another currency than the top-up. Then
    a withdrawal takes the rest of the disputed amount, and a return gives back everything that was withdrawn.
    """
    if str(transaction.get("currency")).upper() == currency:
        return -int(transaction["amount"])
    return row.amount_minor - _withdrawn(row) if transaction["amount"] < 0 else -_withdrawn(row)


def _withdrawn(row: Dispute) -> int:
    """Return the amount withdrawn so far, in minor units. The column is null in new rows and in rows of version 0.1."""
    return row.withdrawn_minor or 0


def _import_earlier_bookings(row: Dispute) -> None:
    """Create movements for the bookings of version 0.1: at most one withdrawal and one return, without Stripe's ids."""
    for reference, amount in (
        (f"dispute:{row.dispute_id}", row.amount_minor),
        (f"dispute-won:{row.dispute_id}", -row.amount_minor),
    ):
        booked = Transaction.objects.filter(reference=reference).first()
        if booked and not row.movements.filter(reference=reference).exists():
            row.movements.create(reference=reference, amount_minor=amount, moved_at=booked.created_at)
            row.withdrawn_minor = _withdrawn(row) + amount
    row.withdrawn_minor = _withdrawn(row)  # 0 instead of null


def _book(row: Dispute, transaction_id: str, amount: int, *, top_up: TopUp) -> None:
    """Book a balance transaction in the ledger and record the movement. A positive amount is withdrawn."""
    movement = DisputeMovement.objects.create(
        dispute=row,
        balance_transaction=transaction_id,
        reference=f"dispute:{transaction_id}",
        amount_minor=amount,
    )
    row.withdrawn_minor = _withdrawn(row) + amount
    if amount > 0:
        receivables.withdraw(
            account=top_up.account,
            amount_minor=amount,
            reference=movement.reference,
            kind="dispute",
            description=gettext_noop("Disputed payment: withdrawn by the bank"),
        )
    elif amount < 0:
        receivables.pay_in(
            account=top_up.account,
            amount_minor=-amount,
            reference=movement.reference,
            kind="dispute",
            description=gettext_noop("Disputed payment: returned by the bank"),
            is_return=True,
        )
