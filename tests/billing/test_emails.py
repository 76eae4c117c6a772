"""Mail about money: once for each row, to those who may pay, in the language of each reader."""

from __future__ import annotations

import sys
from datetime import date, timedelta
from functools import partial
from smtplib import SMTPDataError, SMTPNotSupportedError, SMTPRecipientsRefused, SMTPServerDisconnected
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Thread

import pytest
from django.core import mail
from django.core.mail.backends import locmem
from django.utils import timezone

from billing import emails, invoices, receivables, storage_charges
from billing.models import InvoiceMail, StorageBalance
from console.accounts import emails as delivery
from console.accounts.models import EmailDelivery
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
        (SMTPDataError(554, b"Message refused"), False),
        (SMTPNotSupportedError("SMTPUTF8"), False),
        (ValueError("Invalid address"), False),
    ],
    ids=repr,
)
@pytest.mark.parametrize("is_accountant", [True, False])
@pytest.mark.usefixtures("invoice")
def test_a_refused_address_is_retried_only_if_it_may_accept_later(
    accountant, monkeypatch, error, is_retried, is_accountant
):
    """A refused address must neither keep the mail from other readers, of any language, nor repeat it to them."""
    second = MembershipFactory(organization=accountant.organization, role=Role.OWNER)
    address = (accountant if is_accountant else second).user.email
    send = locmem.EmailBackend.send_messages

    def refuse_one(backend, messages):
        if address in messages[0].to:
            raise error
        return send(backend, messages)

    with monkeypatch.context() as patched:
        patched.setattr(locmem.EmailBackend, "send_messages", refuse_one)
        sent = [emails.send_due() for _ in range(3)]
    assert sent == ([0, 0, 0] if is_retried else [1, 0, 0])
    assert emails.send_due() == is_retried
    recipients = [to for message in mail.outbox for to in message.to]
    assert len(set(recipients)) == len(recipients) == 2 + is_retried
    assert (address in recipients) == is_retried
    assert InvoiceMail.objects.get().mailed_at is not None


