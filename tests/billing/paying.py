"""Payments and refunds, as our tables and the provider hold them."""

from __future__ import annotations

from billing import auto_topup, customers, payments
from billing.models import AutoTopUp, StripeEvent, TopUp
from billing.sandbox import intents
from tests.books import cleared
from tests.factories.accounts import MembershipFactory
from tests.factories.billing import wallet
from tests.provider import GOOD, Stripe


def balance(top_up: TopUp) -> int:
    """Read the top-up and its wallet from the database again, and return the wallet's balance."""
    top_up.refresh_from_db()
    top_up.account.refresh_from_db()
    return top_up.account.posted_minor


def start_top_up(amount_minor: int = 5000, *, currency: str = "USD") -> TopUp:
    """Open a payment page for a member of an organization that has no money yet."""
    member = MembershipFactory()
    account = wallet(member.organization, currency=currency)
    return payments.start_top_up(account=account, amount_minor=amount_minor, user=member.user)


def switch_on_auto_top_ups(top_up: TopUp, threshold: int = 6000, card: str = GOOD) -> AutoTopUp:
    """Switch on automatic top-ups of $20 with a saved card of the top-up's organization.

    With the default threshold, one is due at once after a top-up of $50.
    """
    saved = customers.saved_cards(top_up.account.organization)
    method_id = next(each.card.method_id for each in saved if each.card.last4 == card[-4:])
    return auto_topup.switch_on(
        account=top_up.account,
        threshold_minor=threshold,
        amount_minor=2000,
        method_id=method_id,
        user=top_up.created_by,
    )


def both_sides_agree(provider: Stripe) -> bool:
    """Deliver every event. Return whether the provider holds what our ledger says, and no event is left open."""
    provider.deliver()
    open_states = {StripeEvent.States.QUARANTINED, StripeEvent.States.PARKED, StripeEvent.States.RECEIVED}
    return provider.held() == cleared() and not StripeEvent.objects.filter(state__in=open_states).exists()


def dispute_of(provider: Stripe) -> dict:
    """Return the one dispute, as the provider stores it."""
    (dispute,) = provider.sandbox.account.store.all("dispute")
    return dispute


def end_dispute(provider: Stripe, verdict: str) -> None:
    """Let the bank decide: `won` or `lost`."""
    intents.end_dispute(provider.sandbox.account, dispute_of(provider), verdict)


def reopen_dispute(provider: Stripe) -> None:
    """Let the bank take back what it had returned."""
    intents.reopen_dispute(provider.sandbox.account, dispute_of(provider))


def forget_idempotency_keys(provider: Stripe) -> None:
    """Delete the idempotency keys at the provider, as it does after a day."""
    store = provider.sandbox.account.store
    for key in list(store._objects["key"]):
        store.remove("key", key)
