"""Money that comes in: top-ups at the provider's payment page, and the proofs that credit them.

The one rule: a wallet is credited by the provider's own word alone (its signed event, or its answer to our question),
keyed on the top-up, after mode, amount, currency and session were checked against our row. The page a customer returns
to credits nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from django.conf import settings
from django.core.exceptions import ValidationError
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from billing import currencies, customers, gateway, receivables
from billing.errors import AmountRefused, Quarantined
from billing.models import Account, Quote, TopUp
from billing.wording import money
from console.accounts.models import User

OPEN = (TopUp.States.CREATED, TopUp.States.PENDING)


def start_top_up(*, account: Account, amount_minor: int, user: User, save_card: bool = False) -> TopUp:
    """Open a payment page for an amount; `save_card` keeps the card for automatic top-ups.

    Raises AmountRefused (field amount_minor), PaymentUnavailable, PaymentRefused.
    """
    require_amount(account, amount_minor, field="amount_minor")
    top_up = TopUp(account=account, amount_minor=amount_minor, created_by=user)
    return _open_page(top_up, user=user, save_card=save_card, return_path="/wallet/")


def pay_for(*, quote: Quote, account: Account, user: User, return_path: str) -> TopUp:
    """Open a payment page for what the wallet lacks to buy a quote (at least the smallest top-up).

    The money comes into the wallet as any top-up does; `top_up.quote` says what is to be bought with it.
    Raises AmountRefused where it is more than one payment may be, PaymentUnavailable, PaymentRefused.
    """
    amount = shortfall_minor(quote, account=account)
    if amount > settings.TOP_UP_MAXIMUM_MINOR:
        raise AmountRefused(
            _("This takes %(missing)s more, and one payment is of %(most)s at most. Top up several times, then buy.")
            % {
                "missing": money(amount, account.currency),
                "most": money(settings.TOP_UP_MAXIMUM_MINOR, account.currency),
            }
        )
    return _open_page(
        TopUp(account=account, amount_minor=amount, created_by=user, quote=quote), user=user, return_path=return_path
    )


def shortfall_minor(quote: Quote, *, account: Account) -> int:
    """What is to be paid so that the quote can be bought: what is missing, but no less than one payment's least.

    What is owed comes on top, as a payment pays it first.
    """
    missing = quote.ceiling_minor - account.available_minor + receivables.owed_minor(account)
    wanted = max(missing, int(settings.TOP_UP_MINIMUM_MINOR))
    return currencies.payable(wanted, quote.currency)


def require_amount(account: Account, amount_minor: int, *, field: str) -> None:
    """Refuse an amount that can't be paid at once: too small, too large, too fine. Raises AmountRefused at `field`."""
    least, most = currencies.payable(settings.TOP_UP_MINIMUM_MINOR, account.currency), settings.TOP_UP_MAXIMUM_MINOR
    if not least <= amount_minor <= most:
        sentence = _("Top up between %(least)s and %(most)s at once.") % {
            "least": money(least, account.currency),
            "most": money(most, account.currency),
        }
        raise AmountRefused(sentence, fields={field: sentence})
    if amount_minor % currencies.step(account.currency):
        sentence = step_sentence(account.currency)
        raise AmountRefused(sentence, fields={field: sentence})


def step_sentence(currency: str) -> str:
    """That payments are made in steps."""
    return _("Payments are made in steps of %(step)s.") % {"step": money(currencies.step(currency), currency)}


def apply_session(session: Mapping[str, Any], *, livemode: object, at: object = None) -> TopUp:
    """Take in what a Checkout Session says of its top-up; paid is final, whatever comes later.

    In the caller's transaction. `at` is the Unix time of the proof. Raises Quarantined where it is not our row's.
    """
    top_up = locked_top_up(session.get("client_reference_id"))
    if session.get("payment_status") == "paid":
        expected = {
            "amount_total": (session.get("amount_total"), top_up.amount_minor),
            "currency": (str(session.get("currency")).upper(), top_up.currency),
            # The page may be paid before our row has learnt its id.
            "session": (session.get("id"), top_up.session_id or session.get("id")),
        }
        require_match(expected | {"livemode": (livemode, gateway.is_live())})
        credit_top_up(top_up, intent=session.get("payment_intent"), at=at)
    elif session.get("status") == "expired":
        close_top_up(top_up, TopUp.States.EXPIRED)
    return top_up


