"""Money that is taken back: what was paid in covers it, the rest is owed, and the next money pays the debt."""

from __future__ import annotations

import pytest

from billing import charges, credit, invoices, ledger, receivables
from billing.errors import WriteOffRefused
from billing.models import Account, CreditGrant, Entry, Transaction, WriteOff
from billing.pricing import Usage
from console.accounts.errors import NotAllowed
from console.accounts.models import AuditEvent
from tests.books import BROKEN_BOOKS, broken
from tests.factories.accounts import UserFactory
from tests.factories.billing import book, quote, wallet
from tests.racing import raised, together

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


class TestMoneyThatIsHeldNoMore:
    """It was paid in, a bank took the payment back meanwhile: it is not there to be spent once more."""

    @pytest.fixture
    def held(self):
        """A wallet of 10,000, 8,000 of it held; 360 an hour are 1 for ten seconds."""
        book()
        account = wallet()
        pay_in(account, 10_000)
        made = quote(account, seconds=80_000)
        return charges.hold(quote=made, reference=f"order:{made.pk}")

    def settle(self, hold, amount):
        return charges.settle(hold=hold, usage=Usage(amount * 10, completed=False), title="A run")

    @pytest.mark.parametrize(
        ("used", "left"), [(0, (0, 0, 0)), (3000, (0, 3000, 0)), (8000, (0, 8000, 0))], ids=["none", "a part", "all"]
    )
    def test_pays_the_debt(self, held, used, left):
        take_back(held.account, 10_000)
        assert balances(held.account) == (8000, 8000, 0)
        self.settle(held, used)
        assert balances(held.account) == left
        assert broken(BROKEN_BOOKS) == {}

    def test_a_credit_stays_a_credit(self, held):
        lot = CreditGrant(organization=held.account.organization, amount_minor=700, reason="A gift")
        credit.grant(credit=lot, user=UserFactory(), account=held.account)
        take_back(held.account, 12_500)
        self.settle(held, 0)
        assert balances(held.account) == (700, 2500, 2500)
        assert credit.credit_minor(held.account) == 700
        assert broken(BROKEN_BOOKS) == {}

    def test_settling_again_pays_no_more(self, held):
        take_back(held.account, 5000)
        self.settle(held, 0)
        before = balances(held.account)
        self.settle(held, 0)
        assert balances(held.account) == before == (5000, 0, -5000)

    def test_what_a_credit_note_gives_back_pays_first(self, held):
        take_back(held.account, 10_000)
        self.settle(held, 8000)
        invoice = invoices.issue(organization=held.account.organization)
        line = invoice.lines.get()
        invoices.correct(invoice=invoice, amounts={line.pk: 5000}, reason="Our fault", user=None)
        assert balances(held.account) == (0, 3000, 0)
        invoices.correct(invoice=invoice, amounts={line.pk: 3000}, reason="All of it", user=None)
        assert balances(held.account) == (0, 0, 0)
        assert broken(BROKEN_BOOKS) == {}


@pytest.mark.django_db(transaction=True)
def test_a_dispute_and_a_run_that_end_at_once_leave_nothing_to_spend():
    book()
    account = wallet()
    pay_in(account, 10_000)
    holds = [
        charges.hold(quote=made, reference=f"order:{made.pk}")
        for made in (quote(account, seconds=20_000) for _ in range(4))
    ]
    nothing = Usage(0, completed=False)
    outcomes = together(
        lambda: take_back(account, 10_000),
        *[lambda hold=hold: charges.settle(hold=hold, usage=nothing, title="A run") for hold in holds],
    )
    assert raised(outcomes) == []
    assert balances(account) == (0, 0, 0)
    assert broken(BROKEN_BOOKS) == {}


