"""An organization at the payment provider: its record there, and the cards it has saved.

The one rule: what the provider keeps is asked of the provider, never copied; here stand its ids alone, one for each of
the provider's worlds (sandbox, test, live).
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import uuid4

from django.conf import settings

from billing import gateway
from billing.errors import NoSavedCard
from billing.gateway import Card
from billing.models import Account, AutoTopUp, PaymentCustomer
from console.accounts.models import Organization


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
        made = gateway.create_customer(reference=str(row.pk), name=str(organization), email=email)
        # Of two at once, the first counts; the other's record at the provider stays empty.
        PaymentCustomer.objects.filter(pk=row.pk, customer_id="").update(customer_id=made)
        row.refresh_from_db()
    return row.customer_id


def saved_cards(organization: Organization) -> list[SavedCard]:
    """The saved cards, the default first. Raises PaymentUnavailable, PaymentRefused."""
    row = PaymentCustomer.objects.filter(organization=organization, mode=gateway.mode()).exclude(customer_id="").first()
    if row is None:
        return []
    cards = gateway.cards(row.customer_id)
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
    customer = customer_of(organization=account.organization, email=email)
    page = gateway.create_card_setup(
        reference=str(uuid4()),
        customer=customer,
        currency=account.currency,
        return_url=f"{settings.TRAINYARD_URL}/wallet/cards/",
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