def fail_session(session: Mapping[str, Any]) -> TopUp:
    """A payment that was on its way for days did not come. In the caller's transaction. Raises Quarantined."""
    top_up = locked_top_up(session.get("client_reference_id"))
    close_top_up(top_up, TopUp.States.FAILED, failure="async_payment_failed")
    return top_up


def moment(stamp: object) -> datetime:
    """The provider's Unix time; now, where it gave none that can be read. Money does not wait for a clock."""
    try:
        return datetime.fromtimestamp(stamp, UTC)  # type: ignore[arg-type]  # whatever it is: that is what is tried
    except (TypeError, ValueError, OverflowError, OSError):
        return timezone.now()


def locked_top_up(reference: object) -> TopUp:
    """The top-up that a proof names, locked. Raises Quarantined."""
    try:
        return TopUp.objects.select_for_update(of=("self",)).select_related("account").get(pk=str(reference))
    except (TopUp.DoesNotExist, ValidationError, ValueError):
        raise Quarantined("No top-up of ours has this reference.") from None


def require_match(expected: Mapping[str, tuple[object, object]]) -> None:
    """Compare what was got with what our row says, by name. Raises Quarantined with everything that differs."""
    wrong = [f"{name} is {got!r}, not {want!r}" for name, (got, want) in expected.items() if got != want]
    if wrong:
        raise Quarantined("; ".join(wrong))


def credit_top_up(top_up: TopUp, *, intent: object, at: object) -> None:
    """Move the money of a proven payment into the wallet, once, whatever became of the row meanwhile."""
    receivables.pay_in(
        account=top_up.account,
        amount_minor=top_up.amount_minor,
        reference=f"top-up:{top_up.pk}",
        kind="top-up",
        description=gettext_noop("Top-up"),
    )
    top_up.state = TopUp.States.PAID
    top_up.paid_at = top_up.paid_at or moment(at)
    top_up.payment_intent = top_up.payment_intent or str(intent or "")
    top_up.failure = ""
    top_up.save(update_fields=["state", "paid_at", "payment_intent", "failure"])


def close_top_up(top_up: TopUp, state: TopUp.States, *, failure: str = "") -> None:
    """Close an open top-up without money; one that was paid stays paid."""
    if top_up.state in OPEN:
        top_up.state, top_up.failure = state, failure[:100]
        top_up.save(update_fields=["state", "failure"])


def _open_page(top_up: TopUp, *, user: User, return_path: str, save_card: bool = False) -> TopUp:
    """Write the row, then make its page; the row may be paid before this returns."""
    organization = top_up.account.organization
    if organization is None:
        raise ValueError("Only an organization's wallet is topped up.")
    customers.customer_of(organization=organization, email=user.email)  # while it can't be made, no row is written
    top_up.currency = top_up.account.currency
    top_up.save(force_insert=True)
    checkout = customers.for_customer(
        organization=organization,
        email=user.email,
        act=lambda customer: gateway.create_checkout(
            reference=str(top_up.pk),
            amount_minor=top_up.amount_minor,
            currency=top_up.currency,
            title=_("Trainyard wallet of %(organization)s") % {"organization": organization},
            customer=customer,
            return_url=f"{settings.TRAINYARD_URL}{return_path}",
            save_card=save_card,
        ),
    )
    TopUp.objects.filter(pk=top_up.pk).update(session_id=checkout.session_id, checkout_url=checkout.url)
    TopUp.objects.filter(pk=top_up.pk, state=TopUp.States.CREATED).update(state=TopUp.States.PENDING)
    top_up.refresh_from_db()
    return top_up