class TestWriteOff:
    @pytest.fixture
    def debtor(self):
        account = wallet()
        pay_in(account, 2000)
        take_back(account, 5000)
        return account

    @pytest.fixture
    def clerk(self):
        return UserFactory(is_staff=True, is_superuser=True)

    def write_off(self, account, clerk, amount=3000, reason="The company is no more"):
        return receivables.write_off(account=account, amount_minor=amount, reason=reason, user=clerk)

    def test_moves_the_debt_to_what_is_written_off(self, debtor, clerk):
        made = self.write_off(debtor, clerk, 1000)
        assert balances(debtor) == (0, 2000, 3000)
        assert receivables.written_off_minor(debtor) == 1000
        moved = Entry.objects.filter(transaction__reference=f"write-off:{made.pk}")
        assert {entry.account.kind: entry.amount_minor for entry in moved} == {"receivable": 1000, "written_off": -1000}
        assert Transaction.objects.get(kind="write-off").description == "The company is no more"
        assert broken(BROKEN_BOOKS) == {}

    def test_leaves_a_trail(self, debtor, clerk):
        made = self.write_off(debtor, clerk)
        event = AuditEvent.objects.get(action="debt.written_off")
        assert (event.organization, event.actor, event.target) == (debtor.organization, clerk, f"write-off:{made.pk}")
        assert event.data == {"amount_minor": 3000, "currency": "USD", "reason": "The company is no more"}

    @pytest.mark.parametrize("amount", [3001, 0, -1])
    def test_is_of_no_more_than_is_owed(self, debtor, clerk, amount):
        with pytest.raises(WriteOffRefused) as caught:
            self.write_off(debtor, clerk, amount)
        assert "$30.00" in str(caught.value.fields["amount_minor"])
        assert balances(debtor) == (0, 3000, 3000)
        assert not WriteOff.objects.exists()

    def test_has_a_reason(self, debtor, clerk):
        with pytest.raises(WriteOffRefused) as caught:
            self.write_off(debtor, clerk, reason="  ")
        assert set(caught.value.fields) == {"reason"}

    @pytest.mark.parametrize("flags", [{}, {"is_staff": True}])
    def test_is_an_administrators(self, debtor, flags):
        with pytest.raises(NotAllowed):
            self.write_off(debtor, UserFactory(**flags))
        assert balances(debtor) == (0, 3000, 3000)

    def test_the_next_payment_is_the_customers_own(self, debtor, clerk):
        self.write_off(debtor, clerk)
        pay_in(debtor, 4000, "later")
        assert balances(debtor) == (4000, 0, -1000)

    def test_money_that_returns_after_all_makes_good_for_it_first(self, debtor, clerk):
        """Else a dispute that is won would pay the customer for what was used and forgiven."""
        self.write_off(debtor, clerk, 2500)
        receivables.pay_in(
            account=debtor, amount_minor=5000, reference="won", kind="dispute", description="Won", returns=True
        )
        assert balances(debtor) == (2000, 0, -2000)
        assert receivables.written_off_minor(debtor) == 0
        assert broken(BROKEN_BOOKS) == {}

    def test_less_than_was_written_off_returns(self, debtor, clerk):
        self.write_off(debtor, clerk)
        again = {"account": debtor, "amount_minor": 1000, "reference": "a", "kind": "refund", "description": "Failed"}
        assert receivables.pay_in(**again, returns=True)
        assert not receivables.pay_in(**again, returns=True)
        assert balances(debtor) == (0, 0, 2000)
        assert receivables.written_off_minor(debtor) == 2000


@pytest.mark.django_db(transaction=True)
def test_two_write_offs_at_once_give_up_no_more_than_is_owed():
    account, clerk = wallet(), UserFactory(is_staff=True, is_superuser=True)
    take_back(account, 3000)
    act = lambda: receivables.write_off(account=account, amount_minor=2000, reason="Gone", user=clerk)
    outcomes = together(*[act] * 4)
    assert [type(error) for error in raised(outcomes)] == [WriteOffRefused] * 3
    assert balances(account) == (0, 1000, 3000)
    assert receivables.written_off_minor(account) == 2000
