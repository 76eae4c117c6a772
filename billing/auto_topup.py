"""Automatic top-ups: charge a saved card when the wallet falls below a threshold.

A card is never charged twice for the same top-up. The top-up's row is written before the provider is called. The row's
id is the idempotency key, so a call without an answer is repeated safely. A wallet has at most one open automatic
top-up. As with every top-up, the wallet is credited only when the provider reports the payment.

In this module, `setup` is the row with the settings of a wallet's automatic top-ups.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.db.models import F
from django.utils import timezone
from django.utils.translation import gettext as _

from billing import customers, gateway, payments
from billing.amounts import money
from billing.errors import (
    AmountRefused,
    CustomerGone,
    NoSavedCard,
    PaymentDeclined,
    PaymentRefused,
    PaymentUnavailable,
)
from billing.models import Account, AutoTopUp, PaymentCustomer, TopUp
from console.accounts import services
from console.accounts.models import ServiceActivation, User

MAX_FAILURES = 3
"""Failures in a row after which automatic top-ups are switched off; a person must switch them on again."""
RETRY_DELAYS = (timedelta(hours=1), timedelta(hours=12))
"""Delays after the first and the second failure. They give the customer time to fund the card; an immediate retry would
be declined again."""
MAX_THRESHOLD_RATIO = 10
"""Largest threshold as a multiple of the top-up amount. Top-ups are repeated until the wallet reaches the threshold, so
a mistyped threshold could cost many of them."""
MAX_PER_DAY = 5
"""Largest number of automatic top-ups of a wallet in 24 hours. Faster spending may be a mistake, such as a loop that
orders runs, so a person must then top up."""
ENDED_ACTIVATIONS = ServiceActivation.objects.filter(deactivated_at__isnull=False)
"""Activations that have ended, because the organization gave up the training service. Such an organization cannot buy
anything, so its card is not charged. If it activates the service again, `deactivated_at` is cleared."""
CARD_GONE = "card_gone"
"""Failure code of a charge whose saved card was deleted at the provider."""
PERMANENT_FAILURES = {customers.CUSTOMER_GONE, CARD_GONE}
"""Failures that a retry cannot fix: automatic top-ups are switched off at once."""
GIVE_UP_AFTER = timedelta(hours=12)
"""Age after which a top-up fails if the provider has no charge for it. Stripe keeps idempotency keys for at least a
day; a call with a forgotten key could charge twice. Half a day leaves a safe margin."""
MAX_CHARGES = 100
"""Most charges per call of `run_due`, made one after the other. The same task submits refunds afterwards, and a slow
provider must not delay them for long."""


def switch_on(*, account: Account, threshold_minor: int, amount_minor: int, method_id: str, user: User) -> AutoTopUp:
    """Charge `amount_minor` to the saved card `method_id` whenever less than `threshold_minor` is available.

    `user` is the member who decides this. Raises AmountRefused (with its field), NoSavedCard, OrganizationClosing,
    PaymentUnavailable, PaymentRefused.
    """
    services.require_open(organization=account.owner)
    payments.require_amount(account, amount_minor, field="amount_minor")
    most_minor = amount_minor * MAX_THRESHOLD_RATIO
    if not 0 < threshold_minor <= most_minor:
        sentence = _("The threshold must be between %(least)s and %(most)s (ten times the top-up amount).") % {
            "least": money(1, account.currency),
            "most": money(most_minor, account.currency),
        }
        raise AmountRefused(sentence, fields={"threshold_minor": sentence})
    card = customers.get_card(account.owner, method_id)
    setup, _created = AutoTopUp.objects.update_or_create(
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
    """Stop automatic top-ups. A charge in progress is still credited."""
    AutoTopUp.objects.filter(account=account).update(is_on=False)


def run_due() -> int:
    """Start the top-ups that are due, and repeat charges without an answer. Returns the number of charges attempted.

    The oldest top-ups are charged first, so that each is charged even if there are always more than MAX_CHARGES.
    """
    due_setups = (
        AutoTopUp.objects.filter(is_on=True, account__posted_minor__lt=F("account__held_minor") + F("threshold_minor"))
        .exclude(account__organization__activations__in=ENDED_ACTIVATIONS)
        .values_list("pk", flat=True)
    )
    new_ids = set()
    for setup_pk in due_setups:
        top_up = create_if_due(setup_pk=setup_pk)
        if top_up is not None:
            new_ids.add(top_up.pk)
    unanswered = TopUp.objects.filter(origin=TopUp.Origins.AUTOMATIC, state=TopUp.States.CREATED)
    oldest = list(unanswered.select_related("account__organization").order_by("created_at")[:MAX_CHARGES])
    for waiting in oldest:
        # Only a top-up of an earlier call may have been charged already, without an answer.
        charge(top_up=waiting, is_retry=waiting.pk not in new_ids)
    return len(oldest)


def create_if_due(*, setup_pk: int) -> TopUp | None:
    """Create a top-up if the wallet is below its threshold and no rule forbids a charge now. Returns None otherwise."""
    now = timezone.now()
    with transaction.atomic():
        setup = AutoTopUp.objects.select_for_update(of=("self",)).select_related("account").get(pk=setup_pk)
        account = setup.account
        earlier_top_ups = TopUp.objects.filter(account=account, origin=TopUp.Origins.AUTOMATIC)
        if (
            not setup.is_on
            or account.available_minor >= setup.threshold_minor
            or (setup.retry_at is not None and setup.retry_at > now)
            or earlier_top_ups.filter(created_at__gt=now - timedelta(days=1)).count() >= MAX_PER_DAY
            # An open top-up of any age: a constraint would refuse a second one. Checked before the insert: while
            # another transaction closes the open one, the insert would wait for that transaction. That transaction
            # itself waits for the lock of `setup` that is held here: a deadlock.
            or earlier_top_ups.filter(state__in=payments.OPEN_STATES).exists()
            or ENDED_ACTIVATIONS.filter(organization=account.organization_id).exists()
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


def charge(*, top_up: TopUp, is_retry: bool = True) -> None:
    """Charge a top-up to its saved card. Safe to repeat: one row is charged at most once.

    `is_retry` means that an earlier call may have succeeded although its answer was lost. Idempotency keys protect for
    a day only, so a retry first looks for the earlier charge at the provider.
    """
    customer_rows = PaymentCustomer.objects.filter(organization=top_up.account.organization_id, mode=gateway.mode())
    customer_id = customer_rows.values_list("customer_id", flat=True).first() or ""
    if not customer_id:
        # The customer was deleted at the provider. If an earlier call did charge the card, the provider's event still
        # credits this row.
        _fail(top_up, customers.CUSTOMER_GONE)
        return
    try:
        intent = gateway.find_charge(reference=str(top_up.pk), customer_id=customer_id) if is_retry else None
        if intent is None and _gives_up(top_up):
            return
        intent = intent or gateway.charge_card(
            reference=str(top_up.pk),
            customer_id=customer_id,
            method_id=top_up.method_id,
            amount_minor=top_up.amount_minor,
            currency=top_up.currency,
            title="Trainyard",  # not the brand, which may change: Stripe refuses a repeated key with other parameters
        )
    except PaymentUnavailable:
        return  # the next call of `run_due` retries
    except PaymentDeclined as error:
        _fail(top_up, error.reason)
        return
    except CustomerGone:
        customers.forget(customer_id)
        _fail(top_up, customers.CUSTOMER_GONE)
        return
    except PaymentRefused:
        _fail(top_up, _refusal_code(top_up))
        return
    TopUp.objects.filter(pk=top_up.pk, state=TopUp.States.CREATED).update(
        state=TopUp.States.PENDING, payment_intent=intent.id
    )


def _gives_up(top_up: TopUp) -> bool:
    """Close a top-up that has no charge at the provider if the top-up is too old, or if automatic top-ups are off now.

    Return whether it was closed.
    """
    if top_up.created_at < timezone.now() - GIVE_UP_AFTER:
        _fail(top_up, "unanswered")
        return True
    is_on = AutoTopUp.objects.filter(account=top_up.account, is_on=True).exists()
    if is_on and not ENDED_ACTIVATIONS.filter(organization=top_up.account.organization_id).exists():
        return False
    # Not `_fail`, which would replace the reason why automatic top-ups are off. `mailed_at` is set so that no email
    # about this top-up is sent.
    TopUp.objects.filter(pk=top_up.pk, state=TopUp.States.CREATED).update(
        state=TopUp.States.FAILED, failure="unanswered", mailed_at=timezone.now()
    )
    return True


def apply_intent(intent: Mapping[str, Any], *, livemode: object, at: object = None) -> bool:
    """Apply the state of a payment intent to its automatic top-up.

    Returns False if the intent does not belong to an automatic top-up, but for example to a payment page. Call it in a
    transaction. `livemode` (whether real money moved) and `at` (Unix time) come unchecked from the provider. Raises
    Quarantined if the intent does not match the top-up's row. The event then waits for an administrator.
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
                # The event can arrive before our row has the intent's id.
                "payment_intent": (intent.get("id"), top_up.payment_intent or intent.get("id")),
            }
        )
        # Only the first report of a payment, because later ones must not clear newer failures.
        if payments.credit_top_up(top_up, intent=intent.get("id"), at=at):
            AutoTopUp.objects.filter(account=top_up.account).update(failures=0, last_failure="", retry_at=None)
    elif intent.get("status") in {"requires_payment_method", "canceled"}:
        error = intent.get("last_payment_error") or {}
        _fail(top_up, str(error.get("decline_code") or error.get("code") or "failed"))
    return True


