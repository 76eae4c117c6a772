"""Refunds of top-ups, made here or in the provider's dashboard.

A refund debits the wallet before the provider is called, so the money cannot be spent meanwhile. `apply_refund` gives
our row the current state of the provider's refund, so events may arrive twice, late or in any order. The amount of a
failed refund returns to the wallet. See `billing.disputes` for chargebacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import BigIntegerField, Case, F, Sum, Value, When
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from billing import credit, currencies, gateway, receivables
from billing.amounts import money
from billing.errors import Parked, PaymentRefused, PaymentUnavailable, Quarantined, RefundRefused
from billing.models import Account, AutoTopUp, Refund, TopUp
from billing.payments import step_sentence
from console.accounts.models import User
from console.accounts.services import record_audit_event

MAX_FAILURES = 3
"""Failed refunds of a top-up after which `pay_back` stops trying: the card probably no longer exists, so a person must
decide."""
RETRY_AFTER = timedelta(days=1)
"""How long `pay_back` waits after a failed refund. An earlier retry would fail for the same reason."""
MAX_SUBMITTED = 100
"""Most refunds per call of `submit_waiting`, so that a slow provider occupies the worker for a bounded time."""
STATE_BY_STATUS = {
    "succeeded": Refund.States.SUCCEEDED,
    "pending": Refund.States.PENDING,
    "requires_action": Refund.States.PENDING,
    "failed": Refund.States.FAILED,
    "canceled": Refund.States.FAILED,
}
"""Our state for each status of a refund at the provider."""

WITHDRAWN_MINOR = Case(
    When(withdrawn_minor__isnull=False, then=F("withdrawn_minor")),
    When(is_withdrawn=True, is_reinstated=False, then=F("amount_minor")),
    default=Value(0),
    output_field=BigIntegerField(),
)
"""SQL expression: the amount that a dispute withdrew. Rows of version 0.1 have flags instead of `withdrawn_minor`."""


def refundable_minor(top_up: TopUp) -> int:
    """Return the part of a top-up that was neither refunded nor disputed, in minor units; 0 if it was not paid."""
    if top_up.state != TopUp.States.PAID:
        return 0
    disputed = top_up.disputes.aggregate(total=Sum(WITHDRAWN_MINOR, default=0))
    # A bank may take back a payment that was already refunded in part: the difference must not be negative.
    return max(0, _unrefunded_minor(top_up) - int(disputed["total"]))


def _unrefunded_minor(top_up: TopUp) -> int:
    """Return the part of a top-up that was not refunded, disputed or not, in minor units."""
    refunded = top_up.refunds.exclude(state=Refund.States.FAILED).aggregate(total=Sum("amount_minor", default=0))
    return top_up.amount_minor - int(refunded["total"])


def refund(*, top_up: TopUp, amount_minor: int, reason: str, user: User, key: UUID | None = None) -> Refund:
    """Refund a part of a top-up: debit the wallet now, then call the provider.

    `key` becomes the refund's id, so that a form that is submitted twice refunds once. `user` is the administrator. If
    the provider does not answer, a periodic task retries. Raises RefundRefused (field amount_minor).
    """
    with transaction.atomic():
        locked = TopUp.objects.select_for_update(of=("self",)).select_related("account").get(pk=top_up.pk)
        if key and (repeated := Refund.objects.filter(pk=key, top_up=locked).first()):
            return repeated
        refundable = refundable_minor(locked)
        if not 1 <= amount_minor <= refundable:
            sentence = _("The amount must be at most %(left)s, the rest of this top-up.") % {
                "left": money(refundable, locked.currency)
            }
            raise RefundRefused(sentence, fields={"amount_minor": sentence})
        if amount_minor % currencies.step(locked.currency):
            sentence = step_sentence(locked.currency)
            raise RefundRefused(sentence, fields={"amount_minor": sentence})
        row = _create(pk=key or uuid4(), top_up=locked, amount_minor=amount_minor, reason=reason, requested_by=user)
    submit(refund=row, is_retry=False)
    row.refresh_from_db()
    return row


def pay_back(*, account: Account, reason: str) -> list[Refund]:
    """Refund the unspent paid-in money, the newest top-ups first, and return the refunds. Safe to repeat.

    Credit stays. One transaction locks the top-ups and the wallet, creates the refunds and debits the wallet. A
    repeated or concurrent call therefore refunds only what is left. A top-up whose refund failed is tried again after
    RETRY_AFTER. After MAX_FAILURES its money stays in the wallet, for an administrator to decide.
    """
    rows = []
    with transaction.atomic():
        paid = TopUp.objects.select_for_update(of=("self",)).filter(account=account, state=TopUp.States.PAID)
        # Locked in the order of pk, so that two calls cannot deadlock. The provider can only refund a payment intent.
        top_ups = list(paid.exclude(payment_intent="").select_related("account").order_by("pk"))
        left = credit.paid_minor(Account.objects.select_for_update(no_key=True).get(pk=account.pk))
        for top_up in sorted(top_ups, key=lambda top_up: top_up.paid_at or top_up.created_at, reverse=True):
            amount = min(left, refundable_minor(top_up)) if not _is_paused(top_up) else 0
            amount -= amount % currencies.step(top_up.currency)
            if amount > 0:
                rows.append(_create(top_up=top_up, amount_minor=amount, reason=reason))
                left -= amount
    for row in rows:
        submit(refund=row, is_retry=False)
        row.refresh_from_db()
    return rows


def _is_paused(top_up: TopUp) -> bool:
    """Return whether refunds of the top-up failed too recently or too often to try another."""
    failed = top_up.refunds.filter(state=Refund.States.FAILED)
    return failed.count() >= MAX_FAILURES or failed.filter(ended_at__gt=timezone.now() - RETRY_AFTER).exists()


def submit(*, refund: Refund, is_retry: bool = True) -> None:
    """Create the refund at the provider. Safe to repeat: it never refunds twice.

    `is_retry` means that an earlier call may have succeeded although its answer was lost. Idempotency keys protect for
    a day only, so a retry first looks for the earlier refund at the provider.
    """
    reference, intent_id = str(refund.pk), refund.top_up.payment_intent
    try:
        submitted = gateway.find_refund(reference=reference, payment_intent_id=intent_id) if is_retry else None
        submitted = submitted or gateway.refund(
            reference=reference, payment_intent_id=intent_id, amount_minor=refund.amount_minor
        )
    except PaymentUnavailable:
        return  # the next call of `submit_waiting` retries
    except PaymentRefused as error:
        with transaction.atomic():
            _set_state(_locked_refund(refund.pk), Refund.States.FAILED, failure=error.reason)
        return
    with transaction.atomic():
        row = _locked_refund(refund.pk)
        _set_state(row, STATE_BY_STATUS.get(submitted.status, Refund.States.PENDING), refund_id=submitted.id)


def submit_waiting() -> int:
    """Submit the refunds that the provider has not confirmed: the oldest first, at most MAX_SUBMITTED.

    Returns their number.
    """
    waiting = Refund.objects.filter(state=Refund.States.CREATED).select_related("top_up").order_by("created_at")
    oldest = list(waiting[:MAX_SUBMITTED])
    for row in oldest:
        submit(refund=row)
    return len(oldest)


def apply_refund(refund_object: Mapping[str, Any], *, livemode: object) -> None:
    """Apply the current state of a refund, which was made here or in the provider's dashboard.

    Call it in a transaction. Raises Quarantined if the refund contradicts our rows, Parked if it must wait for another
    event.
    """
    top_up = find_top_up(refund_object, livemode=livemode)
    reference = (refund_object.get("metadata") or {}).get("refund")
    row = _find_refund(str(refund_object["id"]), reference)
    state = STATE_BY_STATUS.get(str(refund_object.get("status")), Refund.States.PENDING)
    if row is None and state == Refund.States.FAILED:
        return  # the refund was created and failed before its first event arrived, so nothing was debited
    if row is None:
        # The provider has already made this refund, perhaps before the bank withdrew the payment in a dispute. So
        # disputed amounts do not limit the refund.
        if refund_object["amount"] > _unrefunded_minor(top_up):
            # An earlier refund may have failed, and the event that frees its amount may still arrive.
            raise Parked(f"The refund of {refund_object['amount']} exceeds the known refundable rest of the top-up.")
        row = _create(
            top_up=top_up,
            amount_minor=refund_object["amount"],
            reason=_("Refunded at the payment provider"),
            refund_id=refund_object["id"],
            state=Refund.States.PENDING,
        )
    elif (row.top_up_id, row.amount_minor) != (top_up.pk, refund_object["amount"]):
        raise Quarantined(
            f"Refund {row.pk} of {row.amount_minor} differs from the provider's ({refund_object['amount']})."
        )
    failure = str(refund_object.get("failure_reason") or "")
    _set_state(row, state, refund_id=str(refund_object["id"]), failure=failure)


def _create(**columns: Any) -> Refund:
    """Store a refund, debit the wallet and record it in the audit log.

    Automatic top-ups are switched off, because they would charge the refunded amount again.
    """
    row = Refund.objects.create(**columns)
    receivables.withdraw(
        account=row.top_up.account,
        amount_minor=row.amount_minor,
        reference=f"refund:{row.pk}",
        kind="refund",
        description=gettext_noop("Refund of a top-up"),
    )
    AutoTopUp.objects.filter(account=row.top_up.account, is_on=True).update(is_on=False, last_failure="refunded")
    record_audit_event(
        organization=row.top_up.account.organization,
        actor=row.requested_by,
        action="refund.started",
        target=f"refund:{row.pk}",
        data={"amount_minor": row.amount_minor, "currency": row.top_up.currency, "reason": row.reason},
    )
    return row


def _set_state(row: Refund, state: Refund.States, *, refund_id: str | None = None, failure: str = "") -> None:
    """Change the state of a refund. FAILED returns the money to the wallet and is final.

    A refund that succeeded can only fail. Any other state is older: it was read before the refund succeeded.
    `refund_id` is the provider's id, None if it is not known. A row that already has an id keeps it.
    """
    if row.state == Refund.States.FAILED or (row.state == Refund.States.SUCCEEDED and state != Refund.States.FAILED):
        return
    if state == Refund.States.FAILED:
        receivables.pay_in(
            account=row.top_up.account,
            amount_minor=row.amount_minor,
            reference=f"refund-failed:{row.pk}",
            kind="refund",
            description=gettext_noop("Failed refund: returned to the wallet"),
            is_return=True,
        )
    row.refund_id = row.refund_id or refund_id
    row.state = state
    row.failure = failure[:100]  # the column's length
    row.ended_at = timezone.now() if state in {Refund.States.SUCCEEDED, Refund.States.FAILED} else None
    row.save(update_fields=["refund_id", "state", "failure", "ended_at"])


def _locked_refund(pk: UUID) -> Refund:
    """Return the refund, locked together with its top-up."""
    # Lock order everywhere: the top-up before its refunds.
    TopUp.objects.select_for_update(of=("self",)).get(refunds=pk)
    return Refund.objects.select_for_update(of=("self",)).select_related("top_up__account").get(pk=pk)


def _find_refund(refund_id: str, reference: object) -> Refund | None:
    """Return our row, locked: by the provider's id, or by our reference if the row has no such id yet. Or None."""
    rows = Refund.objects.select_for_update(of=("self",)).select_related("top_up__account")
    if row := rows.filter(refund_id=refund_id).first():
        return row
    try:
        # A failed row has returned its money to the wallet. If the provider did create that refund after all, the
        # refund needs a new row and a new debit.
        unconfirmed = rows.filter(refund_id=None).exclude(state=Refund.States.FAILED)
        return unconfirmed.filter(pk=str(reference)).first() if reference else None
    except (ValidationError, ValueError):
        return None


def find_top_up(stripe_object: Mapping[str, Any], *, livemode: object) -> TopUp:
    """Return the top-up that a refund or dispute belongs to, locked. Raises Quarantined, Parked."""
    if livemode != gateway.is_live():
        raise Quarantined(f"livemode is {livemode!r}, not {gateway.is_live()!r}")
    intent_id = str(stripe_object.get("payment_intent") or "")
    top_ups = TopUp.objects.select_for_update(of=("self",)).select_related("account")
    top_up = top_ups.filter(payment_intent=intent_id).first() if intent_id else None
    if top_up is None:
        raise Parked("No top-up has this payment intent yet.")
    if str(stripe_object.get("currency")).upper() != top_up.currency:
        raise Quarantined(f"currency is {stripe_object.get('currency')!r}, not {top_up.currency!r}")
    return top_up
