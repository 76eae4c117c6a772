"""Mail about money: once for each row, to whoever may pay, in the language of each reader."""

from __future__ import annotations

from smtplib import SMTPNotSupportedError, SMTPRecipientsRefused

import pytest
from django.core import mail
from django.core.mail.backends import locmem
from django.utils import timezone

from billing import budgets, charges, invoices, mails, receivables
from billing.models import InvoiceMail
from billing.pricing import Usage
from console.accounts.roles import Role
from tests.factories.accounts import MembershipFactory
from tests.factories.billing import book, quote, wallet
from tests.racing import together

pytestmark = pytest.mark.django_db


@pytest.fixture
def account(owner):
    book()
    return wallet(owner.organization, balance_minor=10_000)


def written(account, amount=1250):
    """The invoice of a month, as the clock writes it, of one run."""
    made = quote(account, member=account.organization.memberships.first(), seconds=amount * 10)
    hold = charges.hold(quote=made, reference=f"order:{made.pk}")
    charges.settle(hold=hold, usage=Usage(amount * 10, completed=True), title="#1 train.py")
    return invoices.issue(organization=account.organization, until=timezone.now())


class TestInvoices:
    def test_are_told_once_however_often_the_sweep_comes(self, account, owner):
        invoice = written(account)
        assert [mails.send_due() for _ in range(3)] == [1, 0, 0]
        assert invoices.issue(organization=account.organization, until=timezone.now()) is None
        assert mails.send_due() == 0
        (letter,) = mail.outbox
        assert letter.to == [owner.user.email]
        assert letter.subject.endswith(f"Invoice {invoice.number} of {account.organization}")
        assert "Total: $12.50" in letter.body
        assert f"/invoices/{invoice.pk}/pdf/?language=en" in letter.body
        assert "Nothing is left to do" in letter.body

    def test_of_a_debt_say_so(self, account):
        written(account)
        receivables.take_back(
            account=account, amount_minor=9450, reference="out", kind="dispute", description="Taken back"
        )
        mails.send_due()
        assert "Owed: $7.00" in mail.outbox[0].body
        assert "Nothing is left to do" not in mail.outbox[0].body

    def test_that_a_person_asked_for_are_not_told(self, account, owner):
        written(account)
        mails.send_due()
        made = quote(account, member=owner, seconds=1000)
        hold = charges.hold(quote=made, reference=f"order:{made.pk}")
        charges.settle(hold=hold, usage=Usage(1000, completed=True), title="#2")
        assert invoices.issue(organization=account.organization, user=owner.user) is not None
        assert mails.send_due() == 0

    def test_go_to_each_reader_in_their_language(self, account, owner):
        paying = MembershipFactory(organization=owner.organization, role=Role.BILLING, user__language="zh-hans")
        MembershipFactory(organization=owner.organization, role=Role.MEMBER)
        invoice = written(account)
        assert mails.send_due() == 1
        english, chinese = mail.outbox
        assert (english.to, chinese.to) == ([owner.user.email], [paying.user.email])
        assert "发票" in chinese.subject
        assert f"/invoices/{invoice.pk}/pdf/?language=zh-hans" in chinese.body
        assert "US$12.50" in chinese.body

    def test_wait_for_a_mail_server_that_is_away(self, account, monkeypatch):
        written(account)

        def fail(*_args, **_options):
            raise ConnectionRefusedError

        with monkeypatch.context() as patched:
            patched.setattr(locmem.EmailBackend, "send_messages", fail)
            assert mails.send_due() == 0
        assert InvoiceMail.objects.get().mailed_at is None
        assert (mails.send_due(), len(mail.outbox)) == (1, 1)


class TestAnAddressThatTakesNone:
    """It keeps no mail from the others, and must not have them written to every minute for ever."""

    @pytest.fixture
    def server(self, account, owner, monkeypatch):
        """A mail server, one address of which answers with an error; who got something."""
        owner.user.language = "en"
        owner.user.save()
        MembershipFactory(organization=account.organization, role=Role.BILLING, user__language="zh-hans")
        got, real = [], locmem.EmailBackend.send_messages

        def refusing(error):
            def send(backend, messages):
                if messages[0].to == [owner.user.email]:
                    raise error
                got.append(messages[0].to)
                return real(backend, messages)

            monkeypatch.setattr(locmem.EmailBackend, "send_messages", send)
            return got

        return refusing

    @pytest.mark.parametrize(
        "error",
        [
            SMTPRecipientsRefused({"nobody@example.com": (550, b"No such user")}),
            SMTPNotSupportedError("SMTPUTF8"),
            ValueError("Invalid address"),
        ],
    )
    def test_for_good(self, account, server, error):
        written(account)
        got = server(error)
        assert [mails.send_due() for _ in range(3)] == [1, 0, 0]
        assert len(got) == 1

    def test_for_now_is_asked_again(self, account, server):
        written(account)
        server(SMTPRecipientsRefused({"busy@example.com": (450, b"Try again later")}))
        assert mails.send_due() == 0
        assert InvoiceMail.objects.get().mailed_at is None


@pytest.mark.django_db(transaction=True)
def test_two_sweeps_at_once_tell_of_an_invoice_once(account):
    written(account)
    assert sorted(together(mails.send_due, mails.send_due)) == [0, 1]
    assert len(mail.outbox) == 1


def test_a_budget_is_told_in_the_readers_language(account, owner):
    owner.user.language = "zh-hans"
    owner.user.save()
    budgets.set_budget(membership=owner, user=None, amount_minor=100)
    made = quote(account, member=owner, seconds=600)
    charges.hold(quote=made, reference="order:1", user=owner.user)
    budgets.watch()
    assert mails.send_due() == 1
    assert "预算" in mail.outbox[0].subject
