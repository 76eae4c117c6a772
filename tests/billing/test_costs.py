"""Costs of a month by member, workspace and node spec, and their forecast."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pytest
from django.utils import timezone

from billing import costs, storage_charges
from tests.billing.runs import backdate, run
from tests.factories.accounts import MembershipFactory
from tests.factories.billing import book, wallet

pytestmark = pytest.mark.django_db


def test_costs_are_divided_by_member_workspace_or_node_spec(account):
    ann, bob = (MembershipFactory(organization=account.organization) for _ in range(2))
    run(account, 300, member=ann, workspace="vision", node_spec="small")
    run(account, 100, member=bob, workspace="vision", node_spec="medium")
    run(account, 0, member=bob, workspace="speech", node_spec="medium")
    month = costs.month_of()
    shares_by = lambda dimension: [
        (share.name, share.amount_minor, share.runs, share.fraction)
        for share in costs.shares_by(costs.spending(account.organization, month), dimension)
    ]
    assert shares_by("member") == [(ann.user.email, 300, 1, 0.75), (bob.user.email, 100, 2, 0.25)]
    assert shares_by("workspace") == [("vision", 400, 2, 1.0), ("speech", 0, 1, 0.0)]
    assert shares_by("node_spec") == [("small", 300, 1, 0.75), ("medium", 100, 2, 0.25)]
    run(account, 50)
    assert ("", 50) in [row[:2] for row in shares_by("workspace")]  # runs without the label
    assert costs.spent_minor(account.organization, month) == 450
    book(storage="300")
    # 300: 10 of the 40 GB are free, and the others cost 300 a month each, for one of 30 days.
    storage_charges.charge_day(account=account, day=date(2026, 6, 30), size_bytes=40 * storage_charges.GB)
    assert ("", 350, 1) in [row[:3] for row in shares_by("workspace")]  # a charge for storage is no run
    other = wallet(balance_minor=1000).organization
    assert (costs.spent_minor(other, month), costs.spending(other, month)) == (0, [])


def test_days_sum_to_the_month_and_small_shares_are_merged(account):
    month = costs.month_of()
    for number in range(9):
        receipt = run(account, 10 * (number + 1), node_spec=f"spec-{number}")
        backdate(receipt, month.start + timedelta(days=number))
    names, days = costs.by_day(costs.spending(account.organization, month), month, "node_spec")
    assert names == ["spec-8", "spec-7", "spec-6", "spec-5", "spec-4", costs.OTHER_SERIES]
    assert days[month.start.date()] == [0, 0, 0, 0, 0, 10]
    assert days[month.start.date() + timedelta(days=8)] == [90, 0, 0, 0, 0, 0]
    assert sum(map(sum, days.values())) == costs.spent_minor(account.organization, month) == 450


def test_past_days_are_read_once_and_the_present_day_each_time(
    account, monkeypatch, django_assert_num_queries, request
):
    now = datetime(2100, 11, 16, 12, tzinfo=UTC)  # in the future, since the prices took effect when the test began
    monkeypatch.setattr(timezone, "now", lambda: now)
    spent_minor = lambda: sum(row.amount_minor for row in costs.spending(account.organization, costs.month_of(now)))
    backdate(run(account, 70), now - timedelta(days=1))
    with django_assert_num_queries(2):  # one for the past days, one for the present day
        assert spent_minor() == 70
    run(account, 5)
    with django_assert_num_queries(1):
        assert spent_minor() == 75
    # At half past midnight, a transaction that began before midnight may still add a receipt to the day before.
    now += timedelta(hours=12, minutes=30)
    assert spent_minor() == 75
    backdate(run(account, 2), now - timedelta(minutes=31))
    assert spent_minor() == 77
    request.getfixturevalue("no_redis")  # then they are read each time
    assert [spent_minor(), spent_minor()] == [77, 77]


def test_months_follow_the_installations_time_zone(account, settings):
    settings.TIME_ZONE = "Asia/Shanghai"
    november = costs.parse_month("2026-11")
    assert november.start.astimezone(UTC) == datetime(2026, 10, 31, 16, tzinfo=UTC)
    assert (november.previous.name, len(november.days)) == ("2026-10", 30)
    backdate(run(account, 70), datetime(2026, 10, 31, 17, tzinfo=UTC))
    assert costs.spent_minor(account.organization, november) == 70
    _names, days = costs.by_day(costs.spending(account.organization, november), november, "member")
    assert days[november.days[0]] == [70]
    settings.TIME_ZONE = "UTC"
    spent = [costs.spent_minor(account.organization, costs.parse_month(month)) for month in ("2026-10", "2026-11")]
    assert spent == [70, 0]


def test_months_begin_and_end_at_midnight_across_a_change_of_clocks(settings):
    settings.TIME_ZONE = "Europe/Berlin"
    march = costs.parse_month("2026-03")
    assert (march.start.utcoffset(), march.end.utcoffset()) == (timedelta(hours=1), timedelta(hours=2))
    assert (costs.month_of(march.end).name, march.end.day, march.end.hour) == ("2026-04", 1, 0)


def test_an_invalid_month_is_the_present_one():
    """A month at the limits of `datetime`, the years 1 and 9999, is invalid: it has no month before or after it."""
    for name in ("", "x", "2026-13", "1-1", "2026-11-01", "99999-01", "0001-01", "9999-12"):
        assert costs.parse_month(name).is_current


def test_the_months_since_the_first_costs_can_be_chosen(account):
    now = timezone.localtime()
    assert [month.name for month in costs.months_with_costs(account.organization)] == [f"{now:%Y-%m}"]
    backdate(run(account, 5), costs.month_of().previous.previous.start)
    assert len(costs.months_with_costs(account.organization)) == 3
    backdate(run(account, 5), now - timedelta(days=900))
    assert len(costs.months_with_costs(account.organization)) == 12  # the most that are offered


HOUR, DAY = timedelta(hours=1), timedelta(days=1)


@pytest.mark.parametrize(
    ("runs", "spent", "daily"),
    [
        pytest.param([(7000, 30 * DAY), (700, 13 * DAY), (700, HOUR)], 1400, 100, id="the pace of two weeks"),
        pytest.param([(7000, 60 * DAY), (140, 3 * DAY)], 140, 10, id="earlier costs show that a customer is older"),
        pytest.param([(100, 2 * DAY)], 100, 50, id="a new customer's pace counts only the days since the first run"),
        pytest.param([(100, timedelta(minutes=5))], 100, 100, id="a run a few minutes ago is the spend of a day"),
        pytest.param([], 0, 0, id="no costs"),
    ],
)
def test_the_forecast_continues_the_spend_of_recent_days(account, runs, spent, daily):
    now = datetime(2026, 11, 16, tzinfo=UTC)  # 15 days are left, including this one
    for amount, ago in runs:
        backdate(run(account, amount), now - ago)
    spent_minor = costs.spent_minor(account.organization, costs.month_of(now))
    forecast = costs.forecast(account.organization, spent_minor, now)
    assert (forecast.spent_minor, forecast.daily_minor, forecast.days_left) == (spent, Decimal(daily), 15)
    assert forecast.total_minor == spent + 15 * daily
