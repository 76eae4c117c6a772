"""Spend of a month told apart, and where it will end; on PostgreSQL."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from django.db import connection
from django.utils import timezone

from billing import charges, costs
from billing.models import Receipt
from billing.pricing import Usage
from tests.factories.accounts import MembershipFactory
from tests.factories.billing import book, quote, wallet

pytestmark = pytest.mark.django_db


@pytest.fixture
def account():
    book()
    return wallet(balance_minor=100_000)


def run(account, amount: int, *, member=None, at: datetime | None = None, **labels: str) -> Receipt:
    made = quote(account, seconds=max(amount, 1) * 10)
    hold = charges.hold(quote=made, reference=str(made.pk), user=member.user if member else None, labels=labels)
    receipt = charges.settle(hold=hold, usage=Usage(amount * 10, completed=True), title="A run")
    if at:
        with connection.cursor() as cursor:  # receipts are append-only, but for this test's clock
            cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
            cursor.execute("SET CONSTRAINTS ALL DEFERRED")
            cursor.execute("SET LOCAL session_replication_role = replica")
            Receipt.objects.filter(pk=receipt.pk).update(created_at=at)
            cursor.execute("SET LOCAL session_replication_role = origin")
    return receipt


def test_by_member_workspace_and_node_spec(account):
    ann, bob = (MembershipFactory(organization=account.organization) for _ in range(2))
    run(account, 300, member=ann, workspace="vision", node_spec="small")
    run(account, 100, member=bob, workspace="vision", node_spec="medium")
    run(account, 0, member=bob, workspace="speech", node_spec="medium")
    month = costs.month_of()
    named = lambda dimension: [
        (share.name, share.amount_minor, share.runs, share.fraction)
        for share in costs.by(account.organization, month, dimension)
    ]
    assert named("member") == [(ann.user.email, 300, 1, 0.75), (bob.user.email, 100, 2, 0.25)]
    assert named("workspace") == [("vision", 400, 2, 1.0), ("speech", 0, 1, 0.0)]
    assert named("node_spec") == [("small", 300, 1, 0.75), ("medium", 100, 2, 0.25)]
    assert costs.spent_minor(account.organization, month) == 400


def test_what_has_no_label_is_still_there(account):
    run(account, 50)
    assert [
        (share.name, share.amount_minor) for share in costs.by(account.organization, costs.month_of(), "workspace")
    ] == [("", 50)]


def test_by_day_sums_to_the_month_and_small_names_are_one(account):
    month = costs.month_of()
    for number in range(9):
        run(account, 10 * (number + 1), at=month.start + timedelta(days=number), node_spec=f"spec-{number}")
    names, days = costs.by_day(account.organization, month, "node_spec")
    assert names == ["spec-8", "spec-7", "spec-6", "spec-5", "spec-4", costs.OTHERS]
    assert days[month.start.date()] == [0, 0, 0, 0, 0, 10]
    assert days[month.start.date() + timedelta(days=8)] == [90, 0, 0, 0, 0, 0]
    assert sum(map(sum, days.values())) == costs.spent_minor(account.organization, month) == 450


def test_months_follow_the_time_zone(account):
    with timezone.override("Asia/Shanghai"):
        november = costs.month_named("2026-11")
        assert november.start.astimezone(UTC) == datetime(2026, 10, 31, 16, tzinfo=UTC)
        assert (november.before.name, november.after.name, len(november.days)) == ("2026-10", "2026-12", 30)
        run(account, 70, at=datetime(2026, 10, 31, 17, tzinfo=UTC))
        assert costs.spent_minor(account.organization, november) == 70
        _names, days = costs.by_day(account.organization, november, "member")
        assert days[november.days[0]] == [70]
    assert costs.spent_minor(account.organization, costs.month_named("2026-11")) == 0


@pytest.mark.parametrize("name", ["", "x", "2026-13", "1-1", "2026-11-01", "99999-01", "0001-01", "9999-12"])
def test_what_is_no_month_is_the_present_one(name):
    assert costs.month_named(name).is_now


def test_months_across_a_change_of_clocks():
    with timezone.override("Europe/Berlin"):
        march = costs.month_named("2026-03")
        assert (march.start.utcoffset(), march.end.utcoffset()) == (timedelta(hours=1), timedelta(hours=2))
        assert (march.after.name, march.end.day, march.end.hour) == ("2026-04", 1, 0)


def test_another_organizations_costs_are_its_own(account):
    run(account, 70)
    other = wallet(balance_minor=1000)
    assert costs.spent_minor(other.organization, costs.month_of()) == 0
    assert costs.by(other.organization, costs.month_of(), "member") == []


class TestForecast:
    NOW = datetime(2026, 11, 16, tzinfo=UTC)

    def test_the_pace_of_two_weeks_until_the_end(self, account):
        run(account, 9000, at=self.NOW - timedelta(days=30))
        for day in range(1, 15):
            run(account, 100, at=self.NOW - timedelta(days=day, hours=-1))
        found = costs.forecast(account.organization, self.NOW)
        assert (found.spent_minor, found.daily_minor, found.days_left) == (1400, 100, 15)
        assert found.total_minor == 1400 + 1500

    def test_what_was_spent_before_counts_for_the_pace_alone(self, account):
        run(account, 9000, at=self.NOW - timedelta(days=60))
        run(account, 140, at=self.NOW - timedelta(days=3))
        assert costs.forecast(account.organization, self.NOW).total_minor == 140 + 150

    def test_a_young_customers_pace_is_of_the_days_there_were(self, account):
        run(account, 100, at=self.NOW - timedelta(days=2))
        assert costs.forecast(account.organization, self.NOW).daily_minor == 50
        assert costs.forecast(account.organization, self.NOW).total_minor == 100 + 750

    def test_a_first_day_is_not_taken_for_every_hour(self, account):
        run(account, 100, at=self.NOW - timedelta(minutes=5))
        assert costs.forecast(account.organization, self.NOW).daily_minor == 100

    def test_nothing_spent(self, account):
        found = costs.forecast(account.organization, self.NOW)
        assert (found.total_minor, found.daily_minor) == (0, Decimal(0))


def test_held_now_the_largest_first(account):
    for seconds in (100, 3000, 500):
        made = quote(account, seconds=seconds)
        charges.hold(quote=made, reference=str(made.pk))
    assert [hold.amount_minor for hold in costs.held(account)] == [300, 50, 10]


def test_months_to_choose_from(account):
    now = timezone.localtime()
    assert [month.name for month in costs.months_with_costs(account.organization)] == [f"{now:%Y-%m}"]
    run(account, 5, at=costs.month_of().before.before.start)
    assert len(costs.months_with_costs(account.organization)) == 3
    run(account, 5, at=now - timedelta(days=900))
    assert len(costs.months_with_costs(account.organization)) == 12
