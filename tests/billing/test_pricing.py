"""Prices, in worked numbers and by properties. No database."""

from __future__ import annotations

import dataclasses
from decimal import Decimal
from fractions import Fraction
from math import floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.pricing import (
    Estimate,
    Mode,
    Offer,
    PriceKind,
    PriceRow,
    PricingError,
    Purchase,
    Terms,
    Usage,
    affordable_seconds,
    quote,
    rate,
    round_minor,
)

ESTIMATE = Estimate(600, 900, "reference")
PRICES = [
    PriceRow(PriceKind.NODE_HOUR, Decimal(90), node_spec="nano"),
    PriceRow(PriceKind.NODE_HOUR, Decimal(81), node_spec="nano", nodes_from=4),
    PriceRow(PriceKind.NODE_HOUR, Decimal(60), node_spec="nano", product="cheap"),
    PriceRow(PriceKind.NODE_HOUR, Decimal(300), node_spec="medium"),
    PriceRow(PriceKind.FIXED_EPOCH, Decimal("0.8"), node_spec="nano", product="fixed"),
    PriceRow(PriceKind.EPOCH, Decimal("2.5"), product="coached"),
    PriceRow(PriceKind.MINIMUM, Decimal(5)),
]


def offer(
    product: str = "metered",
    *,
    mode: Mode = Mode.METERED,
    spec: str = "nano",
    nodes: int = 1,
    epochs: int = 10,
    prices: list[PriceRow] = PRICES,
    estimate: Estimate = ESTIMATE,
    max_seconds: int | None = None,
    ceiling_minor: int | None = None,
    most_seconds: int = 7 * 24 * 3600,
) -> Offer:
    return quote(
        prices,
        Purchase(product, mode, spec, nodes, epochs),
        estimate,
        headroom=Decimal(2),
        least_seconds=300,
        most_seconds=most_seconds,
        max_seconds=max_seconds,
        ceiling_minor=ceiling_minor,
    )


# --- Worked numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("amount", "minor"), [("0.4999", 0), ("0.5", 1), ("1.5", 2), ("2.5", 3), ("2.4999999", 2), ("-3", -3), ("0", 0)]
)
def test_round_half_up(amount, minor):
    assert round_minor(Decimal(amount)) == minor


def test_a_metered_quote_is_the_deadline_at_the_hourly_price():
    made = offer()  # p90 of 900 s, doubled, and the second that a fraction may need: 1801 s at 90 an hour = 45.025
    assert (made.deadline_seconds, made.ceiling_minor) == (1801, 45)
    assert (made.p50_minor, made.p90_minor) == (15, 23)  # 600 s = 15.0, 900 s = 22.5
    assert [(line.rule, line.quantity, line.unit_minor, line.amount_minor) for line in made.lines] == [
        ("time_used", "0.500278", "90", 45)
    ]


def test_tiers_by_node_count():
    assert offer(nodes=3, max_seconds=3600).ceiling_minor == 3 * 90
    assert offer(nodes=4, max_seconds=3600).ceiling_minor == 4 * 81
    assert offer(nodes=64, max_seconds=3600).ceiling_minor == 64 * 81


def test_a_products_own_price_goes_before_everyones_tier():
    assert offer("cheap", nodes=4, max_seconds=3600).ceiling_minor == 4 * 60


def test_a_price_of_another_spec_or_product_is_never_used():
    with pytest.raises(PricingError) as caught:
        offer(spec="large")
    assert (caught.value.code, caught.value.field) == ("not_priced", "node_spec")
    with pytest.raises(PricingError) as caught:
        offer("metered", mode=Mode.FIXED)  # only the product `fixed` has a fixed price
    assert (caught.value.code, caught.value.field) == ("not_priced", "node_spec")


def test_epochs_are_charged_when_the_run_completes():
    made = offer("coached", max_seconds=3600)  # 90 for the hour, 10 epochs at 2.5
    assert [line.amount_minor for line in made.lines] == [90, 25]
    assert rate(Usage(3600, completed=True), made.terms).total_minor == 115
    assert rate(Usage(3600, completed=False), made.terms).total_minor == 90


def test_the_least_charge_is_a_line_of_its_own():
    made = offer(max_seconds=60)  # 1.5, rounded to 2, raised to 5
    assert [(line.rule, line.amount_minor) for line in made.lines] == [("time_used", 2), ("minimum", 3)]
    charge = rate(Usage(1, completed=False), made.terms)
    assert [(line.rule, line.amount_minor) for line in charge.lines] == [("time_used", 0), ("minimum", 5)]
    assert charge.total_minor == 5


