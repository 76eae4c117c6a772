"""Credit: lots, their order, what is reserved, what expires; vouchers and trials; on PostgreSQL."""

from __future__ import annotations

import uuid
from datetime import timedelta

import pytest
from django.core.cache import cache
from django.db import IntegrityError, transaction
from django.utils import timezone

from billing import charges, credit
from billing.errors import InsufficientFunds, VoucherRefused
from billing.models import Account, BillingPolicy, CreditGrant, CreditUse, Entry, Transaction, Voucher
from billing.pricing import Usage
from tests.factories.accounts import MembershipFactory, UserFactory
from tests.factories.billing import book, quote, wallet
from tests.racing import raised, together

pytestmark = pytest.mark.django_db
DAY = timedelta(days=1)


@pytest.fixture
def account() -> Account:
    """A wallet with 1000 paid in; nodes cost 360 an hour: 10 for 100 seconds."""
    book()
    return wallet(balance_minor=1000)


def give(account: Account, amount: int, *, days: float | None = None, reason: str = "A test") -> CreditGrant:
    lot = CreditGrant(
        organization=account.organization,
        amount_minor=amount,
        reason=reason,
        expires_at=timezone.now() + DAY * days if days is not None else None,
    )
    credit.grant(credit=lot, user=None, account=account)
    account.refresh_from_db()
    return lot


def buy(account: Account, ceiling: int):
    return charges.hold(quote=quote(account, seconds=ceiling * 10), reference=f"test:{timezone.now().timestamp()}")


def settle(hold, amount: int):
    return charges.settle(hold=hold, usage=Usage(amount * 10, completed=True), title="A run")


def expire(*lots: CreditGrant) -> None:
    CreditGrant.objects.filter(pk__in=[lot.pk for lot in lots]).update(expires_at=timezone.now())


def figures(lot: CreditGrant) -> tuple[int, int, int]:
    lot.refresh_from_db()
    return lot.used_minor, lot.reserved_minor, lot.expired_minor


def test_soonest_expiry_first_then_what_does_not_expire_then_money(account):
    never, late, soon = give(account, 50), give(account, 50, days=9), give(account, 50, days=1)
    hold = buy(account, 120)
    assert [figures(lot) for lot in (soon, late, never)] == [(0, 50, 0), (0, 50, 0), (0, 20, 0)]
    settle(hold, 70)
    assert [figures(lot) for lot in (soon, late, never)] == [(50, 0, 0), (20, 0, 0), (0, 0, 0)]
    account.refresh_from_db()
    assert (account.available_minor, credit.credit_minor(account), credit.paid_minor(account)) == (1080, 80, 1000)
    settle(buy(account, 200), 200)
    account.refresh_from_db()
    assert (account.available_minor, credit.credit_minor(account), credit.paid_minor(account)) == (880, 0, 880)


def test_credit_that_came_during_the_run_is_used_for_it(account):
    hold = buy(account, 100)
    lot = give(account, 30)
    settle(hold, 100)
    assert figures(lot) == (30, 0, 0)
    assert credit.used_for([hold.pk]) == {hold.pk: 30}


def test_what_is_reserved_for_another_run_is_left_alone(account):
    lot = give(account, 100)
    first, second = buy(account, 80), buy(account, 80)
    assert figures(lot) == (0, 100, 0)
    settle(second, 80)
    assert figures(lot) == (20, 80, 0)
    settle(first, 10)
    assert figures(lot) == (30, 0, 0)


def test_expired_credit_is_taken_back_once(account):
    lot = give(account, 70, days=1)
    expire(lot)
    assert credit.sweep_expired() == 1
    assert credit.sweep_expired() == 0
    account.refresh_from_db()
    assert (account.posted_minor, figures(lot)) == (1000, (0, 0, 70))
    assert Entry.objects.filter(transaction__kind="credit-expired", account=account).get().amount_minor == -70
    given = Account.objects.get(organization=None, kind=Account.Kinds.CREDIT)
    assert given.posted_minor == 0


