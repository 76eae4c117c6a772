"""Credit: the order in which lots (grants) are spent, what is reserved, what expires; vouchers and trials."""

from __future__ import annotations

import uuid
from datetime import timedelta

import pytest
from django.db import IntegrityError, transaction
from django.utils import timezone

from billing import credit
from billing.errors import InsufficientFunds, VoucherRefused
from billing.models import Account, BillingPolicy, CreditGrant, CreditUse, Transaction, Voucher
from console.accounts import service_accounts
from console.accounts.models import User
from console.accounts.roles import Role
from tests.billing.runs import buy, give_credit, run, settle
from tests.caching import clear_cache
from tests.factories.accounts import MembershipFactory, UserFactory
from tests.factories.billing import wallet
from tests.racing import raised, together

pytestmark = pytest.mark.django_db
DAY = timedelta(days=1)


def expire(*lots: CreditGrant) -> None:
    CreditGrant.objects.filter(pk__in=[lot.pk for lot in lots]).update(expires_at=timezone.now())


def used_reserved_expired(*lots: CreditGrant) -> list[tuple[int, int, int]]:
    rows = [CreditGrant.objects.get(pk=lot.pk) for lot in lots]
    return [(row.used_minor, row.reserved_minor, row.expired_minor) for row in rows]


def balances(account: Account) -> tuple[int, int, int]:
    """Return what is available, and which part of it is credit and which was paid in."""
    account.refresh_from_db()
    return account.available_minor, credit.credit_minor(account), credit.paid_minor(account)


def test_the_lot_that_expires_first_is_spent_first_and_paid_in_money_last(account):
    never, late, soon = give_credit(account, 50), give_credit(account, 50, days=9), give_credit(account, 50, days=1)
    hold = buy(account, 120)
    assert used_reserved_expired(soon, late, never) == [(0, 50, 0), (0, 50, 0), (0, 20, 0)]
    settle(hold, 70)
    assert used_reserved_expired(soon, late, never) == [(50, 0, 0), (20, 0, 0), (0, 0, 0)]
    assert balances(account) == (10_080, 80, 10_000)
    run(account, 200)
    assert balances(account) == (9880, 0, 9880)


class TestExpired:
    def test_credit_reserved_by_an_open_hold_stays_valid_for_it(self, account):
        lot = give_credit(account, 100, days=1)
        hold = buy(account, 60)
        expire(lot)
        assert credit.remove_expired(account=account) == 40
        assert used_reserved_expired(lot) == [(0, 60, 40)]
        settle(hold, 25)
        assert used_reserved_expired(lot) == [(25, 0, 40)]
        assert credit.remove_expired(account=account) == 35
        assert used_reserved_expired(lot) == [(25, 0, 75)]
        assert balances(account) == (10_000, 0, 10_000)
        assert Transaction.objects.filter(kind="credit-expired").count() == 2

    def test_expired_credit_buys_nothing_before_it_is_removed(self, account):
        lot = give_credit(account, 100, days=1)
        expire(lot)
        with pytest.raises(InsufficientFunds):
            buy(account, 10_001)
        buy(account, 10_000)
        assert used_reserved_expired(lot) == [(0, 0, 100)]
        assert not CreditUse.objects.exists()

    @pytest.mark.parametrize("is_first_settled_first", [True, False])
    def test_credit_pays_only_for_the_hold_that_reserved_it(self, account, is_first_settled_first):
        lot = give_credit(account, 100, days=1)
        first, second = buy(account, 80), buy(account, 80)  # they reserve 80 and 20
        expire(lot)
        usage = [(first, 0), (second, 80)]
        for hold, used in usage if is_first_settled_first else reversed(usage):
            settle(hold, used)
        assert used_reserved_expired(lot) == [(20, 0, 0)]
        assert credit.remove_expired(account=account) == 80


def test_the_database_refuses_to_use_a_lot_twice(account):
    lot = give_credit(account, 100)
    for change in ("used_minor", "reserved_minor", "expired_minor"):
        with pytest.raises(IntegrityError, match="credit_is_used_once"), transaction.atomic():
            CreditGrant.objects.filter(pk=lot.pk).update(**{change: 101})