@pytest.mark.parametrize("seconds", [0, -1, -0.001])
def test_no_time_costs_nothing(seconds):
    assert rate(Usage(seconds, completed=False), offer().terms) == rate(Usage(0, completed=True), offer().terms)
    assert rate(Usage(seconds, completed=True), offer().terms).total_minor == 0


def test_what_is_above_the_ceiling_is_shown_and_not_charged():
    made = offer(max_seconds=3600)
    charge = rate(Usage(7200, completed=False), made.terms)
    assert [(line.rule, line.amount_minor) for line in charge.lines] == [("time_used", 180), ("above_ceiling", -90)]
    assert charge.total_minor == 90


def test_a_fixed_price_is_the_price():
    made = offer("fixed", mode=Mode.FIXED, nodes=4, epochs=10)  # 10 epochs x 4 nodes x 0.8
    assert (made.ceiling_minor, made.p50_minor, made.p90_minor) == (32, 32, 32)
    for seconds in (1, 600, 1801, 10**6):
        assert rate(Usage(seconds, completed=True), made.terms).total_minor == 32
    assert rate(Usage(200, completed=False), made.terms).total_minor == 18  # 4 x 200 s at 81 an hour
    assert rate(Usage(10**6, completed=False), made.terms).total_minor == 32


def test_a_fixed_price_under_the_least_charge():
    made = offer("fixed", mode=Mode.FIXED, epochs=1)
    assert [(line.rule, line.amount_minor) for line in made.lines] == [("fixed_price", 1), ("minimum", 4)]
    assert rate(Usage(10, completed=True), made.terms).total_minor == made.ceiling_minor == 5


def test_a_customers_time_limit():
    assert offer(max_seconds=120).deadline_seconds == 120  # under the least that a silent customer gets
    with pytest.raises(PricingError) as caught:
        offer(max_seconds=3601, most_seconds=3600)
    error = caught.value
    assert (error.code, error.field, error.minimum) == ("max_seconds_too_large", "max_seconds", 3600)


def test_the_deadline_keeps_to_the_products_bounds():
    assert offer(estimate=Estimate(1, 2, "reference")).deadline_seconds == 300
    assert offer(most_seconds=1000).deadline_seconds == 1000


def test_a_customers_ceiling_shortens_the_run():
    made = offer(ceiling_minor=20)
    assert made.deadline_seconds == 800  # 20 at 90 an hour
    assert made.ceiling_minor == 20
    assert offer(ceiling_minor=10**9).ceiling_minor == 45  # a ceiling is no wish to pay more
    hour = [PriceRow(PriceKind.NODE_HOUR, Decimal(100), node_spec="nano")]
    assert offer(prices=hour, ceiling_minor=100, max_seconds=7200).deadline_seconds == 3600  # not 3599: 100/3600 recurs


@pytest.mark.parametrize(("product", "least"), [("metered", 5), ("coached", 27)])
def test_the_least_ceiling_that_is_named_works_and_buys_a_minute(product, least):
    with pytest.raises(PricingError) as caught:
        offer(product, ceiling_minor=least - 1)
    error = caught.value
    assert (error.code, error.field, error.minimum) == ("ceiling_too_small", "ceiling_minor", least)
    assert offer(product, ceiling_minor=least).deadline_seconds >= 60


def test_a_fixed_price_over_the_customers_ceiling():
    with pytest.raises(PricingError) as caught:
        offer("fixed", mode=Mode.FIXED, nodes=4, ceiling_minor=31)
    assert (caught.value.code, caught.value.minimum) == ("ceiling_too_small", 32)
    assert offer("fixed", mode=Mode.FIXED, nodes=4, ceiling_minor=32).ceiling_minor == 32


def test_a_half_stays_a_half_where_the_hours_recur():
    """1200 s are a third of an hour: 16.5 x 0.333... must be 5.5, which is 6, and not 5.4999... ."""
    terms = Terms(Mode.METERED, 1, 1, Decimal("16.5"), Decimal(0), 0, 100)
    assert rate(Usage(1200, completed=False), terms).total_minor == 6


def test_terms_survive_json():
    for terms in (offer("coached").terms, offer("fixed", mode=Mode.FIXED).terms):
        assert Terms.from_json(terms.to_json()) == terms


