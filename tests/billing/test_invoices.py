"""Invoices: numbers, lines, tax, credit notes, and what the database refuses; on PostgreSQL."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pytest
from django.db import connection, transaction
from django.utils import timezone
from hypothesis import given, settings
from hypothesis import strategies as st

from billing import invoices, ledger
from billing.models import (
    Account,
    BillingDetails,
    BillingPolicy,
    Invoice,
    InvoiceMail,
    InvoiceSeries,
    Receipt,
    Transaction,
)
from billing.taxes import Tax
from console.accounts.errors import NotFound
from tests.billing.invoicing import balance, check_now, figures, give, issue, run
from tests.factories.billing import wallet
from tests.racing import raised, together

pytestmark = pytest.mark.django_db


def test_an_invoice_has_a_line_for_every_receipt(account):
    first, free, second = run(account, 300, "#1 a.py"), run(account, 0, "#2 b.py"), run(account, 200, "#3 c.py")
    invoice = issue(account)
    assert figures(invoice) == (500, 0, 0, 500)
    lines = [(line.position, line.receipt, line.title, line.amount_minor) for line in invoice.lines.all()]
    assert lines == [(1, first, "#1 a.py", 300), (2, free, "#2 b.py", 0), (3, second, "#3 c.py", 200)]
    assert invoice.lines.first().receipt_lines == first.lines


def test_a_receipt_stands_on_one_invoice(account):
    run(account, 300)
    issue(account)
    assert invoices.issue(organization=account.organization) is None
    run(account, 100)
    assert issue(account).subtotal_minor == 100


def test_nothing_charged_is_nothing_to_invoice(account):
    run(account, 0)
    assert invoices.issue(organization=account.organization) is None
    assert not Invoice.objects.exists()
    assert InvoiceSeries.objects.get().last == 0


def test_numbers_have_no_gap_and_are_the_installations(account):
    BillingPolicy.objects.create(invoice_prefix="TY-")
    other = wallet(balance_minor=1000)
    for each in (account, other, account):
        run(each, 10)
        issue(each)
    assert [invoice.number for invoice in Invoice.objects.order_by("pk")] == ["TY-000001", "TY-000002", "TY-000003"]


def test_a_number_that_was_not_used_is_used_by_the_next(account):
    run(account, 10)

    def fail_late() -> None:
        with transaction.atomic():
            invoices.issue(organization=account.organization)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_late()
    assert issue(account).sequence == 1


def test_monthly(account):
    month = timezone.localtime().replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    late, now = run(account, 300), run(account, 200)
    check_now()
    with connection.cursor() as cursor:  # receipts are append-only, but for this test's clock
        cursor.execute("SET LOCAL session_replication_role = replica")
        Receipt.objects.filter(pk=late.pk).update(created_at=month - timedelta(seconds=1))
        cursor.execute("SET LOCAL session_replication_role = origin")
    (invoice,) = invoices.issue_due()
    check_now()
    assert [line.receipt for line in invoice.lines.all()] == [late]
    assert invoice.period_end == (month - timedelta(days=1)).date()
    assert invoice.period_start == invoice.period_end
    assert invoices.issue_due() == []
    assert [line.receipt for line in issue(account).lines.all()] == [now]
    assert [due.invoice for due in InvoiceMail.objects.all()] == [invoice]  # none for the one that was asked for


def test_one_that_can_not_be_written_keeps_none_from_the_others(account, monkeypatch, caplog):
    others = [wallet(balance_minor=1000) for _ in range(2)]
    for each in (others[0], account, others[1]):
        run(each, 10)
    check_now()
    real, broken_one = invoices.tax_for, account.organization

    def failing(organization):
        if organization == broken_one:
            raise ZeroDivisionError
        return real(organization)

    over = timezone.now() + timedelta(days=40)
    with monkeypatch.context() as patched:
        patched.setattr(timezone, "now", lambda: over)
        patched.setattr(invoices, "tax_for", failing)
        assert {made.organization for made in invoices.issue_due()} == {each.organization for each in others}
        assert "could not be written" in caplog.text
        patched.setattr(invoices, "tax_for", real)
        (late,) = invoices.issue_due()
    assert (late.organization, late.sequence) == (broken_one, 3)


@pytest.mark.parametrize(("zone", "invoiced"), [("UTC", 0), ("Asia/Shanghai", 1), ("America/Los_Angeles", 0)])
def test_the_month_ends_by_the_installations_clock(account, monkeypatch, settings, zone, invoiced):
    """Half past midnight in Shanghai, on the first of December: a run of a second before midnight, and one after."""
    moments = [datetime(2026, 11, 30, 15, 59, 59, tzinfo=UTC), datetime(2026, 11, 30, 16, 0, 0, tzinfo=UTC)]
    runs = [run(account, 100), run(account, 200)]
    check_now()
    with connection.cursor() as cursor:  # receipts are append-only, but for this test's clock
        cursor.execute("SET LOCAL session_replication_role = replica")
        for receipt, moment in zip(runs, moments, strict=True):
            Receipt.objects.filter(pk=receipt.pk).update(created_at=moment)
        cursor.execute("SET LOCAL session_replication_role = origin")
    settings.TIME_ZONE = zone
    monkeypatch.setattr(timezone, "now", lambda: datetime(2026, 11, 30, 16, 30, tzinfo=UTC))
    written = invoices.issue_due()
    lines = [line.receipt for invoice in written for line in invoice.lines.all()]
    assert lines == runs[:invoiced]
    assert {(each.period_start, each.period_end) for each in written} <= {(date(2026, 11, 30), date(2026, 11, 30))}


def test_the_month_is_over_for_each_organization(account):
    others = [wallet(balance_minor=1000) for _ in range(2)]
    for each in (account, *others):
        run(each, 10)
    assert invoices.issue_due() == []


def test_credit_is_taken_off(account):
    give(account, 120)
    run(account, 100)
    run(account, 100)
    invoice = issue(account)
    assert figures(invoice) == (200, -120, 0, 80)
    assert [line.credit_minor for line in invoice.lines.all()] == [-100, -20]


# Tax


@pytest.mark.parametrize(
    ("percent", "inclusive", "taxable", "due"),
    [
        ("19", True, 119, 19),
        ("19", False, 100, 19),
        ("19", False, 50, 10),  # 9.5
        ("7.5", False, 20, 2),  # 1.5
        ("0", True, 100, 0),
        ("25", True, 10, 2),
        ("8.875", False, 400, 36),  # 35.5
        ("100", True, 1, 1),  # 0.5
    ],
)
def test_the_tax_of_an_amount(percent, inclusive, taxable, due):
    assert Tax("VAT", Decimal(percent), inclusive).of(taxable) == due


@pytest.mark.parametrize(
    ("inclusive", "expected", "wallet_left", "revenue"),
    [(True, (1190, 0, 190, 1190), 8810, 1000), (False, (1190, 0, 226, 1416), 8584, 1190)],
)
def test_tax_in_prices_or_on_top(account, inclusive, expected, wallet_left, revenue):
    BillingPolicy.objects.create(tax_percent=Decimal(19), tax_inclusive=inclusive)
    run(account, 1190)
    invoice = issue(account)
    assert figures(invoice) == expected
    account.refresh_from_db()
    assert account.posted_minor == wallet_left
    assert (balance(Account.Kinds.REVENUE), balance(Account.Kinds.TAX)) == (revenue, expected[2])
    assert invoice.net_minor == revenue


def test_tax_on_top_that_the_wallet_does_not_hold_is_owed(account):
    BillingPolicy.objects.create(tax_percent=Decimal(10), tax_inclusive=False)
    run(account, 9950)
    give(account, 500)
    issue(account)
    account.refresh_from_db()
    # the 50 that were paid in are taken; credit pays no tax
    assert (account.posted_minor, balance(Account.Kinds.RECEIVABLE, account)) == (500, -945)
    assert balance(Account.Kinds.TAX) == 995


def test_an_organizations_own_tax(account):
    BillingPolicy.objects.create(tax_percent=Decimal(19), seller_name="Trains Ltd", seller_tax_id="GB1")
    BillingDetails.objects.create(
        organization=account.organization, name="Kunde GmbH", tax_percent=Decimal(0), tax_note="Reverse charge"
    )
    run(account, 100)
    invoice = issue(account)
    assert invoice.tax_minor == 0
    assert invoice.customer["name"] == "Kunde GmbH"
    assert invoice.customer["tax_note"] == "Reverse charge"
    assert invoice.seller["name"] == "Trains Ltd"


@settings(max_examples=200)
@given(
    amounts=st.lists(st.integers(0, 10**7), min_size=1, max_size=4),
    percent=st.decimals(0, 100, places=3),
    inclusive=st.booleans(),
    shares=st.lists(st.integers(0, 100), min_size=4, max_size=4),
)
def test_notes_give_back_all_of_the_tax_and_never_more(amounts, percent, inclusive, shares):
    """However a whole invoice is given back in parts, the taxes given back sum to its tax. Pure."""
    tax = Tax("VAT", percent, inclusive)
    whole = sum(amounts)
    left, given_back = whole, 0
    for share in [*shares, 100]:
        part = left * share // 100
        back = tax.of(whole) - given_back - tax.of(left - part)
        assert back >= 0
        given_back, left = given_back + back, left - part
    assert (left, given_back) == (0, tax.of(whole))


# Two at once


@pytest.mark.django_db(transaction=True)
def test_asked_for_at_once_it_is_written_once(account):
    other = wallet(balance_minor=1000)
    for each in (account, other):
        run(each, 100)
    calls = [lambda each=each: invoices.issue(organization=each.organization) for each in (account, other)] * 3
    outcomes = together(*calls)
    assert not raised(outcomes)
    assert sum(invoice is not None for invoice in outcomes) == 2
    assert sorted(Invoice.objects.values_list("sequence", flat=True)) == [1, 2]


def test_another_organization_sees_nothing_of_it(account, stranger):
    run(account, 100)
    invoice = issue(account)
    assert invoices.invoice_for(account.organization, invoice.pk) == invoice
    with pytest.raises(NotFound):
        invoices.invoice_for(stranger.organization, invoice.pk)
    assert invoices.uninvoiced_minor(account.organization) == 0
    run(account, 5)
    assert invoices.uninvoiced_minor(account.organization) == 5


def test_every_posting_of_an_invoice_has_one_reference(account):
    BillingPolicy.objects.create(tax_percent=Decimal(19))
    run(account, 119)
    invoice = issue(account)
    (line,) = invoice.lines.all()
    invoices.correct(invoice=invoice, amounts={line.pk: 119}, reason="A fault", user=None)
    kinds = Transaction.objects.exclude(kind__in=["charge", "top-up"]).order_by("pk")
    assert [row.reference for row in kinds] == ["tax:invoice:1", "credit-note:1"]
    assert ledger.platform_account(Account.Kinds.TAX, "USD").posted_minor == 0
