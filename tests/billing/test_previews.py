"""Other prices: a month under a draft, customer by customer; two books compared; on PostgreSQL."""

from __future__ import annotations

from decimal import Decimal

import pytest

from billing import charges, costs, previews, pricebooks
from billing.errors import BookRefused
from billing.models import Account, PriceBook, Receipt
from billing.pricing import PriceKind, Range, Usage
from tests.factories.billing import NodeSpecFactory, PriceBookFactory, PriceFactory, book, quote, wallet

pytestmark = pytest.mark.django_db


@pytest.fixture
def now() -> PriceBook:
    """What holds: small nodes at 360 an hour, 5 at least."""
    return book(minimum="5")


def run(account: Account, seconds: float, *, usage: Usage | None = None, labels: bool = True) -> Receipt:
    made = quote(account, seconds=3600, nodes=2)
    names = {"node_spec": "small", "product": "metered"} if labels else {}
    hold = charges.hold(quote=made, reference=f"order:{made.pk}", labels=names)
    return charges.settle(hold=hold, usage=usage or Usage(seconds, completed=True), title="A run")


def draft(now: PriceBook, **amounts: str) -> PriceBook:
    made = pricebooks.copy(book=now)
    for kind, amount in amounts.items():
        made.prices.filter(kind=kind).update(amount=Decimal(amount))
    return made


def test_the_same_prices_cost_the_same(now):
    account = wallet(balance_minor=100_000)
    for seconds in (0, 1, 7.5, 1799.95, 3600, 9999):
        run(account, seconds)
    found = previews.preview(book=draft(now), month=costs.month_of())
    assert found.runs == 6
    assert found.charged_minor == found.would_minor > 0
    assert (found.change_minor, found.change, found.unpriced, found.unknown) == (0, 0, {}, 0)


def test_each_customer_and_all(now):
    one, other = wallet(balance_minor=10_000), wallet(balance_minor=10_000)
    run(one, 1800)  # half an hour on two nodes: 360
    run(one, 1)  # the least charge
    run(other, 3600)  # 720
    found = previews.preview(book=draft(now, node_hour="180", minimum="7"), month=costs.month_of())
    assert [(row.organization, row.charged_minor, row.would_minor) for row in found.customers] == [
        (other.organization, 720, 360),
        (one.organization, 365, 187),
    ]
    assert (found.charged_minor, found.would_minor, found.change_minor) == (1085, 547, -538)
    assert found.customers[0].change == pytest.approx(-0.5)


def test_the_ceiling_is_that_of_the_same_deadline(now):
    account = wallet(balance_minor=10_000)
    run(account, 9999)
    found = previews.preview(book=draft(now, node_hour="720"), month=costs.month_of())
    assert (found.charged_minor, found.would_minor) == (720, 1440)


def test_ranges_of_fewer_nodes_count_as_they_were(now):
    account = wallet(balance_minor=10_000)
    usage = Usage.of([Range(600, 2), Range(600, 1)], completed=True)
    assert run(account, 0, usage=usage).total_minor == 180
    assert previews.preview(book=draft(now, node_hour="720"), month=costs.month_of()).would_minor == 360


def test_what_the_draft_does_not_price_is_named(now):
    account = wallet(balance_minor=10_000)
    run(account, 1800)
    bare = PriceBookFactory()
    found = previews.preview(book=bare, month=costs.month_of())
    assert found.unpriced == {"metered · small · 2": 1}
    assert found.would_minor == found.charged_minor == 360


def test_runs_that_can_not_be_reckoned_again_are_told(now):
    run(wallet(balance_minor=10_000), 1800, labels=False)
    found = previews.preview(book=draft(now, node_hour="720"), month=costs.month_of())
    assert (found.unknown, found.would_minor) == (1, 360)


def test_another_month_and_another_currency_are_left_out(now):
    run(wallet(balance_minor=10_000), 1800)
    assert previews.preview(book=draft(now), month=costs.month_of().before).runs == 0
    assert previews.preview(book=PriceBookFactory(currency="CNY"), month=costs.month_of()).runs == 0


def test_two_books(now):
    new = draft(now, node_hour="300")
    PriceFactory(book=new, kind=PriceKind.FIXED_EPOCH, product="fixed", amount=Decimal(2))
    new.prices.filter(kind=PriceKind.MINIMUM).delete()
    changes = {change.name: (change.old, change.new, change.fraction) for change in previews.diff(old=now, new=new)}
    assert [value[:2] for value in changes.values()] == [(None, 2), (5, None), (360, 300)]
    assert list(changes)[2] == "per node and hour, small, every product"
    assert changes["per node and hour, small, every product"][2] == pytest.approx(-1 / 6)
    assert previews.diff(old=now, new=draft(now)) == []


# What can't be published


def missing(made: PriceBook) -> str:
    with pytest.raises(BookRefused) as refused:
        pricebooks.publish(book=made)
    return str(refused.value.message)


def test_a_new_node_spec_without_a_price(now):
    NodeSpecFactory(name="large")
    assert missing(draft(now)) == "This price is missing: per node and hour, large, every product."


def test_a_tier_that_begins_too_late(now):
    made = draft(now)
    spec = made.prices.get(kind=PriceKind.NODE_HOUR).node_spec
    PriceFactory(book=made, node_spec=spec, product="fixed", nodes_from=4)
    pricebooks.publish(book=made)  # the general price covers fewer nodes
    other = pricebooks.copy(book=made)
    PriceFactory(book=other, kind=PriceKind.FIXED_EPOCH, node_spec=spec, product="fixed", nodes_from=4)
    assert "fixed, per epoch and node, small, product fixed" in missing(other)


def test_a_product_by_the_epoch_needs_each_node_spec(now):
    large = NodeSpecFactory(name="large")
    made = draft(now)
    PriceFactory(book=made, node_spec=large)
    PriceFactory(book=made, kind=PriceKind.FIXED_EPOCH, node_spec=large, product="fixed")
    assert missing(made) == "This price is missing: fixed, per epoch and node, small, product fixed."


def test_what_is_sold_by_the_epoch_now_stays_priced(now):
    made = draft(now)
    spec = made.prices.get(kind=PriceKind.NODE_HOUR).node_spec
    fixed = PriceFactory(book=made, kind=PriceKind.FIXED_EPOCH, node_spec=spec, product="fixed")
    pricebooks.publish(book=made)
    other = pricebooks.copy(book=made)
    other.prices.filter(kind=PriceKind.FIXED_EPOCH).delete()
    assert missing(other) == f"This price is missing: {pricebooks.price_name(fixed)}."
