"""Offers: made from the book that holds, kept as they were, gone after their time, nobody else's."""

from __future__ import annotations

import uuid
from datetime import timedelta
from decimal import Decimal

import pytest
from django.utils import timezone

from billing import pricing, quotes
from billing.errors import NotPriced, NoWallet, QuoteExpired, QuoteRefused
from billing.models import NodeSpec, Quote
from console.accounts.errors import NotFound
from tests.factories.accounts import MembershipFactory
from tests.factories.billing import NodeSpecFactory, book, quote, wallet


@pytest.fixture
def account(db):
    book(hourly="360", minimum="5")
    return wallet()


def make(account, *, spec="small", mode=pricing.Mode.METERED, organization=None, **changes):
    member = MembershipFactory(organization=account.organization)
    fields = {
        "organization": organization or account.organization,
        "user": member.user,
        "purchase": pricing.Purchase("metered", mode, spec, 2, 10),
        "payload": {"code_path": "train.py"},
        "estimate": pricing.Estimate(600.0, 900.0, "history", 3),
        "headroom": Decimal(2),
        "most_seconds": 7200,
        "max_seconds": None,
        "ceiling_minor": None,
    }
    return quotes.make_quote(**fields | changes)


def test_keeps_prices_reasons_and_figures(account, settings):
    made = make(account)
    made.refresh_from_db()
    assert (made.p50_minor, made.p90_minor, made.ceiling_minor) == (120, 180, 360)
    assert made.deadline_seconds == 1801
    assert made.basis == {
        "p50_seconds": 600.0,
        "p90_seconds": 900.0,
        "source": "history",
        "runs": 3,
        "measured_nodes": [],
        "efficiency": None,
    }
    assert made.purchase == {"code_path": "train.py"}
    assert sum(line["amount_minor"] for line in made.lines) == made.ceiling_minor
    assert pricing.Terms.from_json(made.terms).ceiling_minor == made.ceiling_minor
    assert made.expires_at - made.created_at == pytest.approx(
        timedelta(seconds=settings.QUOTE_TTL_SECONDS), abs=timedelta(seconds=5)
    )


def test_new_prices_leave_it_as_it_is(account):
    made = make(account)
    book(hourly="720")
    made.refresh_from_db()
    assert made.ceiling_minor == 360
    assert make(account).ceiling_minor == 720


def test_expiry(account):
    made = make(account)
    quotes.require_valid(made)
    Quote.objects.filter(pk=made.pk).update(expires_at=timezone.now())
    made.refresh_from_db()
    with pytest.raises(QuoteExpired):
        quotes.require_valid(made)


@pytest.mark.parametrize("key", ["garbage", "", "0", str(uuid.UUID(int=7)), 10**40])
def test_no_such_quote(account, key):
    with pytest.raises(NotFound):
        quotes.quote_for(organization=account.organization, quote_id=key)


def test_another_organizations_quote_does_not_exist(account):
    made = make(account)
    assert quotes.quote_for(organization=account.organization, quote_id=str(made.pk)) == made
    with pytest.raises(NotFound):
        quotes.quote_for(organization=wallet().organization, quote_id=made.pk)


def test_without_a_wallet(account):
    with pytest.raises(NoWallet):
        make(account, organization=MembershipFactory().organization)


def test_without_prices_in_the_wallets_currency(account):
    with pytest.raises(NotPriced, match="no prices in EUR"):
        make(wallet(currency="EUR"))


def test_a_choice_without_a_price_is_told_at_its_field(account):
    NodeSpecFactory(name="unpriced")
    with pytest.raises(NotPriced) as caught:
        make(account, spec="unpriced")
    assert set(caught.value.fields) == {"node_spec"}
    with pytest.raises(NotPriced):
        make(account, mode=pricing.Mode.FIXED)


@pytest.mark.parametrize(
    ("change", "field", "sentence"),
    [
        ({"max_seconds": 7201}, "max_seconds", "The longest run of this product is 7200 seconds."),
        ({"ceiling_minor": 11}, "ceiling_minor", "This ceiling is too small for the choice: it takes $0.12 at least."),
    ],
)
def test_a_limit_that_cannot_be_met_is_told_at_its_field(account, change, field, sentence):
    with pytest.raises(QuoteRefused) as caught:
        make(account, **change)
    assert {name: str(text) for name, text in caught.value.fields.items()} == {field: sentence}
    assert not Quote.objects.exists()


def test_a_spec_taken_off_the_offer_keeps_its_quotes(account):
    made = quote(account)
    NodeSpec.objects.update(is_active=False)
    quotes.require_valid(Quote.objects.get(pk=made.pk))
