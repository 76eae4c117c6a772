"""The ledger: posted once, zero in sum, never edited, never below what is held; by Python and by PostgreSQL itself."""

from __future__ import annotations

import pytest
from django.db import IntegrityError, connection, transaction
from django.db.models import Sum

from billing import ledger
from billing.errors import InsufficientFunds, LedgerConflict
from billing.models import Account, Entry, Transaction
from tests.factories.accounts import OrganizationFactory
from tests.factories.billing import wallet
from tests.racing import raised, together


def post(reference, *entries):
    return ledger.post(reference=reference, kind="test", description="A test", entries=entries)


def revenue(currency="USD"):
    return ledger.platform_account(Account.Kinds.REVENUE, currency)


def balance(account):
    account.refresh_from_db()
    return account.posted_minor, account.held_minor


def entries_sum(account):
    return account.entries.aggregate(total=Sum("amount_minor"))["total"] or 0


def execute(statement, *values):
    with connection.cursor() as cursor:
        cursor.execute(statement, values)


@pytest.mark.django_db
class TestPost:
    def test_moves_money_once(self):
        account = wallet(balance_minor=1000)
        assert post("sale:1", (account, -300), (revenue(), 300)) is True
        assert post("sale:1", (account, -300), (revenue(), 300)) is False
        assert balance(account) == (700, 0)
        assert balance(revenue()) == (300, 0)
        assert entries_sum(account) == 700
        assert Transaction.objects.get(reference="sale:1").entries.count() == 2

    def test_a_repeat_that_the_wallet_could_not_pay_again(self):
        account = wallet(balance_minor=300)
        assert post("sale:1", (account, -300), (revenue(), 300)) is True
        assert post("sale:1", (account, -300), (revenue(), 300)) is False
        assert balance(account) == (0, 0)

    @pytest.mark.parametrize("amount", [299, 301])
    def test_a_known_reference_with_other_amounts(self, amount):
        account = wallet(balance_minor=1000)
        post("sale:1", (account, -300), (revenue(), 300))
        with pytest.raises(LedgerConflict):
            post("sale:1", (account, -amount), (revenue(), amount))
        assert balance(account) == (700, 0)

    def test_a_known_reference_with_another_account(self):
        first, second = wallet(balance_minor=1000), wallet(balance_minor=1000)
        post("sale:1", (first, -300), (revenue(), 300))
        with pytest.raises(LedgerConflict):
            post("sale:1", (second, -300), (revenue(), 300))
        assert balance(second) == (1000, 0)

    @pytest.mark.parametrize("parts", [(-300, 299), (-300, 0), (0, 0)])
    def test_what_does_not_balance_or_moves_nothing(self, parts):
        account = wallet(balance_minor=1000)
        with pytest.raises(ValueError, match="sale:1"):
            post("sale:1", (account, parts[0]), (revenue(), parts[1]))
        assert not Transaction.objects.filter(reference="sale:1").exists()

    def test_an_account_named_twice(self):
        account = wallet(balance_minor=1000)
        with pytest.raises(ValueError, match="twice"):
            post("sale:1", (account, 300), (account, -300), (revenue(), 300))
        assert balance(account) == (1000, 0)

    def test_two_currencies_in_one_transaction(self):
        with pytest.raises(ValueError, match="one currency"):
            post("sale:1", (wallet(balance_minor=1000), -300), (revenue("EUR"), 300))

    def test_a_wallet_that_is_too_small(self):
        account = wallet(balance_minor=1000)
        ledger.hold(account=account, amount_minor=800)
        with pytest.raises(InsufficientFunds) as caught:
            post("sale:1", (account, -300), (revenue(), 300))
        error = caught.value
        assert (error.available_minor, error.needed_minor, error.missing_minor) == (200, 300, 100)
        assert str(error.message) == "Your wallet has $2.00 available and this needs $3.00. Top up $1.00 or more."
        assert balance(account) == (1000, 800)
        assert not Transaction.objects.filter(reference="sale:1").exists()

    def test_a_refusal_leaves_the_callers_transaction_usable(self):
        account = wallet(balance_minor=10)
        with pytest.raises(InsufficientFunds):
            post("sale:1", (account, -300), (revenue(), 300))
        assert post("sale:2", (account, -10), (revenue(), 10))

    def test_an_amount_beyond_the_column_moves_nothing(self):
        account = wallet(balance_minor=1000)
        with pytest.raises(Exception, match="out of range"), transaction.atomic():
            post("sale:1", (account, 2**63 - 1), (revenue(), 1 - 2**63))
        assert balance(account) == (1000, 0)

    def test_platform_accounts_may_be_below_zero(self):
        account = wallet()
        assert post("grant:1", (account, 500), (ledger.platform_account(Account.Kinds.CREDIT, "USD"), -500))
        assert balance(ledger.platform_account(Account.Kinds.CREDIT, "USD")) == (-500, 0)


@pytest.mark.django_db
class TestHold:
    def test_takes_all_that_is_there_and_no_more(self):
        account = wallet(balance_minor=1000)
        ledger.hold(account=account, amount_minor=1000)
        with pytest.raises(InsufficientFunds) as caught:
            ledger.hold(account=account, amount_minor=1)
        assert (caught.value.available_minor, caught.value.missing_minor) == (0, 1)
        ledger.unhold(account=account, amount_minor=1000)
        assert balance(account) == (1000, 0)

    def test_a_platform_account_holds_nothing(self):
        post("sale:1", (wallet(balance_minor=1000), -300), (revenue(), 300))
        with pytest.raises(InsufficientFunds):
            ledger.hold(account=revenue(), amount_minor=1)


