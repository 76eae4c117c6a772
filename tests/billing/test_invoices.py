"""Invoices and credit notes: numbers, lines, tax, what is given back, and what the database refuses."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pytest
from django.db import IntegrityError, connection, transaction
from django.utils import timezone

from billing import credit, invoices
from billing.errors import InvoiceRefused
from billing.models import (
    Account,
    BillingDetails,
    BillingPolicy,
    Invoice,
    InvoiceLine,
    InvoiceMail,
    InvoiceSeries,
    Transaction,
)
from tests.billing.runs import backdate, check_constraints, figures, give_credit, issue, posted, run
from tests.factories.billing import wallet

pytestmark = pytest.mark.django_db


def correct(invoice: Invoice, amounts: dict[int, int], reason: str = "A fault") -> Invoice:
    """Issue a credit note. `amounts` are what it gives back, by the keys of the invoice's lines."""
    note = invoices.correct(invoice=invoice, amounts=amounts, reason=reason, user=None)
    check_constraints()
    return note


@transaction.atomic
def write(*rows: Invoice | InvoiceLine) -> None:
    for row in rows:
        row.save()
    check_constraints()


class TestIssue:
    def test_has_a_line_for_each_receipt_once_and_takes_credit_off(self, account):
        free = run(account, 0, "#1 a.py")  # a free run alone makes no invoice
        assert invoices.issue(organization=account.organization) is None
        assert InvoiceSeries.objects.get().last == 0
        give_credit(account, 320)
        first, second = run(account, 300, "#2 b.py"), run(account, 200, "#3 c.py")
        assert invoices.uninvoiced_minor(account.organization) == 500
        invoice = issue(account)
        assert figures(invoice) == (500, -320, 0, 180)
        assert invoice.lines.get(receipt=first).receipt_lines == first.lines
        assert [
            (line.position, line.receipt, line.title, line.amount_minor, line.credit_minor)
            for line in invoice.lines.all()
        ] == [(1, free, "#1 a.py", 0, 0), (2, first, "#2 b.py", 300, -300), (3, second, "#3 c.py", 200, -20)]
        assert invoices.issue(organization=account.organization) is None
        run(account, 100)
        assert issue(account).subtotal_minor == 100

    def test_numbers_are_the_installations_and_have_no_gap(self, account):
        BillingPolicy.objects.create(invoice_prefix="TY-")

        def fail_late() -> None:
            with transaction.atomic():
                invoices.issue(organization=account.organization)
                raise ZeroDivisionError

        for each in (account, wallet(balance_minor=1000), account):
            run(each, 10)
            if each == account:
                with pytest.raises(ZeroDivisionError):
                    fail_late()
            issue(each)
        assert [invoice.number for invoice in Invoice.objects.order_by("pk")] == ["TY-000001", "TY-000002", "TY-000003"]


class TestIssueDue:
    def test_invoices_past_months_and_mails_them(self, account):
        month = timezone.localtime().replace(day=1, hour=0, minute=0, second=0, microsecond=0)
        late, now = run(account, 300), run(account, 200)
        backdate(late, month - timedelta(seconds=1))
        (invoice,) = invoices.issue_due()
        check_constraints()
        assert [line.receipt for line in invoice.lines.all()] == [late]
        # The period begins with its first receipt and ends with the month; here both are the month's last day.
        assert invoice.period_start == invoice.period_end == (month - timedelta(days=1)).date()
        assert invoices.issue_due() == []
        assert [line.receipt for line in issue(account).lines.all()] == [now]
        assert [due.invoice for due in InvoiceMail.objects.all()] == [invoice]  # none for a requested one

    def test_continues_after_a_failure(self, account, monkeypatch, caplog):
        others = [wallet(balance_minor=1000) for _ in range(2)]
        for each in (others[0], account, others[1]):
            run(each, 10)
        real, failing = invoices.tax_for, account.organization

        def fail_for_one(organization):
            if organization == failing:
                raise ZeroDivisionError
            return real(organization)

        next_month = timezone.now() + timedelta(days=40)
        with monkeypatch.context() as patched:
            patched.setattr(timezone, "now", lambda: next_month)
            patched.setattr(invoices, "tax_for", fail_for_one)
            assert {invoice.organization for invoice in invoices.issue_due()} == {each.organization for each in others}
            assert "could not be issued" in caplog.text
            patched.setattr(invoices, "tax_for", real)
            (late,) = invoices.issue_due()
        assert (late.organization, late.sequence) == (failing, 3)

    @pytest.mark.parametrize(("zone", "invoiced"), [("UTC", 0), ("Asia/Shanghai", 1)])
    def test_follows_the_installations_time_zone(self, account, monkeypatch, settings, zone, invoiced):
        """It is December 1, 00:30, in Shanghai, but November in UTC. Runs ended at 23:59:59 and at midnight there."""
        moments = [datetime(2026, 11, 30, 15, 59, 59, tzinfo=UTC), datetime(2026, 11, 30, 16, 0, 0, tzinfo=UTC)]
        runs = [backdate(run(account, 100), moment) for moment in moments]
        settings.TIME_ZONE = zone
        monkeypatch.setattr(timezone, "now", lambda: datetime(2026, 11, 30, 16, 30, tzinfo=UTC))
        issued = invoices.issue_due()
        assert [line.receipt for invoice in issued for line in invoice.lines.all()] == runs[:invoiced]
        assert {(each.period_start, each.period_end) for each in issued} <= {(date(2026, 11, 30), date(2026, 11, 30))}


