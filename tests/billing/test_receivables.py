"""Money that is taken back: what was paid in covers it, the rest is owed, and the next money pays the debt."""

from __future__ import annotations

import pytest

from billing import credit, ledger, receivables
from billing.models import Account, CreditGrant, Transaction
from tests.factories.accounts import UserFactory
from tests.factories.billing import wallet

pytestmark = pytest.mark.django_db


def pay_in(account, amount, reference="in"):
    return receivables.pay_in(
        account=account, amount_minor=amount, reference=reference, kind="top-up", description="In"
    )


def take_back(account, amount, reference="out"):
    return receivables.take_back(
        account=account, amount_minor=amount, reference=reference, kind="refund", description="Out"
    )


def balances(account):
    account.refresh_from_db()
    clearing = ledger.platform_account(Account.Kinds.CLEARING, account.currency)
    return account.posted_minor, receivables.owed_minor(account), clearing.posted_minor


def test_what_is_there_is_taken_from_the_wallet():
    account = wallet()
    assert pay_in(account, 5000)
    assert take_back(account, 3000)
    assert balances(account) == (2000, 0, -2000)


def test_the_rest_is_owed():
    account = wallet()
    pay_in(account, 2000)
    take_back(account, 5000)
    assert balances(account) == (0, 3000, 3000)


def test_what_is_held_stays():
    account = wallet()
    pay_in(account, 5000)
    ledger.hold(account=account, amount_minor=4000)
    take_back(account, 5000)
    assert balances(account) == (4000, 4000, 0)


def test_credit_that_was_given_is_not_paid_out():
    account = wallet()
    pay_in(account, 1000)
    lot = CreditGrant(organization=account.organization, amount_minor=700, reason="A gift")
    credit.grant(credit=lot, user=UserFactory(), account=account)
    take_back(account, 1500)
    assert balances(account) == (700, 500, 500)
    assert credit.credit_minor(account) == 700


def test_the_next_money_pays_the_debt():
    account = wallet()
    take_back(account, 3000)
    pay_in(account, 1000, "first")
    assert balances(account) == (0, 2000, 2000)
    pay_in(account, 5000, "second")
    assert balances(account) == (3000, 0, -3000)
    assert Transaction.objects.filter(kind="debt").count() == 2


def test_each_happens_once():
    account = wallet()
    assert pay_in(account, 5000)
    assert take_back(account, 6000)
    pay_in(account, 500, "another")
    before = balances(account)
    assert not pay_in(account, 5000)
    assert not take_back(account, 6000)
    assert balances(account) == before
