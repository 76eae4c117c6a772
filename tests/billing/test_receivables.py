"""Money that is taken back: paid-in money covers it, the rest is owed, and the next money pays the debt."""

from __future__ import annotations

import pytest

from billing import credit, invoices, ledger, receivables
from billing.errors import WriteOffRefused
from billing.models import Account, Entry, Transaction, WriteOff
from console.accounts.models import AuditEvent
from console.core.errors import NotAllowed
from tests.billing.runs import buy, give_credit, settle
from tests.books import BROKEN_BOOKS, broken
from tests.factories.accounts import UserFactory
from tests.factories.billing import book, wallet
from tests.racing import raised, together

pytestmark = pytest.mark.django_db


def pay_in(account, amount, reference="in", **options):
    return receivables.pay_in(
        account=account, amount_minor=amount, reference=reference, kind="top-up", description="In", **options
    )


def take_back(account, amount, reference="out"):
    return receivables.withdraw(
        account=account, amount_minor=amount, reference=reference, kind="refund", description="Out"
    )


def balances(account):
    """Return the wallet's balance, its debt, and the clearing account's balance."""
    account.refresh_from_db()
    clearing = ledger.platform_account(Account.Kinds.CLEARING, account.currency)
    return account.posted_minor, receivables.owed_minor(account), clearing.posted_minor


@pytest.mark.parametrize(
    ("held", "credit_minor", "taken", "left"),
    [
        (0, 0, 3000, (2000, 0, -2000)),
        (0, 0, 7000, (0, 2000, 2000)),
        (4000, 0, 5000, (4000, 4000, 0)),
        (0, 700, 5500, (700, 500, 500)),
    ],
    ids=["covered by the wallet", "the rest is owed", "held money stays", "credit is not paid out"],
)
def test_money_taken_back_leaves_held_money_and_credit_and_the_rest_is_owed(held, credit_minor, taken, left):
    account = wallet()
    pay_in(account, 5000)
    if held:
        ledger.hold(account=account, amount_minor=held)
    if credit_minor:
        give_credit(account, credit_minor)
    assert take_back(account, taken)
    assert balances(account) == left
    assert credit.credit_minor(account) == credit_minor


def test_the_next_money_pays_the_debt_once():
    account = wallet()
    take_back(account, 3000)
    pay_in(account, 1000, "first")
    assert balances(account) == (0, 2000, 2000)
    pay_in(account, 5000, "second")
    assert not pay_in(account, 5000, "second")
    assert not take_back(account, 3000)
    assert balances(account) == (3000, 0, -3000)
    assert Transaction.objects.filter(kind="debt").count() == 2  # one for each payment


class TestReleasedMoney:
    """A hold kept money while a bank took its payment back. When released, that money must not be spent once more."""

    @pytest.fixture
    def held(self):
        """A hold of 8,000 in a wallet of 10,000."""
        book()
        account = wallet()
        pay_in(account, 10_000)
        return buy(account, 8000)

    @pytest.mark.parametrize(
        ("used", "left"), [(0, (0, 0, 0)), (3000, (0, 3000, 0)), (8000, (0, 8000, 0))], ids=["none", "a part", "all"]
    )
    def test_pays_the_debt_and_so_does_a_credit_note(self, held, used, left):
        take_back(held.account, 10_000)
        assert balances(held.account) == (8000, 8000, 0)
        settle(held, used)
        assert balances(held.account) == left
        if used:
            invoice = invoices.issue(organization=held.account.organization)
            line = invoice.lines.get()
            for amount, owed in ((used - 1000, 1000), (1000, 0)):
                invoices.correct(invoice=invoice, amounts={line.pk: amount}, reason="Our fault", user=None)
                assert balances(held.account) == (0, owed, 0)
        assert broken(BROKEN_BOOKS) == {}

    def test_that_is_credit_stays_credit(self, held):
        give_credit(held.account, 700)
        take_back(held.account, 12_500)
        settle(held, 0)
        assert balances(held.account) == (700, 2500, 2500)
        assert credit.credit_minor(held.account) == 700
        assert broken(BROKEN_BOOKS) == {}