def test_credit_behind_an_open_hold_stays_good_for_it_and_its_rest_is_taken_back(account):
    lot = give(account, 100, days=1)
    hold = buy(account, 60)
    expire(lot)
    assert credit.take_back_expired(account=account) == 40
    assert figures(lot) == (0, 60, 40)
    settle(hold, 25)
    assert figures(lot) == (25, 0, 40)
    assert credit.take_back_expired(account=account) == 35
    assert figures(lot) == (25, 0, 75)
    account.refresh_from_db()
    assert account.posted_minor == 1000
    assert Transaction.objects.filter(kind="credit-expired").count() == 2


def test_expired_credit_buys_nothing_before_the_sweep_has_come(account):
    lot = give(account, 100, days=1)
    expire(lot)
    with pytest.raises(InsufficientFunds):
        buy(account, 1001)
    buy(account, 1000)
    assert figures(lot) == (0, 0, 100)
    assert not CreditUse.objects.exists()


def test_an_expired_lot_of_another_hold_is_not_used(account):
    lot = give(account, 100, days=1)
    first, second = buy(account, 50), buy(account, 200)
    expire(lot)
    settle(second, 200)
    assert figures(lot) == (50, 50, 0)
    settle(first, 0)
    assert credit.take_back_expired(account=account) == 50
    assert figures(lot) == (50, 0, 50)


def test_of_an_expired_lot_only_what_was_reserved_is_used(account):
    lot = give(account, 100, days=1)
    first, second = buy(account, 80), buy(account, 80)
    assert figures(lot) == (0, 100, 0)
    expire(lot)
    settle(first, 0)  # 80 of it are free again, and expired
    settle(second, 80)
    assert figures(lot) == (20, 0, 0)
    assert credit.take_back_expired(account=account) == 80


@pytest.mark.parametrize("change", ["used_minor", "reserved_minor", "expired_minor"])
def test_the_database_refuses_to_use_a_lot_twice(account, change):
    lot = give(account, 100)
    with pytest.raises(IntegrityError, match="credit_is_used_once"), transaction.atomic():
        CreditGrant.objects.filter(pk=lot.pk).update(**{change: 101})


@pytest.mark.django_db(transaction=True)
def test_runs_that_end_at_once_use_a_lot_once(account):
    lot = give(account, 100)
    holds = [buy(account, 60) for _ in range(4)]
    assert not raised(together(*[lambda hold=hold: settle(hold, 60) for hold in holds]))
    assert figures(lot) == (100, 0, 0)
    account.refresh_from_db()
    assert account.posted_minor == 1100 - 240
    assert sum(credit.used_for([hold.pk for hold in holds]).values()) == 100


@pytest.mark.django_db(transaction=True)
def test_sweeps_at_once_take_back_once(account):
    lot = give(account, 100, days=1)
    expire(lot)
    outcomes = together(*[lambda: credit.take_back_expired(account=account)] * 4)
    assert sorted(outcomes) == [0, 0, 0, 100]
    account.refresh_from_db()
    assert (account.posted_minor, figures(lot)) == (1000, (0, 0, 100))


@pytest.mark.django_db(transaction=True)
def test_a_grant_that_is_sent_many_times_at_once_is_one(account):
    key, clerk = uuid.uuid4(), UserFactory()
    made = lambda: CreditGrant(pk=key, organization=account.organization, amount_minor=100, reason="A gift")
    outcomes = together(*[lambda: credit.grant(credit=made(), user=clerk, account=account)] * 5)
    assert {lot.pk for lot in outcomes} == {key}
    account.refresh_from_db()
    assert account.posted_minor == 1100


# Vouchers


@pytest.fixture
def voucher() -> Voucher:
    cache.clear()
    return Voucher.objects.create(
        code="WELCOME25", reason="Welcome", amount_minor=2500, currency="USD", max_uses=2, credit_days=30
    )


