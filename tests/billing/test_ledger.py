"""The ledger: posted once, zero in sum, never edited, never below what is held; by Python and by PostgreSQL itself."""

from __future__ import annotations

import pytest
from django.db import IntegrityError, connection, transaction
from django.db.models import Sum

from billing import ledger
from billing.errors import InsufficientFunds, LedgerConflict
from billing.models import Account, Entry, Transaction
from tests.billing.runs import posted_and_held
from tests.factories.accounts import OrganizationFactory
from tests.factories.billing import wallet
from tests.racing import raised, together

pytestmark = pytest.mark.django_db


def post(reference, *entries):
    return ledger.post(reference=reference, kind="test", description="A test", entries=entries)


def revenue(currency="USD"):
    return ledger.platform_account(Account.Kinds.REVENUE, currency)


def entries_sum(account):
    return account.entries.aggregate(total=Sum("amount_minor"))["total"] or 0


class TestPost:
    def test_moves_money_once(self):
        account = wallet(balance_minor=300)  # enough for one posting
        assert post("sale:1", (account, -300), (revenue(), 300)) is True
        assert post("sale:1", (account, -300), (revenue(), 300)) is False
        assert posted_and_held(account) == (entries_sum(account), 0) == (0, 0)
        assert posted_and_held(revenue()) == (300, 0)
        assert Transaction.objects.get(reference="sale:1").entries.count() == 2

    def test_refuses_a_known_reference_with_other_entries(self):
        first, second = wallet(balance_minor=1000), wallet(balance_minor=1000)
        post("sale:1", (first, -300), (revenue(), 300))
        for account, amount in ((first, 299), (second, 300)):
            with pytest.raises(LedgerConflict):
                post("sale:1", (account, -amount), (revenue(), amount))
        assert (posted_and_held(first), posted_and_held(second)) == ((700, 0), (1000, 0))

    @pytest.mark.parametrize(
        ("amounts", "currency", "sentence"),
        [
            ((-300, 299), "USD", "sale:1"),
            ((-300, 0), "USD", "sale:1"),
            ((0, 0), "USD", "sale:1"),
            ((-300, 300), "EUR", "one currency"),
            ((-300, 300, 0), "USD", "twice"),
        ],
    )
    def test_refuses_entries_that_do_not_balance(self, amounts, currency, sentence):
        account = wallet(balance_minor=1000)
        accounts = [account, revenue(currency), account]  # a third amount is of the first account again
        with pytest.raises(ValueError, match=sentence):
            post("sale:1", *zip(accounts, amounts, strict=False))
        assert posted_and_held(account) == (1000, 0)
        assert not Transaction.objects.filter(reference="sale:1").exists()


def test_held_money_is_not_spent_or_held_again_and_the_callers_transaction_stays_usable():
    account = wallet(balance_minor=1000)
    ledger.hold(account=account, amount_minor=800)
    for spend in (
        lambda: post("sale:1", (account, -300), (revenue(), 300)),
        lambda: ledger.hold(account=account, amount_minor=300),
    ):
        with pytest.raises(InsufficientFunds) as caught:
            spend()
        error = caught.value
        assert (error.available_minor, error.needed_minor, error.missing_minor) == (200, 300, 100)
        assert str(error.message) == "Your wallet has $2.00 available, but this needs $3.00. Top up by at least $1.00."
        assert posted_and_held(account) == (1000, 800)
    assert not Transaction.objects.filter(reference="sale:1").exists()
    ledger.hold(account=account, amount_minor=100)
    assert post("sale:2", (account, -100), (revenue(), 100))
    with pytest.raises(InsufficientFunds):  # only a wallet has holds
        ledger.hold(account=revenue(), amount_minor=1)
    ledger.unhold(account=account, amount_minor=900)
    assert posted_and_held(account) == (900, 0)


