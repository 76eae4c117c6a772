"""Reads: each organization's own, newest first."""

from __future__ import annotations

from decimal import Decimal

import pytest

from billing import charges, selectors
from billing.models import NodeSpec
from billing.pricing import Usage
from console.accounts.errors import NotFound
from tests.factories.accounts import OrganizationFactory
from tests.factories.billing import NodeSpecFactory, PriceBookFactory, PriceFactory, book, quote, wallet

pytestmark = pytest.mark.django_db


@pytest.fixture
def account():
    book()
    return wallet(balance_minor=1000)


def test_the_wallet(account):
    assert selectors.wallet(account.organization) == account
    assert selectors.wallet(OrganizationFactory()) is None


def test_movements_holds_and_receipts_are_the_organizations_own(account):
    other = wallet(balance_minor=1000)
    hold = charges.hold(quote=quote(account), reference="order:1")
    assert list(selectors.open_holds(account.organization)) == [hold]
    receipt = charges.settle(hold=hold, usage=Usage(100, completed=True), title="#1")
    assert list(selectors.open_holds(account.organization)) == []
    assert [entry.amount_minor for entry in selectors.movements(account.organization)] == [-10, 1000]
    assert list(selectors.receipts_for(account.organization)) == [receipt]
    assert selectors.receipt_for(account.organization, receipt.pk) == receipt
    assert [entry.amount_minor for entry in selectors.movements(other.organization)] == [1000]
    assert not selectors.receipts_for(other.organization).exists()
    with pytest.raises(NotFound):
        selectors.receipt_for(other.organization, receipt.pk)


def test_specs_are_offered_at_the_price_of_one_node():
    small = NodeSpecFactory(name="small", position=1)
    draft = PriceBookFactory()
    PriceFactory(book=draft, node_spec=small, nodes_from=1, amount=Decimal(90))
    PriceFactory(book=draft, node_spec=small, nodes_from=4, amount=Decimal(80))
    PriceFactory(book=draft, node_spec=small, product="special", amount=Decimal(1))
    assert [(offer.spec, offer.hourly_minor) for offer in selectors.offered_specs("USD")] == [(small, None)]
    selectors_book = book(hourly="100")
    assert [offer.hourly_minor for offer in selectors.offered_specs("USD")] == [Decimal(100)]
    NodeSpec.objects.update(is_active=False)
    assert selectors.offered_specs(selectors_book.currency) == []