def test_a_voucher(account, voucher):
    member = MembershipFactory(organization=account.organization)
    lot = credit.redeem(account=account, code=" welcome-25 ", user=member.user)
    account.refresh_from_db()
    assert account.posted_minor == 3500
    assert (lot.source, lot.reason, lot.voucher, lot.received_by) == ("voucher", "Welcome", voucher, member.user)
    assert timedelta(days=29) < lot.expires_at - timezone.now() <= timedelta(days=30)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"is_active": False}, "no voucher"),
        ({"expires_at": timezone.now() - DAY}, "could be entered until"),
        ({"currency": "CNY"}, "in CNY, and your wallet in USD"),
        ({"uses": 2}, "used up"),
        ({"code": "ANOTHER"}, "no voucher"),
    ],
)
def test_a_voucher_that_gives_nothing(account, voucher, change, sentence):
    Voucher.objects.filter(pk=voucher.pk).update(**change)
    with pytest.raises(VoucherRefused, match=sentence) as refused:
        credit.redeem(account=account, code="WELCOME25", user=MembershipFactory().user)
    assert "code" in refused.value.fields
    assert not CreditGrant.objects.exists()


def test_a_voucher_has_a_limit_for_each_organization(account, voucher):
    user = MembershipFactory().user
    credit.redeem(account=account, code="WELCOME25", user=user)
    with pytest.raises(VoucherRefused, match="as often as it may"):
        credit.redeem(account=account, code="WELCOME25", user=user)
    credit.redeem(account=wallet(), code="WELCOME25", user=user)
    voucher.refresh_from_db()
    assert voucher.uses == 2


def test_codes_can_not_be_tried_out(account, voucher):
    user = MembershipFactory().user
    for number in range(credit.WRONG_CODES):
        with pytest.raises(VoucherRefused, match="no voucher"):
            credit.redeem(account=account, code=f"GUESS{number}", user=user)
    with pytest.raises(VoucherRefused, match="Too many"):
        credit.redeem(account=account, code="WELCOME25", user=user)
    credit.redeem(account=wallet(), code="WELCOME25", user=user)


@pytest.mark.django_db(transaction=True)
def test_a_voucher_entered_at_once_is_used_as_often_as_it_may(voucher):
    book()
    accounts = [wallet() for _ in range(5)]
    users = [MembershipFactory().user for _ in accounts]
    outcomes = together(
        *[
            lambda account=account, user=user: credit.redeem(account=account, code="WELCOME25", user=user)
            for account, user in zip(accounts, users, strict=True)
        ]
    )
    assert [type(error) for error in raised(outcomes)] == [VoucherRefused] * 3
    voucher.refresh_from_db()
    assert voucher.uses == CreditGrant.objects.count() == 2


def test_made_codes_are_valid_and_differ():
    codes = {credit.new_code() for _ in range(100)}
    assert len(codes) == 100
    Voucher(code=codes.pop(), reason="x", amount_minor=1, currency="USD").full_clean()


# Trials


def test_no_trial_without_a_policy(account):
    assert credit.grant_trial(account=account, user=MembershipFactory().user) is None


def test_a_trial_is_given_once_for_an_organization_and_a_person(account):
    BillingPolicy.objects.create(trial_credit_minor=1000, trial_credit_days=7)
    member, friend = MembershipFactory(organization=account.organization), MembershipFactory()
    lot = credit.grant_trial(account=account, user=member.user)
    account.refresh_from_db()
    assert account.posted_minor == 2000
    assert timedelta(days=6) < lot.expires_at - timezone.now() <= timedelta(days=7)
    assert credit.grant_trial(account=account, user=friend.user) is None
    assert credit.grant_trial(account=wallet(), user=member.user) is None
    assert CreditGrant.objects.count() == 1