class TestDatabase:
    """Changes that PostgreSQL refuses. They are sent as raw SQL, which bypasses the checks in Python."""

    @pytest.mark.parametrize(
        ("amounts", "currency", "refusal"),
        [
            ((10, -9), "USD", "do not sum to zero"),
            ((10, -10), "EUR", "in one currency"),
            ((0,), "USD", "entry_moves_something"),
        ],
    )
    def test_entries_sum_to_zero_in_one_currency(self, amounts, currency, refusal):
        def insert():
            with transaction.atomic(), connection.cursor() as cursor:
                cursor.execute(
                    "INSERT INTO billing_transaction (reference, kind, description, created_at) "
                    "VALUES ('raw:1', 'raw', '', now()) RETURNING id"
                )
                (pk,) = cursor.fetchone()
                for account, amount in zip((wallet(), revenue(currency)), amounts, strict=False):
                    cursor.execute(
                        "INSERT INTO billing_entry (transaction_id, account_id, amount_minor) VALUES (%s, %s, %s)",
                        [pk, account.pk, amount],
                    )
                cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")

        with pytest.raises(IntegrityError, match=refusal):
            insert()
        assert not Entry.objects.exists()
        assert not Transaction.objects.exists()

    @pytest.mark.parametrize(
        ("statement", "refusal"),
        [
            ("UPDATE billing_entry SET id = id", "append-only"),
            ("DELETE FROM billing_entry", "append-only"),
            ("UPDATE billing_transaction SET id = id", "append-only"),
            ("DELETE FROM billing_transaction", "append-only"),
            ("UPDATE billing_account SET posted_minor = held_minor - 1", "wallet_covers_what_is_held"),
            ("UPDATE billing_account SET held_minor = posted_minor + 1", "wallet_covers_what_is_held"),
            ("UPDATE billing_account SET held_minor = -1", "held_not_negative"),
        ],
    )
    def test_entries_are_append_only_and_a_wallet_covers_what_is_held(self, statement, refusal):
        wallet(balance_minor=10)
        only = " WHERE kind = 'wallet'" if "account" in statement else ""
        with pytest.raises(IntegrityError, match=refusal), connection.cursor() as cursor:
            cursor.execute(statement + only)


@pytest.mark.django_db(transaction=True)
class TestAtOnce:
    def test_no_posting_is_lost_and_a_reference_is_posted_once(self):
        account, clearing = wallet(), ledger.platform_account(Account.Kinds.CLEARING, "USD")

        def pay_in(thread):
            separate = [post(f"in:{thread}:{number}", (account, 7), (clearing, -7)) for number in range(10)]
            return separate, [post(f"shared:{number}", (account, 1), (clearing, -1)) for number in range(5)]

        outcomes = together(*(lambda n=n: pay_in(n) for n in range(6)))
        assert raised(outcomes) == []
        assert all(separate == [True] * 10 for separate, _shared in outcomes)
        assert sum(sum(shared) for _separate, shared in outcomes) == 5
        assert posted_and_held(account) == (6 * 10 * 7 + 5, 0) == (entries_sum(account), 0)
        assert posted_and_held(clearing) == (-425, 0)

    def test_movements_in_both_directions_do_not_deadlock(self):
        """Wallets are locked first, though the revenue account is younger than one of them and older than the other."""
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

        calls = [(sell, first), (sell, second), (refund, first), (refund, second)]
        outcomes = together(*(lambda act=act, who=who, n=n: act(who, n) for n, (act, who) in enumerate(calls)))
        assert raised(outcomes) == []
        assert posted_and_held(first) == posted_and_held(second) == (10_000, 0)
        assert posted_and_held(platform) == (0, 0)

    def test_an_organization_gets_one_wallet_and_a_currency_one_platform_account(self):
        organization = OrganizationFactory()
        wallet_in = lambda currency: ledger.wallet_account(organization_id=organization.pk, currency=currency).pk
        outcomes = together(*[lambda: wallet_in("USD")] * 3, *[lambda: revenue().pk] * 3)
        assert raised(outcomes) == []
        assert len(set(outcomes)) == 2
        assert (wallet_in("EUR"), revenue().pk) == (outcomes[0], outcomes[-1])
        assert revenue("JPY") != revenue()