class TestTax:
    def test_on_top_that_the_wallet_does_not_hold_is_owed(self, account):
        BillingPolicy.objects.create(tax_percent=Decimal(10), tax_inclusive=False)
        run(account, 9950)
        give_credit(account, 500)
        issue(account)
        account.refresh_from_db()
        # The 50 that were paid in are taken; credit pays no tax.
        assert (account.posted_minor, posted(Account.Kinds.RECEIVABLE, account)) == (500, -945)
        assert posted(Account.Kinds.TAX) == 995

    def test_of_an_organization_goes_before_the_policys(self, account):
        BillingPolicy.objects.create(tax_percent=Decimal(19), seller_name="Trains Ltd", seller_tax_id="GB1")
        BillingDetails.objects.create(
            organization=account.organization, name="Kunde GmbH", tax_percent=Decimal(0), tax_note="Reverse charge"
        )
        run(account, 100)
        invoice = issue(account)
        assert (invoice.tax_minor, invoice.seller["name"]) == (0, "Trains Ltd")
        assert (invoice.customer["name"], invoice.customer["tax_note"]) == ("Kunde GmbH", "Reverse charge")


class TestCreditNote:
    def test_gives_money_and_tax_back_in_parts(self, account):
        BillingPolicy.objects.create(tax_percent=Decimal(19), note_prefix="G-")
        run(account, 119)
        run(account, 238)
        invoice = issue(account)
        first, second = invoice.lines.all()
        note = correct(invoice, {second.pk: 119})
        assert (note.number, figures(note)) == ("G-000001", (-119, 0, -19, -119))
        account.refresh_from_db()
        assert account.posted_minor == 10_000 - 357 + 119
        assert (posted(Account.Kinds.REVENUE), posted(Account.Kinds.TAX)) == (200, 38)
        assert invoices.correctable_lines(invoice) == [(first, 119), (second, 119)]
        assert figures(correct(invoice, {first.pk: 119, second.pk: 119})) == (-238, 0, -38, -238)
        account.refresh_from_db()
        assert account.posted_minor == 10_000
        assert (posted(Account.Kinds.REVENUE), posted(Account.Kinds.TAX)) == (0, 0)
        postings = Transaction.objects.exclude(kind__in=["charge", "top-up"]).order_by("pk")
        assert [row.reference for row in postings] == ["tax:invoice:1", "credit-note:1", "credit-note:2"]

    def test_gives_credit_back_as_credit_and_last(self, account):
        give_credit(account, 60)
        run(account, 100)
        invoice = issue(account)
        (line,) = invoice.lines.all()
        assert figures(correct(invoice, {line.pk: 70})) == (-70, 30, 0, -40)
        account.refresh_from_db()
        assert (account.posted_minor, credit.credit_minor(account), credit.paid_minor(account)) == (10_030, 30, 10_000)
        assert figures(correct(invoice, {line.pk: 30})) == (-30, 30, 0, 0)
        account.refresh_from_db()
        assert (account.posted_minor, credit.credit_minor(account)) == (10_060, 60)

    def test_is_limited_to_what_was_charged_on_an_invoices_own_lines_and_has_a_reason(self, account):
        run(account, 100)
        invoice = issue(account)
        run(account, 100)
        line, foreign = invoice.lines.get().pk, issue(account).lines.get().pk
        wrong = [({line: amount}, "A fault") for amount in (0, -1, 101)] + [({line: 1}, " "), ({foreign: 1}, "A fault")]
        for amounts, reason in wrong:
            with pytest.raises(InvoiceRefused):
                correct(invoice, amounts, reason)
        assert not InvoiceSeries.objects.filter(kind="note", last__gt=0).exists()
        note = correct(invoice, {line: 1})
        with pytest.raises(InvoiceRefused):
            correct(note, {note.lines.get().pk: 1})


class TestDatabase:
    """Changes that PostgreSQL refuses, whichever program sends them."""

    def test_receipts_and_invoices_are_append_only_and_no_line_is_added_later(self, account):
        run(account, 100)
        invoice = issue(account)
        for statement in ("UPDATE {} SET id = id", "DELETE FROM {}"):
            for table in ("billing_receipt", "billing_invoice", "billing_invoiceline"):
                with pytest.raises(IntegrityError, match="append-only"), transaction.atomic():
                    connection.cursor().execute(statement.format(table))
        row = {"position": 2, "receipt": run(account, 0), "title": "x", "amount_minor": 0, "credit_minor": 0}
        with pytest.raises(IntegrityError, match="no place"), transaction.atomic():
            InvoiceLine.objects.create(invoice=invoice, **row)

    @pytest.mark.parametrize(
        ("changes", "line_amount", "refusal"),
        [
            ({}, None, "does not equal its lines"),
            ({"total_minor": 99}, None, "invoice_adds_up"),
            ({"sequence": 1}, None, "one_invoice_of_a_number"),
            ({"sequence": 3}, 100, "number before"),
            ({"tax_minor": 1}, 100, "The tax of"),
            ({"subtotal_minor": 99, "total_minor": 99}, 99, "not its receipt"),
        ],
    )
    def test_an_invoice_equals_its_lines_and_receipts(self, account, changes, line_amount, refusal):
        """A second invoice of 100 is written with `changes`, and with one line of `line_amount` or none."""
        run(account, 100)
        first = issue(account)
        values = {field.name: getattr(first, field.name) for field in Invoice._meta.fields if field.name != "id"}
        invoice = Invoice(**values | {"sequence": 2, "number": "another"} | changes)
        rows = [invoice]
        if line_amount is not None:
            row = {"position": 1, "receipt": run(account, 100), "title": "x", "credit_minor": 0}
            rows.append(InvoiceLine(invoice=invoice, amount_minor=line_amount, **row))
        with pytest.raises(IntegrityError, match=refusal):
            write(*rows)
