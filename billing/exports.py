"""Money as CSV files: an invoice, and a month's costs.

The one rule: a text that a customer chose can't become a formula in whoever's spreadsheet.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from typing import Any

from billing.models import Invoice, InvoiceLine, Receipt
from billing.wording import line_title, to_major

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
FORMULA_SIGNS = ("=", "+", "-", "@", "＝", "＋", "－", "＠", "\t", "\r", "\n")  # so a Chinese Excel reads them
"""What a cell begins with that is reckoned out; the wide signs are read as the narrow ones where people type them."""


def costs_csv(receipts: Iterable[Receipt]) -> Iterator[str]:
    """A row for every line of every receipt. `receipts` have their hold and its member loaded."""
    yield _row(RECEIPT_COLUMNS)
    for receipt in receipts:
        yield from _receipt_rows(receipt)


def invoice_csv(invoice: Invoice) -> Iterator[str]:
    """A row for every line of every receipt on an invoice, then what comes off and on, then the total."""
    yield _row(("document", "position", *RECEIPT_COLUMNS))
    lines = invoice.lines.select_related("receipt__hold__placed_by", "corrects")
    for line in lines.iterator(chunk_size=500):
        head = [invoice.number, str(line.position)]
        if line.receipt:
            yield from (_row([*head, *row]) for row in _receipt_cells(line.receipt))
        else:
            yield _row([*head, *_summary("correction", line.title, line.amount_minor, invoice)])
    for rule, amount in (
        ("credits", invoice.credits_minor),
        ("tax_included" if invoice.tax_inclusive else "tax", invoice.tax_minor),
        ("total", invoice.total_minor),
    ):
        yield _row([invoice.number, "", *_summary(rule, "", amount, invoice)])


def _receipt_rows(receipt: Receipt) -> Iterator[str]:
    return (_row(cells) for cells in _receipt_cells(receipt))


def _receipt_cells(receipt: Receipt) -> Iterator[list[str]]:
    hold = receipt.hold
    head = [
        f"R-{receipt.pk}",
        safe(receipt.title),
        receipt.created_at.isoformat(timespec="seconds"),
        safe(hold.placed_by.email if hold.placed_by else ""),
        safe(str(hold.labels.get("workspace", ""))),
        safe(str(hold.labels.get("node_spec", ""))),
    ]
    for line in receipt.lines or [_nothing(receipt)]:
        yield [
            *head,
            line["rule"],
            line_title(line),
            line.get("began_at", ""),
            line.get("ended_at", ""),
            str(line.get("nodes", "")),
            line["quantity"],
            line["unit"],
            line["unit_minor"],
            f"{to_major(line['amount_minor'], receipt.currency):f}",
            receipt.currency,
        ]


def _nothing(receipt: Receipt) -> dict[str, Any]:
    return {"rule": "", "quantity": "0", "unit": "run", "unit_minor": "0", "amount_minor": receipt.total_minor}


def _summary(rule: str, title: str, amount_minor: int, invoice: Invoice) -> list[str]:
    empty = [""] * (len(RECEIPT_COLUMNS) - 2)
    empty[RECEIPT_COLUMNS.index("rule")] = rule
    empty[RECEIPT_COLUMNS.index("title")] = safe(title)
    return [*empty, f"{to_major(amount_minor, invoice.currency):f}", invoice.currency]


def safe(text: str) -> str:
    """A text as a spreadsheet takes it for one."""
    return f"'{text}" if text.startswith(FORMULA_SIGNS) else text


def _row(cells: Iterable[str]) -> str:
    out = io.StringIO()
    csv.writer(out).writerow(cells)
    return out.getvalue()


def lines_of(invoice: Invoice) -> list[InvoiceLine]:
    """An invoice's lines with their receipts, or what they correct."""
    return list(invoice.lines.select_related("receipt", "corrects__receipt"))
