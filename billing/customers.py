"""The payment provider's customer object of an organization, and its saved cards.

Card data is read from the provider and never copied. We store only the customer's id, one for each provider mode
(sandbox, test, live). An administrator may delete the customer, and with it the cards, in the provider's dashboard.
Then we clear the id, and the next payment creates a new customer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar
from uuid import uuid4

from django.conf import settings
from django.db import transaction

from billing import gateway
from billing.errors import CustomerGone, NoSavedCard, PaymentRefused
from billing.gateway import Card
from billing.models import Account, AutoTopUp, PaymentCustomer
from console.accounts import services
from console.accounts.emails import forget_sent
from console.accounts.models import Organization

T = TypeVar("T")
CUSTOMER_GONE = "customer_gone"
"""Failure code of automatic top-ups that were switched off because the customer was deleted at the provider."""


@dataclass(frozen=True)
class SavedCard:
    """A saved card, and whether it is the default one."""

    card: Card
    is_default: bool


def ensure_customer(*, organization: Organization, email: str) -> str:
    """Return the id of the organization's customer. Create it with this email address if there is none.

    Raises PaymentUnavailable, PaymentRefused.
    """
    row, _created = PaymentCustomer.objects.get_or_create(organization=organization, mode=gateway.mode())
    if not row.customer_id:
        new_id = gateway.create_customer(
            reference=str(row.pk), name=str(organization), email=email, replaces=row.lost_id
        )
        # If two calls run at once, the first one stores its customer. The customer of the second stays unused.
        PaymentCustomer.objects.filter(pk=row.pk, customer_id="").update(customer_id=new_id)
        row.refresh_from_db()
    return row.customer_id


def with_customer(*, organization: Organization, email: str, call: Callable[[str], T]) -> T:
    """Return `call(customer_id)`. If the customer was deleted at the provider, call again with a new customer.

    Raises PaymentUnavailable, PaymentRefused and the errors of `call`.
    """
    customer_id = ensure_customer(organization=organization, email=email)
    try:
        return call(customer_id)
    except PaymentRefused as error:
        # The reason of a refusal may not name the deleted customer, so ask the provider before passing the refusal on.
        if not isinstance(error, CustomerGone) and not gateway.is_customer_deleted(customer_id):
            raise
    forget(customer_id)
    return call(ensure_customer(organization=organization, email=email))


def forget(customer_id: str) -> bool:
    """Clear the id of a customer that was deleted at the provider, and switch off automatic top-ups with its cards.

    `payment_emails` sends an email about the deleted cards to all who may pay. Returns False, and does nothing, if no
    organization has this id any more.
    """
    with transaction.atomic():
        row = PaymentCustomer.objects.select_for_update().filter(mode=gateway.mode(), customer_id=customer_id).first()
        if row is None or not customer_id:  # an empty id would match a row without a customer
            return False
        row.customer_id, row.lost_id, row.default_method = "", customer_id, ""
        row.save(update_fields=["customer_id", "lost_id", "default_method"])
        setups = AutoTopUp.objects.select_for_update(of=["self"])
        for setup in setups.filter(account__organization=row.organization_id, is_on=True):
            setup.is_on, setup.last_failure, setup.mailed_at = False, CUSTOMER_GONE, None
            setup.save(update_fields=["is_on", "last_failure", "mailed_at", "updated_at"])
            forget_sent(setup)  # the email goes to all, also to those who got one about an earlier deletion
    return True


def has_deleted_customer(organization: Organization) -> bool:
    """Return whether a customer of this organization, and with it the saved cards, was ever deleted at the provider."""
    rows = PaymentCustomer.objects.filter(organization=organization, mode=gateway.mode())
    return rows.exclude(lost_id="").exists()


def saved_cards(organization: Organization) -> list[SavedCard]:
    """Return the saved cards, the default first. Raises PaymentUnavailable, PaymentRefused."""
    row = PaymentCustomer.objects.filter(organization=organization, mode=gateway.mode()).exclude(customer_id="").first()
    if row is None:
        return []
    try:
        cards = gateway.cards(row.customer_id)
    except CustomerGone:
        forget(row.customer_id)
        return []
    if not cards:
        return []
    has_default = any(card.method_id == row.default_method for card in cards)
    default_id = row.default_method if has_default else cards[0].method_id
    saved = (SavedCard(card, card.method_id == default_id) for card in cards)
    return sorted(saved, key=lambda card: not card.is_default)


def get_card(organization: Organization, method_id: str) -> Card:
    """Return one of the organization's cards. Raises NoSavedCard, PaymentUnavailable, PaymentRefused."""
    for saved in saved_cards(organization):
        if saved.card.method_id == method_id:
            return saved.card
    raise NoSavedCard


def create_card_page(*, account: Account, email: str) -> str:
    """Create a page of the provider on which a card is saved, and return its URL.

    Raises NoSavedCard if the account is not a wallet, OrganizationClosing, PaymentUnavailable, PaymentRefused.
    """
    if account.organization is None:
        raise NoSavedCard
    services.require_open(organization=account.organization)
    page = with_customer(
        organization=account.organization,
        email=email,
        call=lambda customer_id: gateway.create_card_setup(
            reference=str(uuid4()),
            customer_id=customer_id,
            currency=account.currency,
            return_url=f"{settings.TRAINYARD_URL}/wallet/cards/",
        ),
    )
    return page.url


def close_pages(organization: Organization) -> None:
    """Close all open pages of the organization's customer, which pay or save a card. Raises PaymentUnavailable."""
    row = PaymentCustomer.objects.filter(organization=organization, mode=gateway.mode()).exclude(customer_id="").first()
    if row is None:
        return
    with suppress(CustomerGone):  # its pages cannot be used any more
        for session_id in gateway.open_pages(row.customer_id):
            gateway.expire_checkout(session_id)


def make_default(*, organization: Organization, method_id: str) -> Card:
    """Make this card the default. Raises as `get_card`."""
    card = get_card(organization, method_id)
    PaymentCustomer.objects.filter(organization=organization, mode=gateway.mode()).update(default_method=method_id)
    return card


def remove_card(*, organization: Organization, method_id: str) -> None:
    """Delete a saved card, after switching off the automatic top-ups that use it. Raises as `get_card`."""
    get_card(organization, method_id)
    AutoTopUp.objects.filter(account__organization=organization, method_id=method_id).update(is_on=False)
    gateway.remove_card(method_id)
