"""What an invoice took is given back: never more, its tax and credit in step, each line once."""

from __future__ import annotations

from decimal import Decimal

import pytest

from billing import credit, invoices
from billing.errors import InvoiceRefused
from billing.models import (
    Account,
    BillingPolicy,
    Invoice,
    InvoiceSeries,
)
from tests.billing.invoicing import balance, check_now, figures, give, issue, run
from tests.factories.accounts import MembershipFactory
from tests.racing import raised, together

pytestmark = pytest.mark.django_db


def test_a_credit_note_gives_the_money_back(account):
    BillingPolicy.objects.create(tax_percent=Decimal(19), note_prefix="G-")
    member = MembershipFactory(organization=account.organization)
    run(account, 119)
    run(account, 238)
    invoice = issue(account)
    first, second = invoice.lines.all()
    note = invoices.correct(invoice=invoice, amounts={second.pk: 119}, reason="It was our fault", user=member.user)
    check_now()
    assert (note.number, figures(note)) == ("G-000001", (-119, 0, -19, -119))
    account.refresh_from_db()
    assert account.posted_minor == 10_000 - 357 + 119
    assert (balance(Account.Kinds.REVENUE), balance(Account.Kinds.TAX)) == (200, 38)
    assert invoices.correctable(invoice) == [(first, 119), (second, 119)]
    rest = invoices.correct(invoice=invoice, amounts={first.pk: 119, second.pk: 119}, reason="All of it", user=None)
    check_now()
    assert figures(rest) == (-238, 0, -38, -238)
    account.refresh_from_db()
    assert account.posted_minor == 10_000
    assert (balance(Account.Kinds.REVENUE), balance(Account.Kinds.TAX)) == (0, 0)


def test_what_credit_paid_comes_back_as_credit_and_last(account):
    give(account, 60)
    run(account, 100)
    invoice = issue(account)
    (line,) = invoice.lines.all()
    note = invoices.correct(invoice=invoice, amounts={line.pk: 70}, reason="A fault", user=None)
    check_now()
    assert figures(note) == (-70, 30, 0, -40)
    account.refresh_from_db()
    assert (account.posted_minor, credit.credit_minor(account), credit.paid_minor(account)) == (10_030, 30, 10_000)
    last = invoices.correct(invoice=invoice, amounts={line.pk: 30}, reason="The rest", user=None)
    check_now()
    assert figures(last) == (-30, 30, 0, 0)
    account.refresh_from_db()
    assert (account.posted_minor, credit.credit_minor(account)) == (10_060, 60)


def test_tax_on_top_comes_back_in_step(account):
    BillingPolicy.objects.create(tax_percent=Decimal("7.5"), tax_inclusive=False)
    run(account, 33)
    invoice = issue(account)
    (line,) = invoice.lines.all()
    for _ in range(3):
        invoices.correct(invoice=invoice, amounts={line.pk: 11}, reason="A fault", user=None)
        check_now()
    account.refresh_from_db()
    assert account.posted_minor == 10_000
    assert (balance(Account.Kinds.REVENUE), balance(Account.Kinds.TAX)) == (0, 0)


@pytest.mark.parametrize("amount", [0, -1, 101])
def test_more_than_was_charged_is_not_given_back(account, amount):
    run(account, 100)
    invoice = issue(account)
    (line,) = invoice.lines.all()
    with pytest.raises(InvoiceRefused):
        invoices.correct(invoice=invoice, amounts={line.pk: amount}, reason="A fault", user=None)
    assert Invoice.objects.count() == 1
    assert InvoiceSeries.objects.filter(kind="note", last__gt=0).count() == 0


def test_a_note_needs_a_reason_lines_of_its_invoice_and_an_invoice(account):
    run(account, 100)
    invoice = issue(account)
    run(account, 100)
    other = issue(account)
    (line,), (foreign,) = invoice.lines.all(), other.lines.all()
    with pytest.raises(InvoiceRefused):
        invoices.correct(invoice=invoice, amounts={line.pk: 1}, reason=" ", user=None)
    with pytest.raises(InvoiceRefused):
        invoices.correct(invoice=invoice, amounts={foreign.pk: 1}, reason="A fault", user=None)
    note = invoices.correct(invoice=invoice, amounts={line.pk: 1}, reason="A fault", user=None)
    with pytest.raises(InvoiceRefused):
        invoices.correct(invoice=note, amounts={note.lines.get().pk: 1}, reason="A fault", user=None)


@pytest.mark.django_db(transaction=True)
def test_a_line_is_given_back_once(account):
    run(account, 100)
    invoice = invoices.issue(organization=account.organization)
    (line,) = invoice.lines.all()
    correct = lambda: invoices.correct(invoice=invoice, amounts={line.pk: 100}, reason="A fault", user=None)
    assert [type(error) for error in raised(together(correct, correct, correct))] == [InvoiceRefused] * 2
    account.refresh_from_db()
    assert account.posted_minor == 10_000
