"""Automatic top-ups: when less than a threshold is available, the amount is charged to a saved card.

The one rule: never twice. The row of the top-up is written first, one open row for each wallet; its id is the key at
the provider, so a call whose answer was lost is made again as the same call; and the wallet is credited, as always, by
the provider's word alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import F
from django.utils import timezone
from django.utils.translation import gettext as _

from billing import customers, gateway, payments
from billing.errors import (
    AmountRefused,
    CustomerGone,
    NoSavedCard,
    PaymentDeclined,
    PaymentRefused,
    PaymentUnavailable,
)
from billing.models import Account, AutoTopUp, PaymentCustomer, TopUp
from billing.wording import money
from console.accounts.models import ServiceActivation, User

MOST_FAILURES = 3
"""In a row; then it is switched off until a person switches it on again."""
WAITS = (timedelta(hours=1), timedelta(hours=12))
"""After the first failure and the second: the same card, asked again at once, would say the same."""
MOST_A_DAY = 5
"""Payments of one wallet in 24 hours: money that runs out faster is a person's to look at."""
ENDED = ServiceActivation.objects.filter(deactivated_at__isnull=False)
"""Who may buy nothing is not charged for it: a standing order rests until the service is active again."""
FINAL = {customers.GONE, "card_gone"}
"""Failures that no second try can mend: the standing order is switched off at once."""
WORTH_TRYING = timedelta(hours=12)
"""A charge that nobody could make for so long is given up."""


def switch_on(*, account: Account, threshold_minor: int, amount_minor: int, method_id: str, user: User) -> AutoTopUp:
    """Top up by `amount_minor` from a saved card whenever less than `threshold_minor` is available.

    Raises AmountRefused (its field), NoSavedCard, PaymentUnavailable, PaymentRefused.
    """
    payments.require_amount(account, amount_minor, field="amount_minor")
    if not 0 < threshold_minor <= amount_minor * 10:
        sentence = _("Give a threshold between %(least)s and %(most)s, ten times the amount.") % {
            "least": money(1, account.currency),
            "most": money(amount_minor * 10, account.currency),
        }
        raise AmountRefused(sentence, fields={"threshold_minor": sentence})
    if account.organization is None:
        raise ValueError("Only an organization's wallet is topped up.")
    card = customers.card_named(account.organization, method_id)
    setup, _made = AutoTopUp.objects.update_or_create(
        account=account,
        defaults={
            "is_on": True,
            "threshold_minor": threshold_minor,
            "amount_minor": amount_minor,
            "method_id": card.method_id,
            "method_label": card.label,
            "failures": 0,
            "last_failure": "",
            "retry_at": None,
            "mailed_at": None,
            "set_by": user,
        },
    )
    return setup


def switch_off(*, account: Account) -> None:
    """No more automatic top-ups; one that is under way comes in."""
    AutoTopUp.objects.filter(account=account).update(is_on=False)


def sweep() -> int:
    """Begin what is due, and make every charge whose answer was lost again. Gives how many charges were asked for."""
    due = (
        AutoTopUp.objects.filter(is_on=True, account__posted_minor__lt=F("account__held_minor") + F("threshold_minor"))
        .exclude(account__organization__activations__in=ENDED)
        .values_list("pk", flat=True)
    )
    fresh = {row.pk for pk in due if (row := begin(setup_pk=pk)) is not None}
    waiting = TopUp.objects.filter(origin=TopUp.Origins.AUTOMATIC, state=TopUp.States.CREATED)
    rows = list(waiting.select_related("account__organization")[:100])
    for row in rows:
        charge(top_up=row, again=row.pk not in fresh)
    return len(rows)


def begin(*, setup_pk: int) -> TopUp | None:
    """Write the row of an automatic top-up, if one is due; None where none is."""
    now = timezone.now()
    try:
        with transaction.atomic():
            setup = AutoTopUp.objects.select_for_update(of=("self",)).select_related("account").get(pk=setup_pk)
            account = setup.account
            lately = TopUp.objects.filter(
                account=account, origin=TopUp.Origins.AUTOMATIC, created_at__gt=now - timedelta(days=1)
            )
            if (
                not setup.is_on
                or account.available_minor >= setup.threshold_minor
                or (setup.retry_at is not None and setup.retry_at > now)
                or lately.count() >= MOST_A_DAY
                or lately.filter(state__in=payments.OPEN).exists()
                or ENDED.filter(organization=account.organization_id).exists()
            ):
                return None
            return TopUp.objects.create(
                account=account,
                amount_minor=setup.amount_minor,
                currency=account.currency,
                origin=TopUp.Origins.AUTOMATIC,
                method_id=setup.method_id,
                created_by_id=setup.set_by_id,
            )
    except IntegrityError as error:
        if "one_automatic_top_up_at_a_time" not in str(error):
            raise
        return None


