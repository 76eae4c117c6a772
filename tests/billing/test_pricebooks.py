"""Which prices hold when, and that published ones stay."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal

import pytest
from django.db import IntegrityError, connection, transaction
from django.utils import timezone

from billing import pricebooks
from billing.errors import BookRefused, NotPriced
from billing.models import NodeSpec, Price, PriceBook
from billing.pricing import PriceKind, PriceRow
from tests.factories.billing import NodeSpecFactory, PriceBookFactory, PriceFactory, book
from tests.racing import raised, together


def draft_of(published):
    return pricebooks.copy(book=published)


@pytest.mark.django_db
class TestCurrentBook:
    def test_the_latest_that_has_begun(self):
        now = timezone.now()
        first = book()
        later = pricebooks.publish(book=draft_of(first), effective_from=now + timedelta(days=2))
        draft_of(first)  # a draft never holds
        assert pricebooks.current_book(currency="USD") == first
        assert pricebooks.current_book(currency="USD", at=now + timedelta(days=2, seconds=-1)) == first
        assert pricebooks.current_book(currency="USD", at=later.effective_from) == later
        assert pricebooks.current_book(currency="USD", at=now + timedelta(days=99)) == later

    def test_none_yet(self):
        book("USD")
        for currency, at in [("EUR", None), ("USD", timezone.now() - timedelta(days=1))]:
            with pytest.raises(NotPriced, match=f"no prices in {currency}"):
                pricebooks.current_book(currency=currency, at=at)


@pytest.mark.django_db
def test_prices_as_plain_data():
    made = book(hourly="90", minimum="5")
    assert sorted(pricebooks.price_rows(made), key=lambda row: row.kind) == [
        PriceRow(PriceKind.MINIMUM, Decimal(5)),
        PriceRow(PriceKind.NODE_HOUR, Decimal(90), node_spec="small"),
    ]


@pytest.mark.django_db
class TestPublish:
    def test_from_now_on(self):
        before = timezone.now()
        made = book()
        assert before <= made.effective_from <= timezone.now()
        assert made.published_at is not None

    def test_twice(self):
        with pytest.raises(BookRefused, match="published already"):
            pricebooks.publish(book=book())

    def test_for_the_past(self):
        with pytest.raises(BookRefused, match="date to come"):
            pricebooks.publish(book=draft_of(book()), effective_from=timezone.now() - timedelta(seconds=1))

    def test_a_drafts_own_date_that_has_passed_means_now(self):
        draft = draft_of(book())
        PriceBook.objects.filter(pk=draft.pk).update(effective_from=timezone.now() - timedelta(days=30))
        assert timezone.now() - pricebooks.publish(book=draft).effective_from < timedelta(minutes=1)

    def test_at_the_moment_of_another_book(self):
        first = book()
        starts = timezone.now() + timedelta(days=1)
        pricebooks.publish(book=draft_of(first), effective_from=starts)
        with pytest.raises(BookRefused, match="same moment"):
            pricebooks.publish(book=draft_of(first), effective_from=starts)
        pricebooks.publish(book=book_in("EUR"), effective_from=starts)  # another currency's moment is its own

    def test_without_a_price_for_a_spec_on_offer(self):
        draft = draft_of(book())
        NodeSpecFactory(name="new")
        with pytest.raises(BookRefused, match="new"):
            pricebooks.publish(book=draft)
        NodeSpec.objects.filter(name="new").update(is_active=False)
        assert pricebooks.publish(book=draft).published_at

    def test_a_price_of_another_book_or_kind_or_tier_does_not_count(self):
        """Each of these is a price of the spec, and none is the price of an hour of one node in this book."""
        first = book()
        spec = NodeSpec.objects.get()
        draft = PriceBookFactory()
        PriceFactory(book=draft, node_spec=spec, kind=PriceKind.FIXED_EPOCH)
        PriceFactory(book=draft, node_spec=spec, nodes_from=4)
        PriceFactory(book=draft, node_spec=spec, product="special")
        assert first.prices.filter(node_spec=spec, kind=PriceKind.NODE_HOUR, product="", nodes_from=1).exists()
        with pytest.raises(BookRefused, match="small"):
            pricebooks.publish(book=draft)


def book_in(currency):
    made = PriceBookFactory(currency=currency)
    for spec in NodeSpec.objects.all():
        PriceFactory(book=made, node_spec=spec)
    return made


@pytest.mark.django_db
def test_a_copy_is_a_draft_with_the_same_prices():
    first = book(hourly="90", minimum="5")
    draft = draft_of(first)
    assert draft.published_at is None
    assert draft.effective_from is None
    assert pricebooks.price_rows(draft) == pricebooks.price_rows(first)
    Price.objects.filter(book=draft, kind=PriceKind.NODE_HOUR).update(amount=1)
    assert {row.amount for row in pricebooks.price_rows(first)} == {Decimal(90), Decimal(5)}


@pytest.mark.django_db
def test_a_copy_of_a_copy_of_a_copy():
    made = book()
    for _ in range(20):
        made = draft_of(made)
    assert made.name.startswith("Copy of Copy of")


@pytest.mark.django_db(transaction=True)
class TestPublishedStays:
    """In raw SQL, since whoever has a console has a way around Python."""

    @pytest.mark.parametrize(
        "statement",
        [
            "UPDATE billing_price SET amount = 1 WHERE book_id = {published}",
            "UPDATE billing_price SET book_id = {draft} WHERE book_id = {published}",
            "UPDATE billing_price SET book_id = {published}, nodes_from = 9 WHERE book_id = {draft}",
            "DELETE FROM billing_price WHERE book_id = {published}",
            (
                "INSERT INTO billing_price (book_id, kind, product, nodes_from, amount) "
                "VALUES ({published}, 'minimum', '', 1, 1)"
            ),
            "UPDATE billing_pricebook SET published_at = NULL WHERE id = {published}",
            "UPDATE billing_pricebook SET effective_from = now() WHERE id = {published}",
            "UPDATE billing_pricebook SET currency = 'EUR' WHERE id = {published}",
            "DELETE FROM billing_pricebook WHERE id = {published}",
        ],
    )
    def test_whichever_way_it_is_edited(self, statement):
        published = book()
        draft = draft_of(published)
        rows = pricebooks.price_rows(published)
        with (
            pytest.raises(IntegrityError, match="never edited, only superseded"),
            connection.cursor() as cursor,
        ):
            cursor.execute(statement.format(published=published.pk, draft=draft.pk))
        assert pricebooks.price_rows(published) == rows

    def test_a_draft_is_edited_and_deleted(self):
        draft = draft_of(book())
        draft.prices.update(amount=1)
        draft.delete()
        assert PriceBook.objects.count() == 1

    def test_a_price_that_comes_while_the_book_is_published(self):
        """Whichever of the two is first, the other sees it: the price is in the book before, or not at all."""
        published = book()
        for _ in range(5):
            draft = draft_of(published)

            def add(draft=draft):
                with transaction.atomic():
                    PriceFactory(book=draft, node_spec=None, kind=PriceKind.MINIMUM)
                    return timezone.now()

            added, made = together(add, lambda draft=draft: pricebooks.publish(book=draft))
            assert raised([made]) == []
            if isinstance(added, IntegrityError):
                assert not made.prices.filter(kind=PriceKind.MINIMUM).exists()
            else:
                assert added <= made.published_at + timedelta(seconds=5)
                assert made.prices.filter(kind=PriceKind.MINIMUM).exists()