@pytest.mark.django_db(transaction=True)
def test_a_grant_repeated_at_once_is_posted_once_and_runs_that_end_at_once_use_it_once(account):
    key, clerk = uuid.uuid4(), UserFactory()
    # The same grant, as each of the repeated requests builds it.
    lot = lambda: CreditGrant(pk=key, organization=account.organization, amount_minor=100, reason="A gift")
    grants = together(*[lambda: credit.grant(credit_grant=lot(), user=clerk, account=account)] * 5)
    assert {each.pk for each in grants} == {key}
    assert balances(account) == (10_100, 100, 10_000)
    holds = [buy(account, 60) for _ in range(4)]
    assert not raised(together(*[lambda hold=hold: settle(hold, 60) for hold in holds]))
    assert used_reserved_expired(lot()) == [(100, 0, 0)]
    assert balances(account) == (10_100 - 240, 0, 10_100 - 240)
    assert sum(credit.used_by_hold([hold.pk for hold in holds]).values()) == 100


# Vouchers


@pytest.fixture
def voucher(db) -> Voucher:
    clear_cache()  # which counts wrong codes
    return Voucher.objects.create(
        code="WELCOME25", reason="Welcome", amount_minor=2500, currency="USD", max_uses=2, credit_days=30
    )


def redeem(account: Account, code: str = "WELCOME25", user: User | None = None) -> CreditGrant:
    return credit.redeem(account=account, code=code, user=user or UserFactory())


def test_a_voucher_gives_credit_unless_it_cannot_be_redeemed(account, voucher):
    unchanged = Voucher.objects.filter(pk=voucher.pk).values().get()
    for change, sentence in (
        ({"is_active": False}, "code does not exist"),
        ({"expires_at": timezone.now() - DAY}, "could be redeemed until"),
        ({"currency": "CNY"}, "in CNY, but your wallet is in USD"),
        ({"uses": 2}, "no uses left"),
        ({"code": "ANOTHER"}, "code does not exist"),
        ({"max_uses_each": 0}, "the maximum number of times"),
    ):
        Voucher.objects.filter(pk=voucher.pk).update(**unchanged | change)
        with pytest.raises(VoucherRefused, match=sentence) as refused:
            redeem(account)
        assert "code" in refused.value.fields
    assert not CreditGrant.objects.exists()
    Voucher.objects.filter(pk=voucher.pk).update(**unchanged)
    lot = redeem(account, " welcome-25 ")  # as people type it
    assert balances(account) == (12_500, 2500, 10_000)
    assert (lot.source, lot.reason, lot.voucher) == ("voucher", "Welcome", voucher)
    assert lot.received_by is not None
    with pytest.raises(VoucherRefused, match="You have used"):
        redeem(wallet(), user=lot.received_by)  # the same person in another organization
    robot = service_accounts.create(actor=MembershipFactory(), name="robot", role=Role.BILLING)
    for code in ("WELCOME25", "GUESS"):  # which does not tell whether a code is right
        with pytest.raises(VoucherRefused, match="A service account"):
            redeem(wallet(), code, robot.membership.user)
    assert 29 * DAY < lot.expires_at - timezone.now() <= 30 * DAY


@pytest.mark.usefixtures("voucher")
def test_codes_cannot_be_guessed(account, monkeypatch):
    guesser = UserFactory()
    for number in range(credit.MAX_WRONG_CODES):
        with pytest.raises(VoucherRefused, match="code does not exist"):
            redeem(account, f"GUESS{number}", guesser)
    for limited, user in ((account, UserFactory()), (wallet(), guesser)):  # the same person in another organization
        with pytest.raises(VoucherRefused, match="Too many"):
            redeem(limited, user=user)
    redeem(wallet())  # another person in another organization
    monkeypatch.setattr(credit.cache, "add", lambda *_arguments: False)  # the count expires before it is increased
    with pytest.raises(VoucherRefused, match="code does not exist"):
        redeem(wallet(), "GUESS")
    assert len({credit.new_code() for _ in range(100)}) == 100
    Voucher(code=credit.new_code(), reason="x", amount_minor=1, currency="USD").full_clean()


def test_trial_credit_is_granted_once_to_an_organization_and_a_person(account):
    member, friend = MembershipFactory(organization=account.organization), MembershipFactory()
    assert credit.grant_trial(account=account, user=member.user) is None  # no policy
    BillingPolicy.objects.create(trial_credit_minor=1000, trial_credit_days=7)
    lot = credit.grant_trial(account=account, user=member.user)
    assert balances(account) == (11_000, 1000, 10_000)
    assert 6 * DAY < lot.expires_at - timezone.now() <= 7 * DAY
    assert credit.grant_trial(account=account, user=friend.user) is None
    assert credit.grant_trial(account=wallet(), user=member.user) is None
    assert CreditGrant.objects.count() == 1