@pytest.mark.django_db
class TestAccounts:
    def test_one_wallet_for_each_organization_whatever_the_currency(self):
        organization = OrganizationFactory()
        first = ledger.wallet_account(organization_id=organization.pk, currency="USD")
        assert ledger.wallet_account(organization_id=organization.pk, currency="EUR") == first

    def test_one_platform_account_of_a_kind_and_currency(self):
        assert revenue() == revenue()
        assert revenue("JPY") != revenue()


@pytest.mark.django_db(transaction=True)
class TestTheDatabaseItself:
    """In raw SQL, since whoever has a console has a way around Python."""

    def insert_entries(self, *parts):
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(
                "INSERT INTO billing_transaction (reference, kind, description, created_at) "
                "VALUES ('raw:1', 'raw', '', now()) RETURNING id"
            )
            (pk,) = cursor.fetchone()
            for account, amount in parts:
                cursor.execute(
                    "INSERT INTO billing_entry (transaction_id, account_id, amount_minor) VALUES (%s, %s, %s)",
                    [pk, account.pk, amount],
                )

    def test_takes_what_balances(self):
        self.insert_entries((wallet(), 10), (revenue(), -10))
        assert Entry.objects.count() == 2

    def test_refuses_what_does_not_sum_to_zero(self):
        with pytest.raises(IntegrityError, match="do not sum to zero"):
            self.insert_entries((wallet(), 10), (revenue(), -9))
        assert not Entry.objects.exists()
        assert not Transaction.objects.exists()

    def test_refuses_two_currencies(self):
        with pytest.raises(IntegrityError, match="in one currency"):
            self.insert_entries((wallet(), 10), (revenue("EUR"), -10))

    def test_refuses_an_entry_of_nothing(self):
        with pytest.raises(IntegrityError, match="entry_moves_something"):
            self.insert_entries((wallet(), 0))

    @pytest.mark.parametrize("table", ["billing_entry", "billing_transaction"])
    @pytest.mark.parametrize("statement", ["UPDATE {} SET id = id", "DELETE FROM {}"])
    def test_nothing_written_is_changed_or_deleted(self, table, statement):
        wallet(balance_minor=10)
        with pytest.raises(IntegrityError, match="append-only"):
            execute(statement.format(table))
        assert Entry.objects.count() == 2

    @pytest.mark.parametrize(
        ("change", "name"),
        [
            ("posted_minor = held_minor - 1", "wallet_covers_what_is_held"),
            ("held_minor = posted_minor + 1", "wallet_covers_what_is_held"),
            ("held_minor = -1", "held_not_negative"),
        ],
    )
    def test_a_wallet_keeps_its_bounds(self, change, name):
        account = wallet(balance_minor=10)
        with pytest.raises(IntegrityError, match=name):
            execute(f"UPDATE billing_account SET {change} WHERE id = %s", account.pk)


@pytest.mark.django_db(transaction=True)
class TestAtOnce:
    def test_no_update_is_lost(self):
        account = wallet()
        clearing = ledger.platform_account(Account.Kinds.CLEARING, "USD")

        def pay_in(thread):
            for number in range(10):
                post(f"in:{thread}:{number}", (account, 7), (clearing, -7))

        assert raised(together(*(lambda n=n: pay_in(n) for n in range(6)))) == []
        assert balance(account) == (420, 0) == (entries_sum(account), 0)
        assert balance(clearing) == (-420, 0)

    def test_one_reference_from_many_threads_is_posted_once(self):
        account = wallet()
        clearing = ledger.platform_account(Account.Kinds.CLEARING, "USD")
        for number in range(5):
            outcomes = together(*[lambda n=number: post(f"in:{n}", (account, 7), (clearing, -7))] * 5)
            assert sorted(outcomes) == [False] * 4 + [True]
        assert balance(account) == (35, 0)

    def test_movements_in_both_directions_do_not_wait_in_a_circle(self):
        """The revenue account is older than one wallet and younger than the other; holds lock the wallet first."""
        first = wallet(balance_minor=10_000)
        platform = revenue()
        second = wallet(balance_minor=10_000)

        def sell(account, thread):
            for number in range(10):
                with transaction.atomic():
                    ledger.hold(account=account, amount_minor=3)
                    ledger.unhold(account=account, amount_minor=3)
                    post(f"sale:{thread}:{number}", (account, -3), (platform, 3))

        def refund(account, thread):
            for number in range(10):
                post(f"back:{thread}:{number}", (platform, -3), (account, 3))

        outcomes = together(
            lambda: sell(first, 0),
            lambda: sell(second, 1),
            lambda: refund(first, 2),
            lambda: refund(second, 3),
        )
        assert raised(outcomes) == []
        assert balance(first) == balance(second) == (10_000, 0)
        assert balance(platform) == (0, 0)

    def test_spending_more_than_there_is(self):
        account = wallet(balance_minor=100)
        platform = revenue()
        outcomes = together(*(lambda n=n: post(f"sale:{n}", (account, -30), (platform, 30)) for n in range(6)))
        assert outcomes.count(True) == 3
        assert {type(error) for error in raised(outcomes)} == {InsufficientFunds}
        assert balance(account) == (10, 0)

    def test_the_first_wallet_and_platform_account_are_made_once(self):
        organization = OrganizationFactory()
        outcomes = together(
            *[lambda: ledger.wallet_account(organization_id=organization.pk, currency="USD").pk] * 3,
            *[lambda: -revenue().pk] * 3,
        )
        assert raised(outcomes) == []
        assert len(set(outcomes)) == 2
