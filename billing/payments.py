"""Top-ups: open the provider's payment page, and credit the wallet when the provider reports the payment.

Only the provider's signed event, or its answer to our request, credits a wallet. Before that, mode, amount, currency
and session are compared with the top-up's row. A top-up is credited once. The customer's return from the payment page
credits nothing, because anybody can open the URL of the return.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from billing import credit, currencies, customers, gateway, receivables, storage_charges
from billing.amounts import money
from billing.errors import AmountRefused, PaymentRefused, Quarantined
from billing.models import Account, Quote, TopUp
from console.accounts import services
from console.accounts.models import User
from console.installation.selectors import installation
from console.notifications import services as notifications

OPEN_STATES = (TopUp.States.CREATED, TopUp.States.PENDING)
"""States of top-ups whose payment has no result yet."""


def start_top_up(*, account: Account, amount_minor: int, user: User, save_card: bool = False) -> TopUp:
    """Create a top-up and its payment page. `save_card` saves the card for automatic top-ups.

    Raises AmountRefused (field amount_minor), OrganizationClosing, PaymentUnavailable, PaymentRefused.
    """
    services.require_open(organization=account.owner)
    require_amount(account, amount_minor, field="amount_minor")
    top_up = TopUp(account=account, amount_minor=amount_minor, created_by=user)
    return _open_page(top_up, user=user, save_card=save_card, return_path="/wallet/")


def pay_for(*, quote: Quote, account: Account, user: User, return_path: str) -> TopUp:
    """Create a top-up and its payment page for the amount that the wallet lacks to buy a quote.

    The amount is at least the smallest top-up. The payment is credited like any top-up; `jobs` then buys
    `top_up.quote`. After the payment, the payer returns to `return_path` of the console. Raises AmountRefused if the
    amount exceeds the largest top-up, OrganizationClosing, PaymentUnavailable, PaymentRefused.
    """
    services.require_open(organization=account.owner)
    amount_minor = shortfall_minor(quote, account=account)
    if amount_minor > settings.TOP_UP_MAXIMUM_MINOR:
        raise AmountRefused(
            _(
                "This needs %(missing)s more, but a single payment can be at most %(most)s. Top up several "
                "times, then buy."
            )
            % {
                "missing": money(amount_minor, account.currency),
                "most": money(settings.TOP_UP_MAXIMUM_MINOR, account.currency),
            }
        )
    return _open_page(
        TopUp(account=account, amount_minor=amount_minor, created_by=user, quote=quote),
        user=user,
        return_path=return_path,
    )


def shortfall_minor(quote: Quote, *, account: Account, held_minor: int = 0) -> int:
    """Return the amount to pay in before the quote can be bought, at least the smallest top-up, in minor units.

    Debts and unpaid storage are added, because the payment may go to them first. Credit that has expired does not
    count. `held_minor` is the amount already held for the purchase, if the quote extends it.
    """
    available_minor = account.available_minor - credit.expired_minor(account)
    shortfall = quote.ceiling_minor - held_minor - available_minor
    shortfall += receivables.owed_minor(account) + storage_charges.unpaid_minor(account)
    return currencies.round_up_for_payment(max(shortfall, int(settings.TOP_UP_MINIMUM_MINOR)), quote.currency)


def require_amount(account: Account, amount_minor: int, *, field: str) -> None:
    """Raise AmountRefused, at `field`, if an amount is out of range or not a multiple of the currency's step."""
    minimum = currencies.round_up_for_payment(settings.TOP_UP_MINIMUM_MINOR, account.currency)
    maximum = settings.TOP_UP_MAXIMUM_MINOR
    if not minimum <= amount_minor <= maximum:
        sentence = _("A top-up must be between %(least)s and %(most)s.") % {
            "least": money(minimum, account.currency),
            "most": money(maximum, account.currency),
        }
        raise AmountRefused(sentence, fields={field: sentence})
    if amount_minor % currencies.step(account.currency):
        sentence = step_sentence(account.currency)
        raise AmountRefused(sentence, fields={field: sentence})


def step_sentence(currency: str) -> str:
    """Return the error message for an amount that is not a multiple of the currency's step."""
    return _("The amount must be a multiple of %(step)s.") % {"step": money(currencies.step(currency), currency)}


def apply_session(session: Mapping[str, Any], *, livemode: object, at: object = None) -> TopUp:
    """Apply the state of a Checkout Session to its top-up. Nothing changes a paid top-up.

    Call it in a transaction. `livemode` (whether real money moved) and `at` (Unix time) come unchecked from the
    provider. Raises Quarantined if the session does not match the top-up's row.
    """
    top_up = locked_top_up(session.get("client_reference_id"))
    if session.get("payment_status") == "paid":
        pairs = {
            "amount_total": (session.get("amount_total"), top_up.amount_minor),
            "currency": (str(session.get("currency")).upper(), top_up.currency),
            # The page may be paid before our row has the session's id.
            "session": (session.get("id"), top_up.session_id or session.get("id")),
        }
        require_match(pairs | {"livemode": (livemode, gateway.is_live())})
        credit_top_up(top_up, intent=session.get("payment_intent"), at=at)
    elif session.get("status") == "expired":
        close_top_up(top_up, TopUp.States.EXPIRED)
    return top_up


