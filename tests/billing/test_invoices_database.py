"""What PostgreSQL itself refuses of invoices, whoever writes them."""

from __future__ import annotations

from decimal import Decimal

import pytest
from django.db import IntegrityError, transaction
from django.utils import timezone

from billing.models import (
    Invoice,
    InvoiceLine,
)
from tests.billing.invoicing import check_now, issue, run

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("model", [Invoice, InvoiceLine])
@pytest.mark.parametrize("change", ["update", "delete"])
def test_what_is_written_stays(account, model, change):
    run(account, 100)
    issue(account)
    rows = model.objects.all()
    acts = {
        "update": lambda: rows.update(**{"number" if model is Invoice else "title": "x"}),
        "delete": lambda: rows._raw_delete(rows.db),
    }
    with pytest.raises(IntegrityError, match="append-only"), transaction.atomic():
        acts[change]()


def write(*rows: Invoice | InvoiceLine) -> None:
    with transaction.atomic():
        for row in rows:
            row.save()
        check_now()


def copy_of(invoice: Invoice, **changes) -> Invoice:
    values = {field.name: getattr(invoice, field.name) for field in Invoice._meta.fields if field.name != "id"}
    values |= {"sequence": invoice.sequence + 1, "number": "another"} | changes
    return Invoice(**values)


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({}, "does not equal its lines"),
        ({"subtotal_minor": 99, "total_minor": 99}, "does not equal its lines"),
        ({"sequence": 7, "line_count": 1}, "does not equal its lines|number before"),
        ({"total_minor": 99}, "invoice_adds_up"),
        ({"sequence": 1}, "one_invoice_of_a_number"),
    ],
)
def test_an_invoice_that_is_not_its_lines(account, changes, refusal):
    run(account, 100)
    invoice = issue(account)
    with pytest.raises(IntegrityError, match=refusal):
        write(copy_of(invoice, **changes))


def test_a_line_that_is_not_its_receipt_a_gap_and_a_wrong_tax(account):
    for changes, amount, refusal in [
        ({"sequence": 2}, 100, "number before"),
        ({"tax_minor": 1}, 100, "The tax of"),
        ({"subtotal_minor": 99, "total_minor": 99}, 99, "not its receipt"),
    ]:
        receipt = run(account, 100)
        base = Invoice(
            kind="invoice", sequence=1, number="x", organization=account.organization, currency="USD",
            period_start=timezone.localdate(), period_end=timezone.localdate(), seller={}, customer={}, tax_name="",
            tax_percent=Decimal(0), tax_inclusive=True, line_count=1, subtotal_minor=100, credits_minor=0, tax_minor=0,
            total_minor=100, issued_at=timezone.now(),
        )  # fmt: skip
        for name, value in changes.items():
            setattr(base, name, value)
        line = InvoiceLine(invoice=base, position=1, receipt=receipt, title="x", amount_minor=amount, credit_minor=0)
        with pytest.raises(IntegrityError, match=refusal):
            write(base, line)


def test_no_line_comes_later(account):
    run(account, 100)
    invoice = issue(account)
    later = run(account, 0)
    with pytest.raises(IntegrityError, match="no place"), transaction.atomic():
        InvoiceLine.objects.create(
            invoice=invoice, position=2, receipt=later, title="x", amount_minor=0, credit_minor=0
        )
