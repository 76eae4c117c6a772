"""The daily cost of storage, and how a wallet pays it. `test_accounting_properties` varies the order of events."""

from datetime import date
from decimal import Decimal

import pytest

from billing import credit, invoices, ledger, storage_charges
from billing.models import BillingPolicy, Receipt, StorageBalance, StorageDay
from billing.storage_charges import GB, charge_day, collect, daily_cost, unpaid_minor
from tests.billing.runs import give_credit
from tests.factories.billing import book, wallet

JUNE, FEBRUARY = date(2026, 6, 30), date(2026, 2, 1)


@pytest.mark.parametrize(
    ("gigabytes", "price", "day", "cost"),
    [
        (40, "300", JUNE, "300"),  # 30 paid gigabytes at 300 a month, for one of 30 days
        (10, "300", JUNE, "0"),
        (0, "300", JUNE, "0"),
        (38, "300", FEBRUARY, "300"),  # 28 paid gigabytes, for one of 28 days
        (11, "0.1", JUNE, "0.003333"),
    ],
)
def test_a_day_costs_its_part_of_the_month(gigabytes, price, day, cost):
    free, size = 10 * GB, gigabytes * GB
    assert daily_cost(size_bytes=size, free_bytes=free, price=Decimal(price), day=day) == Decimal(cost)


@pytest.fixture
def account(owner):
    """A wallet with 350. A gigabyte costs 300 a month; the first ten are free, which is the default."""
    book(storage="300")
    return wallet(owner.organization, balance_minor=350)


@pytest.mark.django_db
class TestCharge:
    def test_a_day_is_charged_once_with_a_receipt_on_the_invoice(self, account):
        for _ in range(2):
            assert charge_day(account=account, day=JUNE, size_bytes=40 * GB).cost_minor == 300
        account.refresh_from_db()
        assert account.posted_minor == 50
        (receipt,) = Receipt.objects.all()
        assert (receipt.total_minor, receipt.lines[0]["rule"]) == (300, "storage")
        assert invoices.issue(organization=account.organization).total_minor == 300

    def test_fractions_wait_until_they_make_a_minor_unit(self, account):
        BillingPolicy.objects.create(free_storage_gb=0)
        for day in range(1, 11):
            charge_day(account=account, day=date(2026, 6, day), size_bytes=GB // 30)  # a third of a minor unit
        account.refresh_from_db()
        assert account.posted_minor == 350 - 3
        assert StorageBalance.objects.get().due_minor < 1

    def test_an_empty_wallet_owes_and_pays_later(self, account):
        ledger.hold(account=account, amount_minor=100)
        charge_day(account=account, day=JUNE, size_bytes=40 * GB)
        account.refresh_from_db()
        assert (account.available_minor, account.held_minor, unpaid_minor(account)) == (0, 100, 50)
        assert collect(account=account) == 0
        assert StorageBalance.objects.get().unpaid_since is not None
        give_credit(account, 70)
        assert [collect(account=account), collect(account=account)] == [50, 0]
        assert credit.credit_minor(account) == 20
        assert (unpaid_minor(account), StorageBalance.objects.get().unpaid_since) == (0, None)

    def test_without_a_price_storage_is_free(self, owner):
        book()
        assert charge_day(account=wallet(owner.organization), day=JUNE, size_bytes=900 * GB) is None
        assert not StorageDay.objects.exists()
        assert storage_charges.storage_price("XXX") is None  # there is no price book in this currency
