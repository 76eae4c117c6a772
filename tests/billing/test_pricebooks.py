"""Price books: which prices hold when, that published ones stay, what they would have cost, how two differ."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal

import pytest
from django.db import IntegrityError, connection, transaction
from django.utils import timezone

from billing import charges, costs, price_simulation, pricebooks
from billing.errors import BookRefused, NotPriced
from billing.models import Account, NodeSpec, Price, PriceBook, Receipt
from billing.pricing import PriceKind
from billing.usage import Range, Usage
from tests.factories.billing import NodeSpecFactory, PriceBookFactory, PriceFactory, book, quote, wallet
from tests.racing import raised, together

pytestmark = pytest.mark.django_db


@pytest.fixture
def published(db) -> PriceBook:
    """The current prices: small nodes at 360 an hour, at least 5 a run."""
    return book(minimum="5")


@pytest.fixture
def small(published) -> NodeSpec:
    return NodeSpec.objects.get(name="small")


def draft_of(original: PriceBook, **amounts: str) -> PriceBook:
    """Copy a book and change the amounts of its kinds of price."""
    draft = pricebooks.copy(book=original)
    for kind, amount in amounts.items():
        draft.prices.filter(kind=kind).update(amount=Decimal(amount))
    return draft


def refusal(draft: PriceBook, **options) -> str:
    with pytest.raises(BookRefused) as refused:
        pricebooks.publish(book=draft, **options)
    return str(refused.value.message)


def test_the_latest_book_that_has_begun_is_current(published):
    now = timezone.now()
    later = pricebooks.publish(book=draft_of(published), effective_from=now + timedelta(days=2))
    draft_of(published)  # a draft is never current
    current = lambda at=None: pricebooks.current_book(currency="USD", at=at)
    assert current() == current(now + timedelta(days=2, seconds=-1)) == published
    assert current(later.effective_from) == current(now + timedelta(days=99)) == later
    for currency, at in [("EUR", None), ("USD", now - timedelta(days=1))]:
        with pytest.raises(NotPriced, match=f"no prices in {currency}"):
            pricebooks.current_book(currency=currency, at=at)


class TestPublish:
    def test_begins_now_if_its_own_date_has_passed(self, published):
        assert published.published_at is not None
        assert timezone.now() - published.effective_from < timedelta(minutes=1)
        draft = draft_of(published)
        PriceBook.objects.filter(pk=draft.pk).update(effective_from=timezone.now() - timedelta(days=30))
        assert timezone.now() - pricebooks.publish(book=draft).effective_from < timedelta(minutes=1)

    def test_is_refused_twice_in_the_past_or_at_the_time_of_another_book(self, published):
        now, starts = timezone.now(), timezone.now() + timedelta(days=1)
        assert "already published" in refusal(published)
        assert "date in the future" in refusal(draft_of(published), effective_from=now - timedelta(seconds=1))
        pricebooks.publish(book=draft_of(published), effective_from=starts)
        assert "same time" in refusal(draft_of(published), effective_from=starts)
        euros = PriceBookFactory(currency="EUR")
        PriceFactory(book=euros, node_spec=NodeSpec.objects.get())
        pricebooks.publish(book=euros, effective_from=starts)  # books of two currencies may begin together

    def test_needs_an_hourly_price_of_every_number_of_nodes_and_product_for_each_spec_on_offer(self, published):
        large = NodeSpecFactory(name="large")
        draft, incomplete = draft_of(published), draft_of(published)
        PriceFactory(book=incomplete, node_spec=large, nodes_from=4)
        PriceFactory(book=incomplete, node_spec=large, product="special")
        for each in (draft, incomplete):
            assert refusal(each) == "A price is missing: per node and hour, large, every product. Add it."
        NodeSpec.objects.filter(name="large").update(is_active=False)
        assert pricebooks.publish(book=draft).published_at

    def test_needs_a_fixed_price_for_each_spec_from_one_node_on(self, published, small):
        large = NodeSpecFactory(name="large")
        draft = draft_of(published)
        PriceFactory(book=draft, kind=PriceKind.FIXED_EPOCH, node_spec=large, product="fixed")
        assert "per node and hour, large" in refusal(draft)  # the fixed price is no hourly one
        PriceFactory(book=draft, node_spec=large)
        missing = "A price is missing: fixed, per epoch and node, small, product fixed. Add it."
        assert refusal(draft) == missing
        PriceFactory(book=draft, node_spec=small, product="fixed", nodes_from=4)  # the general price covers fewer nodes
        tier = PriceFactory(book=draft, kind=PriceKind.FIXED_EPOCH, node_spec=small, product="fixed", nodes_from=4)
        assert refusal(draft) == missing
        Price.objects.filter(pk=tier.pk).update(nodes_from=1)
        assert pricebooks.publish(book=draft).published_at

    def test_is_compared_with_the_book_that_it_will_replace(self, published, small):
        draft, later = draft_of(published), draft_of(published)  # `later` lacks the price that `draft` adds
        fixed = PriceFactory(book=draft, kind=PriceKind.FIXED_EPOCH, node_spec=small, product="fixed")
        starts = timezone.now() + timedelta(days=1)
        pricebooks.publish(book=draft, effective_from=starts)
        after = refusal(later, effective_from=starts + timedelta(days=1))
        assert after == f"A price is missing: {pricebooks.price_name(fixed)}. Add it."
        assert pricebooks.publish(book=later, effective_from=starts - timedelta(hours=1)).published_at


class TestPublishedBook:
    @pytest.mark.parametrize(
        "statement",
        [
            "UPDATE billing_price SET amount = 1 WHERE book_id = {published}",
            "UPDATE billing_price SET book_id = {draft} WHERE book_id = {published}",
            "UPDATE billing_price SET book_id = {published}, nodes_from = 9 WHERE book_id = {draft}",
            "DELETE FROM billing_price WHERE book_id = {published}",
            (
                "INSERT INTO billing_price (book_id, kind, product, nodes_from, amount) "
                "VALUES ({published}, 'epoch', '', 1, 1)"
            ),
            "UPDATE billing_pricebook SET published_at = NULL WHERE id = {published}",
            "UPDATE billing_pricebook SET effective_from = now() WHERE id = {published}",
            "UPDATE billing_pricebook SET currency = 'EUR' WHERE id = {published}",
            "DELETE FROM billing_pricebook WHERE id = {published}",
        ],
    )
    def test_is_not_edited_by_raw_sql(self, published, statement):
        draft = draft_of(published)
        rows = pricebooks.price_rows(published)
        with (
            pytest.raises(IntegrityError, match="never edited, only superseded"),
            transaction.atomic(),
            connection.cursor() as cursor,
        ):
            cursor.execute(statement.format(published=published.pk, draft=draft.pk))
        assert pricebooks.price_rows(published) == rows
        draft.prices.update(amount=1)
        draft.delete()
        assert PriceBook.objects.count() == 1

    @pytest.mark.django_db(transaction=True)
    def test_has_a_price_added_meanwhile_or_refuses_it(self, published):
        for _ in range(3):
            draft = draft_of(published)

            def add(draft=draft):
                with transaction.atomic():
                    return PriceFactory(book=draft, node_spec=None, kind=PriceKind.EPOCH)

            added, result = together(add, lambda draft=draft: pricebooks.publish(book=draft))
            assert raised([result]) == []
            if isinstance(added, IntegrityError):
                assert not result.prices.filter(kind=PriceKind.EPOCH).exists()
            else:
                assert result.prices.filter(kind=PriceKind.EPOCH).exists()


class TestSimulation:
    """A month at the prices of a draft."""

    def run(self, account: Account, seconds: float, *, usage: Usage | None = None, labels: bool = True) -> Receipt:
        offer = quote(account, seconds=3600, nodes=2)
        names = {"node_spec": "small", "product": "metered"} if labels else {}
        hold = charges.hold(quote=offer, reference=f"order:{offer.pk}", labels=names)
        return charges.settle(hold=hold, usage=usage or Usage(seconds, completed=True), title="A run")

    def simulate(self, draft: PriceBook) -> price_simulation.Simulation:
        return price_simulation.simulate_month(book=draft, month=costs.month_of())

    @pytest.fixture
    def account(self, published):
        return wallet(balance_minor=100_000)

    def test_is_for_each_customer_and_all_and_costs_the_same_at_the_same_prices(self, published, account):
        other = wallet(balance_minor=10_000)
        self.run(account, 1800)  # half an hour on two nodes: 360
        self.run(account, 1)  # the minimum charge
        self.run(other, 3600)  # 720
        unchanged = self.simulate(draft_of(published))
        assert (unchanged.runs, unchanged.simulated_minor, unchanged.change_fraction) == (3, 1085, 0)
        assert price_simulation.simulate_month(book=published, month=costs.month_of().previous).runs == 0
        simulation = self.simulate(draft_of(published, node_hour="180", minimum="7"))
        assert [(row.organization, row.charged_minor, row.simulated_minor) for row in simulation.customers] == [
            (other.organization, 720, 360),
            (account.organization, 365, 187),
        ]
        assert (simulation.charged_minor, simulation.simulated_minor, simulation.change_minor) == (1085, 547, -538)
        assert simulation.customers[0].change_fraction == pytest.approx(-0.5)

    @pytest.mark.parametrize(
        ("usage", "charged"),
        [(Usage(9999, completed=True), 720), (Usage.of([Range(600, 2), Range(600, 1)], completed=True), 180)],
        ids=["the ceiling is that of the same deadline", "ranges of fewer nodes count as they were"],
    )
    def test_rates_the_usage_as_it_was(self, published, account, usage, charged):
        assert self.run(account, 0, usage=usage).total_minor == charged
        assert self.simulate(draft_of(published, node_hour="720")).simulated_minor == 2 * charged

    def test_names_what_it_cannot_price(self, published, account):
        self.run(account, 1800)
        simulation = self.simulate(PriceBookFactory())
        assert simulation.unpriced == {"metered · small · 2": 1}  # product, node spec and nodes: runs
        assert simulation.simulated_minor == simulation.charged_minor == 360
        self.run(account, 1800, labels=False)  # like a run from before labels were stored, which keeps its cost
        simulation = self.simulate(draft_of(published, node_hour="720"))
        assert (simulation.without_usage, simulation.simulated_minor) == (1, 720 + 360)


def test_the_difference_of_two_books_is_their_added_removed_and_changed_prices(published):
    new = draft_of(published, node_hour="300")
    PriceFactory(book=new, kind=PriceKind.FIXED_EPOCH, product="fixed", amount=Decimal(2))
    new.prices.filter(kind=PriceKind.MINIMUM).delete()
    changes = {
        change.name: (change.old, change.new, change.fraction)
        for change in price_simulation.diff(old=published, new=new)
    }
    assert [value[:2] for value in changes.values()] == [(None, 2), (5, None), (360, 300)]
    assert list(changes)[2] == "per node and hour, small, every product"
    assert changes["per node and hour, small, every product"][2] == pytest.approx(-1 / 6)
    assert price_simulation.diff(old=published, new=draft_of(published)) == []
