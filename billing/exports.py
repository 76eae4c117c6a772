"""CSV exports of invoices and monthly costs. Customer-chosen text is escaped so that no spreadsheet runs a formula."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any

from billing.amounts import to_major
from billing.messages import line_title
from billing.models import Invoice, InvoiceLine, Receipt

RECEIPT_COLUMNS = (
    "receipt",
    "run",
    "written_at",
    "member",
    "workspace",
    "node_spec",
    "rule",
    "title",
    "from",
    "to",
    "nodes",
    "quantity",
    "unit",
    "unit_price",
    "amount",
    "currency",
)
"""The header. `rule` is the code of a receipt line (`billing.pricing.Line`). In rows of an invoice that belong to no
receipt, `rule` is `correction`, `credits`, `tax`, `tax_included` or `total`."""
FORMULA_PREFIXES = ("=", "+", "-", "@", "＝", "＋", "－", "＠", "\t", "\r", "\n")
"""First characters of cells that a spreadsheet may take for formulas. The full-width ones count in East Asian versions.
White space is here too, because spreadsheets skip it before the other characters."""


def costs_csv(receipts: Iterable[Receipt]) -> Iterator[str]:
    """Yield a CSV row per receipt line. `receipts` must have `hold.placed_by` loaded."""
    yield csv_row(RECEIPT_COLUMNS)
    for receipt in receipts:
        yield from map(csv_row, _receipt_cells(receipt))


def invoice_csv(invoice: Invoice) -> Iterator[str]:
    """Yield a CSV row per receipt line of an invoice, then credits, tax and total."""
    yield csv_row(("document", "position", *RECEIPT_COLUMNS))
    lines = invoice.lines.select_related("receipt__hold__placed_by", "corrects")
    for line in lines.iterator(chunk_size=500):
        line_cells = [invoice.number, str(line.position)]
        if line.receipt:
            yield from (csv_row([*line_cells, *cells]) for cells in _receipt_cells(line.receipt))
        else:
            yield csv_row([*line_cells, *_summary("correction", line.title, line.amount_minor, invoice)])
    for rule, amount in (
        ("credits", invoice.credits_minor),
        ("tax_included" if invoice.tax_inclusive else "tax", invoice.tax_minor),
        ("total", invoice.total_minor),
    ):
        yield csv_row([invoice.number, "", *_summary(rule, "", amount, invoice)])


def _receipt_cells(receipt: Receipt) -> Iterator[list[str]]:
    """Yield the cells of RECEIPT_COLUMNS for each line of a receipt."""
    hold = receipt.hold
    receipt_cells = [
        f"R-{receipt.pk}",
        escape_formula(receipt.title),
        receipt.created_at.isoformat(timespec="seconds"),
        escape_formula(hold.placed_by.email if hold.placed_by else ""),
        escape_formula(str(hold.labels.get("workspace", ""))),
        escape_formula(str(hold.labels.get("node_spec", ""))),
    ]
    for line in receipt.lines or [_empty_line(receipt)]:
        yield [
            *receipt_cells,
            line["rule"],
            line_title(line),
            line.get("began_at", ""),
            line.get("ended_at", ""),
            str(line.get("nodes", "")),
            line["quantity"],
            line["unit"],
            f"{to_major(Decimal(line['unit_minor']), receipt.currency):f}",
            f"{to_major(line['amount_minor'], receipt.currency):f}",
            receipt.currency,
        ]


def _empty_line(receipt: Receipt) -> dict[str, Any]:
    """Return a line for a receipt without lines, such as a free run's, so that it has a row too."""
    return {"rule": "", "quantity": "0", "unit": "run", "unit_minor": "0", "amount_minor": receipt.total_minor}


def _summary(rule: str, title: str, amount_minor: int, invoice: Invoice) -> list[str]:
    """Return the cells of RECEIPT_COLUMNS for an amount of an invoice that is not a receipt's line, such as its tax."""
    cells = {
        "rule": rule,
        "title": escape_formula(title),
        "amount": f"{to_major(amount_minor, invoice.currency):f}",
        "currency": invoice.currency,
    }
    return [cells.get(column, "") for column in RECEIPT_COLUMNS]


def escape_formula(text: str) -> str:
    """Return the text, with an apostrophe before it if a spreadsheet would evaluate it as a formula."""
    return f"'{text}" if text.startswith(FORMULA_PREFIXES) else text


def csv_row(cells: Iterable[str]) -> str:
    """Return a line of CSV. Text that a customer chose must have gone through `escape_formula`."""
    buffer = io.StringIO()
    csv.writer(buffer).writerow(cells)
    return buffer.getvalue()


def loaded_lines(invoice: Invoice) -> list[InvoiceLine]:
    """Return the invoice's lines with their receipts and corrected lines loaded.

    Templates show the job of each receipt: `order` leads from a hold to the `jobs.Order` that placed it.
    """
    return list(
        invoice.lines.select_related("receipt__hold__quote", "receipt__hold__order__job__image", "corrects__receipt")
    )
