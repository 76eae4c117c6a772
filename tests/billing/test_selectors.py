"""Selectors: each organization's own rows, newest first, and the node specs on offer."""

from __future__ import annotations

from decimal import Decimal

import pytest

from billing import pricebooks, selectors
from billing.models import NodeSpec
from console.core.errors import NotFound
from tests.billing.runs import buy, settle
from tests.factories.accounts import OrganizationFactory
from tests.factories.billing import NodeSpecFactory, PriceBookFactory, PriceFactory, book, wallet

pytestmark = pytest.mark.django_db


def test_rows_of_money_are_the_organizations_own(account):
    ours, theirs = account.organization, wallet(balance_minor=1000).organization
    assert selectors.wallet(ours) == account
    assert selectors.wallet(OrganizationFactory()) is None
    hold = buy(account, 10)
    assert list(selectors.open_holds(ours)) == [hold]
    receipt = settle(hold, 10)
    assert list(selectors.open_holds(ours)) == []
    assert [entry.amount_minor for entry in selectors.wallet_entries(ours)] == [-10, 10_000]
    assert [entry.amount_minor for entry in selectors.wallet_entries(theirs)] == [1000]
    assert list(selectors.receipts_for(ours)) == [receipt] == [selectors.receipt_for(ours, receipt.pk)]
    assert not selectors.receipts_for(theirs).exists()
    with pytest.raises(NotFound):
        selectors.receipt_for(theirs, receipt.pk)


def test_node_specs_are_offered_at_the_price_of_one_node():
    small = NodeSpecFactory(name="small", position=1)
    draft = PriceBookFactory()
    for options in ({"amount": Decimal(90)}, {"nodes_from": 4, "amount": Decimal(80)}, {"product": "special"}):
        PriceFactory(book=draft, node_spec=small, **options)
    assert [(offer.spec, offer.hourly_minor) for offer in selectors.offered_specs("USD")] == [(small, None)]
    pricebooks.publish(book=draft)
    (offer,) = selectors.offered_specs("USD")
    assert (offer.hourly_minor, offer.discounts) == (90, (selectors.PriceTier(4, Decimal(80)),))
    book(hourly="100")
    assert [offer.hourly_minor for offer in selectors.offered_specs("USD")] == [100]
    NodeSpec.objects.update(is_active=False)
    assert selectors.offered_specs("USD") == []