def fail_session(session: Mapping[str, Any]) -> TopUp:
    """Mark a top-up as failed, after a payment that took days, such as a bank debit, was refused in the end.

    Call it in a transaction. Raises Quarantined.
    """
    top_up = locked_top_up(session.get("client_reference_id"))
    close_top_up(top_up, TopUp.States.FAILED, failure="async_payment_failed")
    return top_up


def parse_timestamp(stamp: object) -> datetime:
    """Convert the provider's Unix time. Returns now if the time is unreadable, so that the payment is not lost."""
    try:
        return datetime.fromtimestamp(stamp, UTC)  # type: ignore[arg-type]  # other types raise, which is handled
    except (TypeError, ValueError, OverflowError, OSError):
        return timezone.now()


def locked_top_up(reference: object) -> TopUp:
    """Return the top-up with this reference, locked. Raises Quarantined."""
    try:
        return TopUp.objects.select_for_update(of=("self",)).select_related("account").get(pk=str(reference))
    except (TopUp.DoesNotExist, ValidationError, ValueError):
        raise Quarantined("No top-up of ours has this reference.") from None


def require_match(pairs: Mapping[str, tuple[object, object]]) -> None:
    """Raise Quarantined if a received value differs from the expected one. `pairs` has (received, expected) by name."""
    differences = [
        f"{name} is {received!r}, not {expected!r}"
        for name, (received, expected) in pairs.items()
        if received != expected
    ]
    if differences:
        raise Quarantined("; ".join(differences))


def credit_top_up(top_up: TopUp, *, intent: object, at: object) -> bool:
    """Credit a payment to the wallet, publish it and return True. False if this top-up has already been credited.

    The top-up may be in any other state, because the payment of an expired page can still arrive. `intent` is the
    payment intent's id and `at` the Unix time of the payment, both unchecked from the provider.
    """
    is_new = receivables.pay_in(
        account=top_up.account,
        amount_minor=top_up.amount_minor,
        reference=f"top-up:{top_up.pk}",
        kind="top-up",
        description=gettext_noop("Top-up"),
    )
    if not is_new:
        return False
    top_up.state = TopUp.States.PAID
    top_up.paid_at = parse_timestamp(at)
    top_up.payment_intent = top_up.payment_intent or str(intent or "")
    top_up.failure = ""
    top_up.save(update_fields=["state", "paid_at", "payment_intent", "failure"])
    data = {"amount_minor": top_up.amount_minor, "currency": top_up.account.currency}
    notifications.publish(organization=top_up.account.owner, kind="wallet.topped_up", data=data)
    return True


def close_top_up(top_up: TopUp, state: TopUp.States, *, failure: str = "") -> None:
    """Set the final state of a top-up that was not paid. Does nothing if it is not open."""
    if top_up.state in OPEN_STATES:
        top_up.state, top_up.failure = state, failure[:100]  # the column's length
        top_up.save(update_fields=["state", "failure"])


def close_pages(*, account: Account) -> None:
    """Close the open pages of a wallet, and apply the final states of those that pay.

    Raises PaymentUnavailable, PaymentRefused.
    """
    # Also pages without a row that names them: those that save a card, and those whose creation had no answer.
    customers.close_pages(account.owner)
    pages = TopUp.objects.filter(account=account, origin=TopUp.Origins.CHECKOUT, state__in=OPEN_STATES).exclude(
        session_id=""
    )
    for pk, session_id in list(pages.values_list("pk", "session_id")):
        gateway.expire_checkout(session_id)
        try:
            session = gateway.fetch_object("checkout.session", session_id)
        except PaymentRefused:  # the provider does not have it, for example after a change of keys
            session = {"client_reference_id": str(pk), "status": "expired"}
        # If the session does not match its top-up, the top-up stays open. The session's event is then quarantined, so
        # that an administrator sees it.
        with suppress(Quarantined), transaction.atomic():
            apply_session(session, livemode=session.get("livemode"))


def _open_page(top_up: TopUp, *, user: User, return_path: str, save_card: bool = False) -> TopUp:
    """Save an unsaved top-up, then create its payment page and store its URL. Returns the top-up.

    The page may be paid before this returns.
    """
    organization = top_up.account.owner
    # Called here so that an unavailable provider raises before the row is written. `with_customer` below uses the same
    # customer, or creates another if that one was deleted at the provider.
    customers.ensure_customer(organization=organization, email=user.email)
    top_up.currency = top_up.account.currency
    top_up.save(force_insert=True)
    checkout = customers.with_customer(
        organization=organization,
        email=user.email,
        call=lambda customer_id: gateway.create_checkout(
            reference=str(top_up.pk),
            amount_minor=top_up.amount_minor,
            currency=top_up.currency,
            title=_("%(name)s wallet of %(organization)s")
            % {"name": installation().name, "organization": organization},
            customer_id=customer_id,
            return_url=f"{settings.TRAINYARD_URL}{return_path}",
            save_card=save_card,
        ),
    )
    TopUp.objects.filter(pk=top_up.pk).update(session_id=checkout.session_id, checkout_url=checkout.url)
    # Only from CREATED: an event may have changed the state meanwhile.
    TopUp.objects.filter(pk=top_up.pk, state=TopUp.States.CREATED).update(state=TopUp.States.PENDING)
    top_up.refresh_from_db()
    return top_up