def _refusal_code(top_up: TopUp) -> str:
    """Return `card_gone` if the card was deleted in the provider's dashboard, otherwise `refused`."""
    try:
        customers.get_card(top_up.account.owner, top_up.method_id)
    except NoSavedCard:
        return CARD_GONE
    except (PaymentUnavailable, PaymentRefused):
        return "refused"
    return "refused"


@transaction.atomic
def _fail(top_up: TopUp, reason: str) -> None:
    """Mark an open top-up as failed, and plan the retry or switch automatic top-ups off.

    A top-up that is no longer open stays as it is.
    """
    reason = reason[:100]  # the length of the columns
    failed = TopUp.objects.filter(pk=top_up.pk, state__in=payments.OPEN_STATES).update(
        state=TopUp.States.FAILED, failure=reason
    )
    if not failed:
        return
    setup = AutoTopUp.objects.select_for_update().get(account=top_up.account_id)
    setup.failures += 1
    setup.last_failure = reason
    setup.is_on = setup.is_on and setup.failures < MAX_FAILURES and reason not in PERMANENT_FAILURES
    setup.retry_at = timezone.now() + RETRY_DELAYS[min(setup.failures, len(RETRY_DELAYS)) - 1]
    setup.save(update_fields=["failures", "last_failure", "is_on", "retry_at", "updated_at"])
