"""Mail about money: once for each row, to those who may pay, in the language of each reader."""

from __future__ import annotations

from datetime import date
from smtplib import SMTPNotSupportedError, SMTPRecipientsRefused

import pytest
from django.core import mail
from django.core.mail.backends import locmem
from django.utils import timezone

from billing import emails, invoices, receivables, storage_charges
from billing.models import InvoiceMail
from console.accounts.roles import Role
from tests.billing.runs import run
from tests.factories.accounts import MembershipFactory
from tests.factories.billing import book
from tests.racing import together

pytestmark = pytest.mark.django_db


@pytest.fixture
def invoice(account, owner):
    """A monthly invoice of 1250: a run of 950, and a day of storage.

    10 of the 40 GB are free. The others cost 300 a month each: 300 for one of the 30 days.
    """
    run(account, 950, member=owner)
    book(storage="300")
    storage_charges.charge_day(account=account, day=date(2026, 6, 30), size_bytes=40 * storage_charges.GB)
    return invoices.issue(organization=account.organization, until=timezone.now())


@pytest.fixture
def accountant(owner):
    """A Chinese reader who may pay."""
    return MembershipFactory(organization=owner.organization, role=Role.BILLING, user__language="zh-hans")


class TestInvoice:
    @pytest.mark.django_db(transaction=True)
    def test_is_mailed_once_unless_a_person_asked_for_it(self, account, owner, invoice):
        for sent in ([0, 1], [0, 0]):
            assert sorted(together(emails.send_due, emails.send_due)) == sent
        (message,) = mail.outbox
        assert message.to == [owner.user.email]
        assert message.subject.endswith(f"Invoice {invoice.number} for {account.organization}")
        for words in ("Total: $12.50", "Runs: 1\n", f"/invoices/{invoice.pk}/pdf/?language=en", "No action is needed"):
            assert words in message.body
        run(account, 100, member=owner)
        assert invoices.issue(organization=account.organization, user=owner.user) is not None
        assert emails.send_due() == 0

    def test_goes_to_each_reader_in_their_language_and_names_a_debt(self, account, owner, accountant, invoice):
        MembershipFactory(organization=owner.organization, role=Role.MEMBER)  # may not pay, so gets no mail
        receivables.withdraw(
            account=account, amount_minor=9450, reference="out", kind="dispute", description="Taken back"
        )
        assert emails.send_due() == 1  # one invoice, in a mail for each language
        english, chinese = mail.outbox
        assert "Owed: $7.00" in english.body  # 94.50 were taken back from 100 - 12.50
        assert "No action is needed" not in english.body
        assert (english.to, chinese.to) == ([owner.user.email], [accountant.user.email])
        assert "账单" in chinese.subject
        assert f"/invoices/{invoice.pk}/pdf/?language=zh-hans" in chinese.body
        assert "US$12.50" in chinese.body


@pytest.mark.parametrize(
    ("error", "is_retried"),
    [
        (ConnectionRefusedError(), True),
        (SMTPRecipientsRefused({"busy@example.com": (450, b"Try again later")}), True),
        (SMTPRecipientsRefused({"nobody@example.com": (550, b"No such user")}), False),
        (SMTPNotSupportedError("SMTPUTF8"), False),
        (ValueError("Invalid address"), False),
    ],
    ids=repr,
)
@pytest.mark.usefixtures("invoice", "accountant")
def test_a_refused_address_is_retried_only_if_it_may_accept_later(owner, monkeypatch, error, is_retried):
    """An address that is refused for good must neither keep the mail from other readers nor repeat it to them."""
    delivered, send = [], locmem.EmailBackend.send_messages

    def refuse_one(backend, messages):
        if messages[0].to == [owner.user.email]:
            raise error
        delivered.append(messages[0].to)
        return send(backend, messages)

    with monkeypatch.context() as patched:
        patched.setattr(locmem.EmailBackend, "send_messages", refuse_one)
        sent = [emails.send_due() for _ in range(3)]
    if is_retried:
        assert sent == [0, 0, 0]
        assert InvoiceMail.objects.get().mailed_at is None
        assert emails.send_due() == 1
    else:
        assert sent == [1, 0, 0]
        assert len(delivered) == 1
