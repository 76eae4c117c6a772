"""Money that administrators give back: refunds, ours and those made at the provider's own pages.

The one rule: what the ledger does follows from the object as the provider has it now, and is keyed on our row of it; so
events may come twice, late, or in any order. What was taken from the wallet for a refund that failed comes back the
same way as any payment. `billing.disputes` is about money that a bank takes back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID, uuid4

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import BigIntegerField, Case, F, Sum, Value, When
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from billing import currencies, gateway, receivables
from billing.errors import Parked, PaymentRefused, PaymentUnavailable, Quarantined, RefundRefused
from billing.models import AutoTopUp, Refund, TopUp
from billing.payments import step_sentence
from billing.wording import money
from console.accounts.models import User

STATES = {
    "succeeded": Refund.States.SUCCEEDED,
    "pending": Refund.States.PENDING,
    "requires_action": Refund.States.PENDING,
    "failed": Refund.States.FAILED,
    "canceled": Refund.States.FAILED,
}

WITHDRAWN = Case(
    When(withdrawn_minor__isnull=False, then=F("withdrawn_minor")),
    When(is_withdrawn=True, is_reinstated=False, then=F("amount_minor")),
    default=Value(0),
    output_field=BigIntegerField(),
)
"""What a dispute has taken, be it one that only the version before has seen."""


def refundable_minor(top_up: TopUp) -> int:
    """What of a top-up has not gone back yet, by refund or dispute."""
    if top_up.state != TopUp.States.PAID:
        return 0
    refunds = top_up.refunds.exclude(state=Refund.States.FAILED).aggregate(total=Sum("amount_minor"))
    disputes = top_up.disputes.aggregate(total=Sum(WITHDRAWN))
    # A bank may take back what was refunded in part before: then nothing is left, and no less.
    return max(0, top_up.amount_minor - int(refunds["total"] or 0) - int(disputes["total"] or 0))


def refund(*, top_up: TopUp, amount_minor: int, reason: str, user: User, key: UUID | None = None) -> Refund:
    """Pay a part of a top-up back the way it came: out of the wallet now, then told to the provider.

    The same `key` again is the same refund. A provider that does not answer is told again by the sweep. Raises
    RefundRefused (field amount_minor).
    """
    with transaction.atomic():
        locked = TopUp.objects.select_for_update(of=("self",)).select_related("account").get(pk=top_up.pk)
        if key and (known := Refund.objects.filter(pk=key, top_up=locked).first()):
            return known
        left = refundable_minor(locked)
        if not 1 <= amount_minor <= left:
            sentence = _("At most %(left)s of this top-up can be paid back.") % {"left": money(left, locked.currency)}
            raise RefundRefused(sentence, fields={"amount_minor": sentence})
        if amount_minor % currencies.step(locked.currency):
            sentence = step_sentence(locked.currency)
            raise RefundRefused(sentence, fields={"amount_minor": sentence})
        made = Refund.objects.create(
            pk=key or uuid4(), top_up=locked, amount_minor=amount_minor, reason=reason, requested_by=user
        )
        _take_for(made)
    tell(refund=made, again=False)
    made.refresh_from_db()
    return made


def tell(*, refund: Refund, again: bool = True) -> None:
    """Ask the provider for a refund that it may not have heard of. Safe to repeat; never pays back twice.

    `again`: an earlier call may have arrived though its answer did not. Idempotency keys are forgotten after a day, by
    the provider's clock, so it is asked first.
    """
    reference, intent = str(refund.pk), refund.top_up.payment_intent
    try:
        made = gateway.refund_with(reference=reference, payment_intent=intent) if again else None
        made = made or gateway.refund(reference=reference, payment_intent=intent, amount_minor=refund.amount_minor)
    except PaymentUnavailable:
        return
    except PaymentRefused as error:
        with transaction.atomic():
            _set_state(_locked_refund(refund.pk), Refund.States.FAILED, failure=error.reason)
        return
    with transaction.atomic():
        row = _locked_refund(refund.pk)
        row.refund_id = row.refund_id or made.id
        _set_state(row, STATES.get(made.status, Refund.States.PENDING))


def tell_waiting() -> int:
    """Tell the provider of every refund it has not heard of. Gives how many there were."""
    waiting = Refund.objects.filter(state=Refund.States.CREATED).select_related("top_up")[:100]
    for row in waiting:
        tell(refund=row)
    return len(waiting)


def apply_refund(found: Mapping[str, Any], *, livemode: object) -> None:
    """Take in a refund as the provider has it now, be it ours or one made at the provider's own pages.

    In the caller's transaction. Raises Quarantined, Parked.
    """
    top_up = top_up_of(found, livemode=livemode)
    reference = (found.get("metadata") or {}).get("refund")
    row = _refund_with(str(found["id"]), reference)
    state = STATES.get(str(found.get("status")), Refund.States.PENDING)
    if row is None and state == Refund.States.FAILED:
        return  # made and failed before we heard of it: nothing was taken, so nothing comes back
    if row is None:
        if found["amount"] > refundable_minor(top_up):
            # It is left once what we have not heard of yet is told: a dispute that was won, another refund that failed.
            raise Parked(f"More is paid back ({found['amount']}) than is left of the top-up, as far as is known here.")
        row = Refund.objects.create(
            top_up=top_up,
            amount_minor=found["amount"],
            reason=_("Made at the payment provider"),
            refund_id=found["id"],
            state=Refund.States.PENDING,
        )
        _take_for(row)
    elif (row.top_up_id, row.amount_minor) != (top_up.pk, found["amount"]):
        raise Quarantined(f"Refund {row.pk} is of {row.amount_minor}, this one of {found['amount']}, or of another.")
    row.refund_id = row.refund_id or str(found["id"])
    _set_state(row, state, failure=str(found.get("failure_reason") or ""))


def _take_for(row: Refund) -> None:
    # What is paid back must not be charged again by a standing order a minute later.
    AutoTopUp.objects.filter(account=row.top_up.account, is_on=True).update(is_on=False, last_failure="refunded")
    receivables.take_back(
        account=row.top_up.account,
        amount_minor=row.amount_minor,
        reference=f"refund:{row.pk}",
        kind="refund",
        description=gettext_noop("Refund of a top-up"),
    )


def _set_state(row: Refund, state: Refund.States, *, failure: str = "") -> None:
    """The one way a refund changes; failing gives the money back, and is final."""
    if row.state == Refund.States.FAILED:
        return
    if state == Refund.States.FAILED:
        receivables.pay_in(
            account=row.top_up.account,
            amount_minor=row.amount_minor,
            reference=f"refund-failed:{row.pk}",
            kind="refund",
            description=gettext_noop("Refund that failed: back in the wallet"),
            returns=True,
        )
    row.state = state
    row.failure = failure[:100]
    row.ended_at = timezone.now() if state in {Refund.States.SUCCEEDED, Refund.States.FAILED} else None
    row.save(update_fields=["refund_id", "state", "failure", "ended_at"])


def _locked_refund(pk: UUID) -> Refund:
    # Locks go from the top-up to what is of it, here as everywhere.
    TopUp.objects.select_for_update(of=("self",)).get(refunds=pk)
    return Refund.objects.select_for_update(of=("self",)).select_related("top_up__account").get(pk=pk)


def _refund_with(refund_id: str, reference: object) -> Refund | None:
    rows = Refund.objects.select_for_update(of=("self",)).select_related("top_up__account")
    if row := rows.filter(refund_id=refund_id).first():
        return row
    try:
        # A failed row has given its money back: should the provider have made its refund after all, that is another.
        unheard = rows.filter(refund_id=None).exclude(state=Refund.States.FAILED)
        return unheard.filter(pk=str(reference)).first() if reference else None
    except (ValidationError, ValueError):
        return None


def top_up_of(found: Mapping[str, Any], *, livemode: object) -> TopUp:
    """The paid top-up whose payment this is about, locked. Raises Quarantined, Parked."""
    if livemode != gateway.is_live():
        raise Quarantined(f"livemode is {livemode!r}, not {gateway.is_live()!r}")
    intent = str(found.get("payment_intent") or "")
    top_up = (
        TopUp.objects.select_for_update(of=("self",)).select_related("account").filter(payment_intent=intent).first()
        if intent
        else None
    )
    if top_up is None:
        raise Parked("The payment it is about is not (yet) a top-up of ours.")
    if str(found.get("currency")).upper() != top_up.currency:
        raise Quarantined(f"currency is {found.get('currency')!r}, not {top_up.currency!r}")
    return top_up