def charge(*, top_up: TopUp, again: bool = True) -> None:
    """Ask the provider for the money of a row. Safe to repeat: the same row is the same charge.

    `again`: an earlier call may have arrived though its answer did not. Idempotency keys are forgotten after a day, by
    the provider's clock, so it is asked first.
    """
    customer = PaymentCustomer.objects.filter(
        organization=top_up.account.organization_id, mode=gateway.mode()
    ).first()  # fmt: skip
    theirs = customer.customer_id if customer else ""
    if not theirs:  # should an earlier call have arrived, its event credits the row all the same
        _fail(top_up, customers.GONE)
        return
    try:
        made = gateway.charge_with(reference=str(top_up.pk), customer=theirs) if again else None
        if made is None and top_up.created_at < timezone.now() - WORTH_TRYING:
            _fail(top_up, "unanswered")
            return
        made = made or gateway.charge_card(
            reference=str(top_up.pk),
            customer=theirs,
            method_id=top_up.method_id,
            amount_minor=top_up.amount_minor,
            currency=top_up.currency,
            title="Trainyard",
        )
    except PaymentUnavailable:
        return
    except PaymentDeclined as error:
        _fail(top_up, error.reason)
        return
    except CustomerGone:
        customers.forget(theirs)
        _fail(top_up, customers.GONE)
        return
    except PaymentRefused:
        _fail(top_up, _why_refused(top_up))
        return
    TopUp.objects.filter(pk=top_up.pk, state=TopUp.States.CREATED).update(
        state=TopUp.States.PENDING, payment_intent=made.id
    )


def apply_intent(intent: Mapping[str, Any], *, livemode: object, at: object = None) -> bool:
    """Take in what a payment intent says of its automatic top-up. False for the intent of a payment page.

    In the caller's transaction. `at` is the Unix time of the proof. Raises Quarantined where it is not our row's.
    """
    reference = (intent.get("metadata") or {}).get("top_up")
    if reference is None:
        return False
    top_up = payments.locked_top_up(reference)
    if top_up.origin != TopUp.Origins.AUTOMATIC:
        return False
    if intent.get("status") == "succeeded":
        payments.require_match(
            {
                "livemode": (livemode, gateway.is_live()),
                "amount_received": (intent.get("amount_received"), top_up.amount_minor),
                "currency": (str(intent.get("currency")).upper(), top_up.currency),
                "payment_intent": (intent.get("id"), top_up.payment_intent or intent.get("id")),
            }
        )
        AutoTopUp.objects.filter(account=top_up.account).update(failures=0, last_failure="", retry_at=None)
        payments.credit_top_up(top_up, intent=intent.get("id"), at=at)
    elif intent.get("status") in {"requires_payment_method", "canceled"}:
        error = intent.get("last_payment_error") or {}
        _fail(top_up, str(error.get("decline_code") or error.get("code") or "failed"))
    return True


def _why_refused(top_up: TopUp) -> str:
    """The provider refuses a card that was removed at its own pages, as it does much else."""
    if top_up.account.organization is None:
        raise ValueError("Only an organization's wallet is topped up.")
    try:
        customers.card_named(top_up.account.organization, top_up.method_id)
    except NoSavedCard:
        return "card_gone"
    except (PaymentUnavailable, PaymentRefused):
        return "refused"
    return "refused"


@transaction.atomic
def _fail(top_up: TopUp, reason: str) -> None:
    """A charge that did not come: counted once for its row, and the last of several switches the setup off."""
    failed = TopUp.objects.filter(pk=top_up.pk, state__in=payments.OPEN).update(
        state=TopUp.States.FAILED, failure=reason[:100]
    )
    if not failed:
        return
    setup = AutoTopUp.objects.select_for_update().get(account=top_up.account_id)
    setup.failures += 1
    setup.last_failure = reason[:100]
    setup.is_on = setup.is_on and setup.failures < MOST_FAILURES and reason not in FINAL
    setup.retry_at = timezone.now() + WAITS[min(setup.failures, len(WAITS)) - 1]
    setup.save(update_fields=["failures", "last_failure", "is_on", "retry_at", "updated_at"])
