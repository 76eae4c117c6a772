"""Quotes: priced from the current book, kept as they were, expired after their time; their basis in words."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal

import pytest
from django.utils import timezone

from billing import messages, pricing, quotes
from billing.errors import NotPriced, QuoteExpired, QuoteRefused
from billing.models import NodeSpec, Quote
from tests.factories.accounts import MembershipFactory
from tests.factories.billing import NodeSpecFactory, book


def new_quote(account, *, spec="small", **changes):
    member = MembershipFactory(organization=account.organization)
    fields = {
        "organization": account.organization,
        "user": member.user,
        "purchase": pricing.Purchase("metered", pricing.Mode.METERED, spec, nodes=2, epochs=10),
        "payload": {"code_path": "train.py"},
        "estimate": pricing.Estimate(600.0, 900.0, "history", runs=3),
        "headroom": Decimal(2),
        "max_deadline_seconds": 7200,
        "max_seconds": None,
        "ceiling_minor": None,
    }
    return quotes.make_quote(**fields | changes)


def test_a_quote_keeps_its_figures_and_is_valid_until_it_expires(account, settings):
    quote = new_quote(account)
    book(hourly="720")
    quote.refresh_from_db()
    assert (quote.p50_minor, quote.p90_minor, quote.ceiling_minor) == (120, 180, 360)  # 2 nodes, 600, 900 and 1800 s
    assert quote.deadline_seconds == 1800
    assert (quote.basis["p90_seconds"], quote.basis["source"], quote.basis["runs"]) == (900.0, "history", 3)
    assert quote.purchase == {"code_path": "train.py"}
    assert sum(line["amount_minor"] for line in quote.lines) == quote.ceiling_minor
    assert pricing.Terms.from_json(quote.terms).ceiling_minor == quote.ceiling_minor
    assert quote.expires_at - quote.created_at == pytest.approx(
        timedelta(seconds=settings.QUOTE_TTL_SECONDS), abs=timedelta(seconds=5)
    )
    assert new_quote(account).ceiling_minor == 720
    NodeSpec.objects.update(is_active=False)
    quotes.require_valid(Quote.objects.get(pk=quote.pk))
    Quote.objects.filter(pk=quote.pk).update(expires_at=timezone.now())
    with pytest.raises(QuoteExpired):
        quotes.require_valid(Quote.objects.get(pk=quote.pk))


@pytest.mark.parametrize(
    ("changes", "error", "field", "sentence"),
    [
        ({"spec": "unpriced"}, NotPriced, "node_spec", "There is no price for this product, node spec and number"),
        ({"max_seconds": 7201}, QuoteRefused, "max_seconds", "The longest time of this product is 7200 seconds."),
        # A minute of two nodes, the shortest run.
        ({"ceiling_minor": 11}, QuoteRefused, "ceiling_minor", "The ceiling must be at least $0.12 for"),
    ],
)
def test_a_choice_is_refused_at_its_field(account, changes, error, field, sentence):
    NodeSpecFactory(name="unpriced")
    with pytest.raises(error) as caught:
        new_quote(account, **changes)
    assert str(caught.value.fields[field]).startswith(sentence)
    assert not Quote.objects.exists()


@pytest.mark.parametrize(
    ("basis", "words", "label"),
    [
        ({"source": "history", "runs": 1}, "Based on 1 earlier run of", "High estimate"),
        ({"source": "history", "runs": 7}, "Based on 7 earlier runs of", "90% of runs cost less than"),
        ({"source": "history", "runs": 7, "measured_nodes": [1]}, "Scaled", "High estimate"),
        ({"source": "probe", "runs": 7}, "Based on 7 free estimates", "High estimate"),
        ({"source": "customer", "runs": 0}, "Assumes the longest time that you set", "High estimate"),
        ({"source": "reference", "runs": 0}, "No run of this script has been measured yet", "High estimate"),
    ],
)
def test_the_basis_of_an_estimate_is_named(basis, words, label):
    """A share of runs is claimed only where enough were measured."""
    assert words in messages.basis_sentence(basis)
    assert messages.p90_label(basis) == label
