"""Money that comes in: top-ups and the events that prove them.

The one rule: a wallet is credited by an event of the provider's alone, keyed on the top-up, after mode, amount,
currency and session were checked against our row; what doesn't match is quarantined. The page a customer returns to
credits nothing.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from billing import gateway, ledger
from billing.errors import AmountRefused
from billing.models import Account, CreditGrant, StripeEvent, TopUp
from billing.wording import money
from console.accounts.models import User

FETCH_BACK = timedelta(days=3)
"""How far the sweep looks back for events that were not delivered."""
PAID_EVENTS = {"checkout.session.completed", "checkout.session.async_payment_succeeded"}
EXPIRED_EVENTS = {"checkout.session.expired"}


def start_top_up(*, account: Account, amount_minor: int, user: User) -> TopUp:
    """Open a payment page for an amount. Raises AmountRefused (field amount_minor), PaymentUnavailable."""
    least, most = settings.TOP_UP_MINIMUM_MINOR, settings.TOP_UP_MAXIMUM_MINOR
    if not least <= amount_minor <= most:
        sentence = _("Top up between %(least)s and %(most)s at once.") % {
            "least": money(least, account.currency),
            "most": money(most, account.currency),
        }
        raise AmountRefused(sentence, fields={"amount_minor": sentence})
    top_up = TopUp.objects.create(
        account=account, amount_minor=amount_minor, currency=account.currency, created_by=user
    )
    checkout = gateway.create_checkout(
        reference=str(top_up.pk),
        amount_minor=amount_minor,
        currency=account.currency,
        title=_("Trainyard wallet of %(organization)s") % {"organization": account.organization},
        email=user.email,
        return_url=f"{settings.TRAINYARD_URL}/wallet/",
    )
    TopUp.objects.filter(pk=top_up.pk).update(session_id=checkout.session_id, checkout_url=checkout.url)
    TopUp.objects.filter(pk=top_up.pk, state=TopUp.States.CREATED).update(state=TopUp.States.PENDING)
    top_up.refresh_from_db()
    return top_up


def receive(event: dict[str, Any]) -> StripeEvent:
    """Store a verified event, once; a second delivery finds the first."""
    StripeEvent.objects.bulk_create(
        [StripeEvent(event_id=event["id"], type=event["type"], payload=event)], ignore_conflicts=True
    )
    return StripeEvent.objects.get(event_id=event["id"])


@transaction.atomic
def apply_event(*, event_pk: int) -> None:
    """Act on a stored event, once. Safe to repeat, and for two workers at once."""
    event = StripeEvent.objects.select_for_update().get(pk=event_pk)
    if event.state not in {StripeEvent.States.RECEIVED, StripeEvent.States.QUARANTINED}:
        return
    if event.type not in PAID_EVENTS | EXPIRED_EVENTS:
        event.state, event.reason = StripeEvent.States.IGNORED, ""
    else:
        event.reason = _apply_session(event)
        event.state = StripeEvent.States.QUARANTINED if event.reason else StripeEvent.States.APPLIED
    event.applied_at = timezone.now()
    event.save(update_fields=["state", "reason", "applied_at"])


def fetch_undelivered() -> int:
    """Ask the provider for the events of late and store those that never came. Gives how many were new."""
    since = timezone.now() - FETCH_BACK
    fresh = 0
    for event in gateway.events_since(int(since.timestamp())):
        if not StripeEvent.objects.filter(event_id=event["id"]).exists():
            receive(event)
            fresh += 1
    return fresh


@transaction.atomic
def grant(*, credit: CreditGrant, user: User, account: Account) -> CreditGrant:
    """Record a credit grant and move its money."""
    credit.granted_by = user
    credit.save()
    source = ledger.platform_account(Account.Kinds.CREDIT, account.currency)
    ledger.post(
        reference=f"grant:{credit.pk}",
        kind="credit",
        description=credit.reason,
        entries=[(account, credit.amount_minor), (source, -credit.amount_minor)],
    )
    return credit


def _apply_session(event: StripeEvent) -> str:
    """Apply a Checkout Session's event; gives why it is quarantined, or an empty string."""
    session = _session(event.payload)
    if session is None:
        return "The event carries no Checkout Session."
    try:
        top_up = (
            TopUp.objects.select_for_update(of=("self",))
            .select_related("account")
            .get(pk=str(session.get("client_reference_id")))
        )
    except (TopUp.DoesNotExist, ValidationError, ValueError):
        return "No top-up of ours has this client_reference_id."
    if event.type in EXPIRED_EVENTS:
        if top_up.state in {TopUp.States.CREATED, TopUp.States.PENDING}:
            top_up.state = TopUp.States.EXPIRED
            top_up.save(update_fields=["state"])
        return ""
    if session.get("payment_status") != "paid":
        return ""
    if mismatch := _mismatch(event.payload, session, top_up):
        return mismatch
    clearing = ledger.platform_account(Account.Kinds.CLEARING, top_up.currency)
    ledger.post(
        reference=f"top-up:{top_up.pk}",
        kind="top-up",
        description=gettext_noop("Top-up"),
        entries=[(top_up.account, top_up.amount_minor), (clearing, -top_up.amount_minor)],
    )
    top_up.state = TopUp.States.PAID
    top_up.paid_at = top_up.paid_at or _moment(event.payload.get("created"))
    top_up.save(update_fields=["state", "paid_at"])
    return ""


def _session(payload: dict[str, Any]) -> dict[str, Any] | None:
    data = payload.get("data")
    session = data.get("object") if isinstance(data, dict) else None
    return session if isinstance(session, dict) else None


def _moment(created: Any) -> datetime:
    """The provider's Unix time; now, where it gave none that can be read. Money does not wait for a clock."""
    try:
        return datetime.fromtimestamp(created, UTC)
    except (TypeError, ValueError, OverflowError, OSError):
        return timezone.now()


def _mismatch(payload: dict[str, Any], session: dict[str, Any], top_up: TopUp) -> str:
    """What of a paid session differs from our row; empty when nothing does."""
    expected = {
        "livemode": (payload.get("livemode"), gateway.is_live()),
        "amount_total": (session.get("amount_total"), top_up.amount_minor),
        "currency": (str(session.get("currency")).upper(), top_up.currency),
        # The page may be paid before our row has learnt its id.
        "session": (session.get("id"), top_up.session_id or session.get("id")),
    }
    wrong = [f"{name} is {got!r}, not {want!r}" for name, (got, want) in expected.items() if got != want]
    return "; ".join(wrong)
