"""Disputes: a cardholder's bank takes a payment back, returns it, and may take it again.

The one rule: the ledger follows the dispute's balance transactions, which are the money that moved, each booked once
and keyed on its id. Which event told of them, in which order and how often, is nothing to it; nor is the status, which
says how the dispute stands and moves nothing.
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
from billing.payments import moment
from billing.reversals import top_up_of

ENDS = {
    "won": Dispute.States.WON,
    "lost": Dispute.States.LOST,
    "warning_closed": Dispute.States.WON,
    "prevented": Dispute.States.WON,
}
"""`warning_closed`: a mere inquiry; `prevented`: it never became a dispute. Any other status is open, again perhaps."""

WON_BEFORE = gettext_noop("Dispute won: back in the wallet")
"""What transactions of earlier versions say, and is still read in every language."""


def apply_dispute(found: Mapping[str, Any], *, livemode: object) -> None:
    """Take in a dispute as the provider has it now: whatever moved since we looked last is booked.

    In the caller's transaction. Raises Quarantined, Parked.
    """
    top_up = top_up_of(found, livemode=livemode)
    amount = found["amount"]
    if not 0 < amount <= top_up.amount_minor:
        raise Quarantined(f"The dispute is of {amount}, the top-up of {top_up.amount_minor}.")
    due = (found.get("evidence_details") or {}).get("due_by")
    row, is_new = Dispute.objects.select_for_update().get_or_create(
        dispute_id=found["id"],
        defaults={
            "top_up": top_up,
            "amount_minor": amount,
            "reason": str(found.get("reason") or "")[:100],
            "opened_at": moment(found.get("created")),
        },
    )
    taken = _follow(row, found, top_up=top_up)
    if is_new or taken:  # a card that is disputed is not charged again while its owner is away
        AutoTopUp.objects.filter(account=top_up.account, is_on=True).update(is_on=False, last_failure="disputed")
    row.evidence_due_at = moment(due) if due else None
    row.state = ENDS.get(str(found.get("status")), Dispute.States.OPEN)
    row.ended_at = (row.ended_at or timezone.now()) if row.state != Dispute.States.OPEN else None
    row.save()


def _follow(row: Dispute, found: Mapping[str, Any], *, top_up: TopUp) -> bool:
    """Book each balance transaction that is not booked yet, oldest first; whether it took any. Raises Quarantined."""
    _adopt(row)
    known = list(row.movements.all())
    seen = {each.balance_transaction for each in known}
    took = False
    moves = [each for each in found.get("balance_transactions") or () if each.get("type") != "stripe_fee"]
    for each in sorted(moves, key=itemgetter("created")):
        if each["id"] in seen:
            continue
        amount = _taken_minor(row, each, currency=top_up.currency)
        unnamed = next((move for move in known if move.is_unnamed and (move.amount_minor > 0) == (amount > 0)), None)
        if unnamed is not None:
            unnamed.balance_transaction = each["id"]
            unnamed.save(update_fields=["balance_transaction"])
            continue
        _book(row, each["id"], amount, top_up=top_up)
        took = took or amount > 0
    row.is_withdrawn = row.is_withdrawn or row.movements.filter(amount_minor__gt=0).exists()
    row.is_reinstated = row.is_withdrawn and not row.withdrawn_minor
    if not 0 <= _withdrawn(row) <= top_up.amount_minor:
        raise Quarantined(f"The dispute has taken {row.withdrawn_minor} of a top-up of {top_up.amount_minor}.")
    if took and known:
        row.mailed_at = None  # it was told of before; that the money is gone again is news
    return took


def _taken_minor(row: Dispute, move: Mapping[str, Any], *, currency: str) -> int:
    """What a balance transaction takes out of the wallet; negative for what it gives back.

    An account at the provider that is kept in another currency moves amounts of that one: then a withdrawal takes the
    disputed amount, as far as it is not taken already, and a return gives back what is taken.
    """
    if str(move.get("currency")).upper() == currency:
        return -int(move["amount"])
    return row.amount_minor - _withdrawn(row) if move["amount"] < 0 else -_withdrawn(row)


def _withdrawn(row: Dispute) -> int:
    return row.withdrawn_minor or 0


def _adopt(row: Dispute) -> None:
    """Write down what the version before has booked, without the provider's ids: it took once, and gave back once."""
    for reference, amount in (
        (f"dispute:{row.dispute_id}", row.amount_minor),
        (f"dispute-won:{row.dispute_id}", -row.amount_minor),
    ):
        booked = Transaction.objects.filter(reference=reference).first()
        if booked and not row.movements.filter(reference=reference).exists():
            row.movements.create(reference=reference, amount_minor=amount, moved_at=booked.created_at)
            row.withdrawn_minor = _withdrawn(row) + amount
    row.withdrawn_minor = _withdrawn(row)


def _book(row: Dispute, balance_transaction: str, amount: int, *, top_up: TopUp) -> None:
    """Move the money of one balance transaction, and write that down."""
    made = DisputeMovement.objects.create(
        dispute=row,
        balance_transaction=balance_transaction,
        reference=f"dispute:{balance_transaction}",
        amount_minor=amount,
    )
    row.withdrawn_minor = _withdrawn(row) + amount
    if amount > 0:
        receivables.take_back(
            account=top_up.account,
            amount_minor=amount,
            reference=made.reference,
            kind="dispute",
            description=gettext_noop("Disputed payment: taken back by the bank"),
        )
    elif amount < 0:
        receivables.pay_in(
            account=top_up.account,
            amount_minor=-amount,
            reference=made.reference,
            kind="dispute",
            description=gettext_noop("Disputed payment: returned by the bank"),
            returns=True,
        )
