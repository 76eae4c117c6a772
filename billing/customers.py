"""An organization at the payment provider: its record there, and the cards it has saved.

The one rule: what the provider keeps is asked of the provider, never copied; here stand its ids alone, one for each of
the provider's worlds (sandbox, test, live). Somebody may delete a record at the provider's own pages, and the cards
with it: then the id is forgotten, and the next payment makes another record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar
from uuid import uuid4

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from billing import gateway
from billing.errors import CustomerGone, NoSavedCard, PaymentRefused
from billing.gateway import Card
from billing.models import Account, AutoTopUp, PaymentCustomer
from console.accounts.models import Organization

Given = TypeVar("Given")
GONE = "customer_gone"
"""Why a standing order was switched off: there is nothing any more that it could charge."""


@dataclass(frozen=True)
class SavedCard:
    """A saved card, and whether it is the one that is used first."""

    card: Card
    is_default: bool


def customer_of(*, organization: Organization, email: str) -> str:
    """The provider's id of an organization, made when it is first needed.

    Raises PaymentUnavailable, PaymentRefused.
    """
    row, _made = PaymentCustomer.objects.get_or_create(organization=organization, mode=gateway.mode())
    if not row.customer_id:
        made = gateway.create_customer(reference=str(row.pk), name=str(organization), email=email, after=row.lost_id)
        # Of two at once, the first counts; the other's record at the provider stays empty.
        PaymentCustomer.objects.filter(pk=row.pk, customer_id="").update(customer_id=made)
        row.refresh_from_db()
    return row.customer_id


def for_customer(*, organization: Organization, email: str, act: Callable[[str], Given]) -> Given:
    """What `act` gives for the organization's id at the provider; with a new one, where that was deleted there.

    Raises what `act` raises, PaymentUnavailable, PaymentRefused.
    """
    known = customer_of(organization=organization, email=email)
    try:
        return act(known)
    except PaymentRefused as error:
        if not isinstance(error, CustomerGone) and not gateway.is_gone(known):
            raise
    forget(known)
    return act(customer_of(organization=organization, email=email))


def forget(gone: str) -> bool:
    """Forget a record that the provider has no more, and its cards; whose standing order it fed is told by mail.

    False where it is not the record of any organization now: it was forgotten, and perhaps replaced, before.
    """
    with transaction.atomic():
        row = PaymentCustomer.objects.select_for_update().filter(mode=gateway.mode(), customer_id=gone).first()
        if row is None or not gone:
            return False
        row.customer_id, row.lost_id, row.default_method = "", gone, ""
        row.save(update_fields=["customer_id", "lost_id", "default_method"])
        AutoTopUp.objects.filter(account__organization=row.organization_id, is_on=True).update(
            is_on=False, last_failure=GONE, mailed_at=None, updated_at=timezone.now()
        )
    return True


def were_lost(organization: Organization) -> bool:
    """Whether a record of the organization's was deleted at the provider, with the cards that were saved in it."""
    rows = PaymentCustomer.objects.filter(organization=organization, mode=gateway.mode())
    return rows.exclude(lost_id="").exists()


def saved_cards(organization: Organization) -> list[SavedCard]:
    """The saved cards, the default first. Raises PaymentUnavailable, PaymentRefused."""
    row = PaymentCustomer.objects.filter(organization=organization, mode=gateway.mode()).exclude(customer_id="").first()
    if row is None:
        return []
    try:
        cards = gateway.cards(row.customer_id)
    except CustomerGone:
        forget(row.customer_id)
        return []
    known = {card.method_id for card in cards}
    default = row.default_method if row.default_method in known else next(iter(known and [cards[0].method_id]), "")
    found = [SavedCard(card, card.method_id == default) for card in cards]
    return sorted(found, key=lambda saved: not saved.is_default)


def card_named(organization: Organization, method_id: str) -> Card:
    """One of the organization's own cards. Raises NoSavedCard, PaymentUnavailable, PaymentRefused."""
    for saved in saved_cards(organization):
        if saved.card.method_id == method_id:
            return saved.card
    raise NoSavedCard


def save_card_page(*, account: Account, email: str) -> str:
    """The address of a page where a card is saved. Raises PaymentUnavailable, PaymentRefused."""
    if account.organization is None:
        raise NoSavedCard
    page = for_customer(
        organization=account.organization,
        email=email,
        act=lambda customer: gateway.create_card_setup(
            reference=str(uuid4()),
            customer=customer,
            currency=account.currency,
            return_url=f"{settings.TRAINYARD_URL}/wallet/cards/",
        ),
    )
    return page.url


def make_default(*, organization: Organization, method_id: str) -> Card:
    """Use this card first. Raises as `card_named`."""
    card = card_named(organization, method_id)
    PaymentCustomer.objects.filter(organization=organization, mode=gateway.mode()).update(default_method=method_id)
    return card


def remove_card(*, organization: Organization, method_id: str) -> None:
    """Forget a card; automatic top-ups that use it are switched off first. Raises as `card_named`."""
    card_named(organization, method_id)
    AutoTopUp.objects.filter(account__organization=organization, method_id=method_id).update(is_on=False)
    gateway.remove_card(method_id)