@pytest.mark.usefixtures("invoice", "accountant")
def test_a_worker_that_is_killed_before_it_sends_loses_no_mail(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(locmem.EmailBackend, "send_messages", lambda *_: sys.exit())
        with pytest.raises(SystemExit):
            emails.send_due()
    assert emails.send_due() == 0, "the killed worker may have sent to the first recipient"
    assert len(mail.outbox) == 1
    EmailDelivery.objects.filter(sent_at=None).update(leased_until=timezone.now())
    assert emails.send_due() == 1
    assert len({to for message in mail.outbox for to in message.to}) == len(mail.outbox) == 2
    assert not EmailDelivery.objects.exists()


@pytest.mark.parametrize("code", [452, 421])
@pytest.mark.usefixtures("invoice")
def test_a_mailbox_that_stays_full_is_not_tried_for_ever_and_delays_no_other(owner, accountant, monkeypatch, code):
    send = locmem.EmailBackend.send_messages
    state = "open"

    def change_state(before, after):
        nonlocal state
        state = after if state == before else state

    def refuse_first(backend, messages):
        if state != "open":
            raise SMTPServerDisconnected("please run connect() first")
        if messages[0].to != [owner.user.email]:
            return send(backend, messages)
        if code == 421:
            change_state("open", "broken")
            raise SMTPServerDisconnected("Connection unexpectedly closed")
        raise SMTPRecipientsRefused({owner.user.email: (code, b"Mailbox full")})

    monkeypatch.setattr(locmem.EmailBackend, "send_messages", refuse_first)
    monkeypatch.setattr(locmem.EmailBackend, "close", lambda _backend: change_state("broken", "closed"))
    monkeypatch.setattr(locmem.EmailBackend, "open", lambda _backend: change_state("closed", "open"))
    assert emails.send_due() == 0
    assert [message.to for message in mail.outbox] == [[accountant.user.email]]
    EmailDelivery.objects.update(created_at=timezone.now() - timedelta(days=8))
    assert emails.send_due() == 1


class MailServer(ThreadingTCPServer):
    """An SMTP server that does not answer about the recipients in `silent_for`. `delivered` has those of its emails."""

    daemon_threads = True

    class Handler(StreamRequestHandler):
        def handle(self):
            self.server.connections += 1
            self.wfile.write(b"220 ready\r\n")
            recipient = ""
            for line in self.rfile:
                command = line.decode().strip()
                if command.upper().startswith("RCPT"):
                    recipient = command.partition("<")[2].partition(">")[0]
                    if recipient in self.server.silent_for:
                        continue
                if command.upper() == "DATA":
                    self.wfile.write(b"354 go on\r\n")
                    while self.rfile.readline() != b".\r\n":
                        pass
                    self.server.delivered.append(recipient)
                self.wfile.write(b"250 done\r\n")

    def __init__(self):
        super().__init__(("127.0.0.1", 0), self.Handler)
        self.connections, self.silent_for, self.delivered = 0, set(), []


@pytest.fixture
def mail_server(settings, monkeypatch):
    monkeypatch.setattr(delivery, "_paused_until", 0.0)
    monkeypatch.setattr(delivery, "_timeouts", 0)
    with MailServer() as server:
        Thread(target=server.serve_forever).start()
        settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
        settings.EMAIL_HOST, settings.EMAIL_PORT = server.server_address
        settings.EMAIL_TIMEOUT = 2
        yield server
        server.shutdown()


@pytest.fixture
def two_invoices(account, owner, invoice):
    run(account, 100, member=owner)
    assert invoices.issue(organization=account.organization, until=timezone.now()) is not None


@pytest.mark.usefixtures("two_invoices")
def test_an_address_about_which_the_mail_server_hangs_delays_no_other(owner, accountant, mail_server):
    first, second = owner.user.email, accountant.user.email  # emails in English go before those in Chinese
    mail_server.silent_for = {second}
    assert emails.send_due() == 0
    assert (mail_server.delivered, mail_server.connections) == ([first] * 2, 2), "two invoices, one time-out"
    mail_server.silent_for = set()
    assert emails.send_due() == 0, "the address waits"
    EmailDelivery.objects.update(leased_until=None)
    assert emails.send_due() == 2
    assert sorted(mail_server.delivered) == sorted([first, second] * 2)


@pytest.mark.usefixtures("two_invoices")
def test_emails_pause_while_the_mail_server_hangs(owner, accountant, mail_server):
    mail_server.silent_for = {owner.user.email, accountant.user.email}
    assert [emails.send_due() for _ in range(2)] == [0, 0]
    assert (mail_server.delivered, mail_server.connections) == ([], 2)


@pytest.mark.parametrize("is_paid_while_sending", [False, True])
def test_a_second_debt_is_mailed_to_all_though_the_mail_about_the_first_was_not_complete(
    account, accountant, owner, monkeypatch, is_paid_while_sending
):
    send = locmem.EmailBackend.send_messages

    def owe():
        StorageBalance.objects.update_or_create(
            account=account, defaults={"due_minor": 10**7, "unpaid_since": timezone.now()}
        )

    def pay():
        StorageBalance.objects.update(due_minor=0)
        storage_charges.collect(account=account)

    def announce():
        balance = StorageBalance.objects.get()
        rows = StorageBalance.objects.filter(pk=balance.pk)
        emails.deliver(rows, partial(storage_charges.unpaid_mail, balance), [owner.user, accountant.user])

    def send_to_owner(backend, messages):
        if messages[0].to == [accountant.user.email]:
            if not is_paid_while_sending:
                raise SMTPRecipientsRefused({accountant.user.email: (452, b"Mailbox full")})
            pay()
        return send(backend, messages)

    owe()
    with monkeypatch.context() as patched:
        patched.setattr(locmem.EmailBackend, "send_messages", send_to_owner)
        announce()
    pay()
    owe()
    mail.outbox.clear()
    announce()
    assert sorted(to for message in mail.outbox for to in message.to) == sorted(
        [owner.user.email, accountant.user.email]
    )