@pytest.fixture
def clerk(db):
    return UserFactory(is_staff=True, is_superuser=True)


@pytest.mark.django_db(transaction=True)
def test_a_dispute_and_runs_that_end_at_once_leave_nothing_and_write_offs_at_once_stop_at_the_debt(clerk):
    book()
    account = wallet()
    pay_in(account, 10_000)
    holds = [buy(account, 2000) for _ in range(4)]
    outcomes = together(
        lambda: take_back(account, 13_000),
        *[lambda hold=hold: settle(hold, 0) for hold in holds],
    )
    assert raised(outcomes) == []
    assert balances(account) == (0, 3000, 3000)
    write_off = lambda: receivables.write_off(account=account, amount_minor=2000, reason="Closed", user=clerk)
    assert [type(error) for error in raised(together(*[write_off] * 4))] == [WriteOffRefused] * 3
    assert balances(account) == (0, 1000, 3000)
    assert receivables.written_off_minor(account) == 2000
    assert broken(BROKEN_BOOKS) == {}


class TestWriteOff:
    @pytest.fixture
    def debtor(self):
        """The wallet of an organization that owes 3,000."""
        account = wallet()
        pay_in(account, 2000)
        take_back(account, 5000)
        return account

    def write_off(self, account, clerk, amount=3000, reason="The company closed"):
        return receivables.write_off(account=account, amount_minor=amount, reason=reason, user=clerk)

    def test_moves_the_debt_and_is_recorded(self, debtor, clerk):
        row = self.write_off(debtor, clerk, 1000)
        assert balances(debtor) == (0, 2000, 3000)
        assert receivables.written_off_minor(debtor) == 1000
        moved = Entry.objects.filter(transaction__reference=f"write-off:{row.pk}")
        assert {entry.account.kind: entry.amount_minor for entry in moved} == {"receivable": 1000, "written_off": -1000}
        assert Transaction.objects.get(kind="write-off").description == "The company closed"
        event = AuditEvent.objects.get(action="debt.written_off")
        assert (event.organization, event.actor, event.target) == (debtor.organization, clerk, f"write-off:{row.pk}")
        assert event.data == {"amount_minor": 1000, "currency": "USD", "reason": "The company closed"}
        assert broken(BROKEN_BOOKS) == {}

    def test_takes_a_permission_an_amount_that_is_owed_and_a_reason(self, debtor, clerk):
        for changes, field in (
            ({"amount": 3001}, "amount_minor"),
            ({"amount": 0}, "amount_minor"),
            ({"reason": " "}, "reason"),
        ):
            with pytest.raises(WriteOffRefused) as caught:
                self.write_off(debtor, clerk, **changes)
            assert set(caught.value.fields) == {field}
        with pytest.raises(NotAllowed):
            self.write_off(debtor, UserFactory(is_staff=True))
        assert balances(debtor) == (0, 3000, 3000)
        assert not WriteOff.objects.exists()

    @pytest.mark.parametrize(
        "case",  # written off, paid in, is it returned money, the balances then, what is still written off
        [
            pytest.param((3000, 4000, False, (4000, 0, -1000), 3000), id="a new payment is the customer's own"),
            pytest.param((2500, 5000, True, (2000, 0, -2000), 0), id="returned money repays it first"),
            pytest.param((3000, 1000, True, (0, 0, 2000), 2000), id="a part of it returns"),
        ],
    )
    def test_is_repaid_by_returned_money_but_not_by_a_new_payment(self, debtor, clerk, case):
        """Else a dispute that is won would pay the customer for what was used and waived."""
        written_off, amount, is_return, left, still_written_off = case
        self.write_off(debtor, clerk, written_off)
        assert pay_in(debtor, amount, "later", is_return=is_return)
        assert not pay_in(debtor, amount, "later", is_return=is_return)
        assert balances(debtor) == left
        assert receivables.written_off_minor(debtor) == still_written_off
        assert broken(BROKEN_BOOKS) == {}