# --- Properties -------------------------------------------------------------------------------------------------------

AMOUNTS = st.decimals(0, 100_000, places=4)
SECONDS = st.one_of(st.integers(0, 10**7), st.floats(0, 1e7, allow_nan=False))


@st.composite
def offers(draw: st.DrawFn) -> Offer:
    mode = draw(st.sampled_from(Mode))
    prices = [
        PriceRow(PriceKind.NODE_HOUR, draw(AMOUNTS), node_spec="nano"),
        PriceRow(PriceKind.FIXED_EPOCH, draw(AMOUNTS), node_spec="nano"),
        PriceRow(PriceKind.EPOCH, draw(AMOUNTS)),
        PriceRow(PriceKind.MINIMUM, draw(st.decimals(0, 1000, places=4))),
    ]
    p50 = draw(st.floats(0.01, 1e6))
    choices = {
        "mode": mode,
        "nodes": draw(st.integers(1, 64)),
        "epochs": draw(st.integers(1, 1000)),
        "prices": prices,
        "estimate": Estimate(p50, p50 * draw(st.floats(1, 3)), "reference"),
        "max_seconds": draw(st.none() | st.integers(60, 7 * 24 * 3600)),
    }
    try:
        return offer(**choices, ceiling_minor=draw(st.none() | st.integers(1, 10**9)))
    except PricingError as error:
        if error.code != "ceiling_too_small":
            raise
        return offer(**choices, ceiling_minor=error.minimum)  # what is named as the least does work


@given(offers(), SECONDS, st.booleans())
def test_no_usage_costs_more_than_the_ceiling(made, seconds, completed):
    charge = rate(Usage(seconds, completed=completed), made.terms)
    assert 0 <= charge.total_minor <= made.ceiling_minor
    assert sum(line.amount_minor for line in charge.lines) == charge.total_minor
    assert all(line.amount_minor >= 0 for line in charge.lines if line.rule != "above_ceiling")


@given(offers())
def test_the_ceiling_pays_for_the_whole_deadline(made):
    """No run is cut short by money before its deadline: at the deadline nothing is above the ceiling."""
    assert made.deadline_seconds >= 60
    charge = rate(Usage(made.deadline_seconds, completed=True), made.terms)
    assert "above_ceiling" not in [line.rule for line in charge.lines]
    assert sum(line.amount_minor for line in made.lines) == made.ceiling_minor == made.terms.ceiling_minor
    assert made.p50_minor <= made.p90_minor <= made.ceiling_minor


@given(offers(), SECONDS, SECONDS)
def test_more_time_never_costs_less(made, one, other):
    less, more = sorted([one, other])
    totals = [rate(Usage(seconds, completed=False), made.terms).total_minor for seconds in (less, more)]
    assert totals[0] <= totals[1]


@given(
    st.integers(0, 10**9).map(lambda n: Decimal(n) / 10**4),
    st.integers(1, 64),
    st.integers(1, 10**9).map(lambda n: Decimal(n) / 10**3),
)
def test_time_is_rounded_half_up_once(hourly, nodes, seconds):
    terms = Terms(Mode.METERED, nodes, 1, hourly, Decimal(0), 0, 10**18)
    exact = Fraction(hourly) * nodes * Fraction(seconds) / 3600
    assert rate(Usage(float(seconds), completed=False), terms).total_minor == floor(exact + Fraction(1, 2))


@given(st.integers(1, 10**9).map(lambda n: Decimal(n) / 10**4), st.integers(1, 64), st.integers(0, 10**7))
def test_affordable_seconds_are_the_most_that_the_budget_buys(hourly, nodes, budget):
    terms = Terms(Mode.METERED, nodes, 1, hourly, Decimal(0), 0, 0)
    seconds = affordable_seconds(terms, budget)
    price = Fraction(hourly) * nodes / 3600
    assert seconds * price <= budget < (seconds + 1) * price


def test_affordable_seconds_at_the_edges():
    terms = Terms(Mode.METERED, 1, 10, Decimal(90), Decimal("2.5"), 0, 0)
    assert affordable_seconds(terms, 24) == 0  # not even the epochs
    assert affordable_seconds(terms, 25) == 0
    assert affordable_seconds(terms, 26) == 40
    assert affordable_seconds(dataclasses.replace(terms, hourly=Decimal(0)), 25) >= 10**9
