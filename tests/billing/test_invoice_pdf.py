"""Invoices as files: what the PDF shows, that its bytes stay, and CSV that no spreadsheet executes."""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import subprocess
from datetime import date
from decimal import Decimal

import pytest
from django.db import IntegrityError, transaction

from billing import charges, exports, invoice_pdf, invoices
from billing.models import BillingDetails, BillingPolicy, InvoiceDocument
from billing.usage import Range, Usage
from tests.factories.billing import quote

pytestmark = pytest.mark.django_db
HOSTILE = '=HYPERLINK("http://evil.example/","#1")'


def charge(account, title: str = "#1 train.py"):
    """Return the receipt of a run that used 1260 node seconds, which cost $1.26."""
    offer = quote(account, seconds=3600, nodes=2)
    hold = charges.hold(quote=offer, reference=str(offer.pk), labels={"workspace": "@home", "node_spec": "small"})
    ranges = [
        Range(600, 2, "2026-11-20T10:00:00+00:00", "2026-11-20T10:10:00+00:00"),
        Range(60, 1, "2026-11-20T10:10:00+00:00", "2026-11-20T10:11:00+00:00"),
    ]
    free = [charges.free_line(rule="queue", seconds=12)]
    return charges.settle(hold=hold, usage=Usage.of(ranges, completed=True), title=title, free_lines=free)


@pytest.fixture
def seller(db):
    assert "no seller name and address" in invoice_pdf.seller_problem()
    policy = BillingPolicy.objects.create(
        seller_name="Trains Ltd", seller_address="1 Yard Road\n10115 Berlin", seller_tax_id="DE1",
        tax_percent=Decimal(19),
    )  # fmt: skip
    assert not invoice_pdf.seller_problem()
    return policy


@pytest.fixture
def _needs_pango():
    if not invoice_pdf.is_available():
        if os.environ.get("CI") == "true":
            pytest.fail(invoice_pdf.problem())
        pytest.skip(invoice_pdf.problem())


def words(content: bytes, *options: str) -> str:
    """Return the text of a PDF; empty where pdftotext is not installed."""
    reader = shutil.which("pdftotext")
    if reader is None:
        return ""
    command = [reader, *(options or ["-layout"]), "-", "-"]
    return subprocess.run(command, input=content, capture_output=True, check=True).stdout.decode()


@pytest.mark.usefixtures("_needs_pango")
class TestPdf:
    @pytest.mark.parametrize(
        ("language", "heading", "dates"),
        [
            ("en", "Invoice", "Nov 1, 2026 – Nov 30, 2026"),
            ("zh-hans", "账单", "2026年11月1日 – 2026年11月30日"),
        ],
    )
    @pytest.mark.usefixtures("seller")
    def test_shows_dates_and_long_names_within_the_margin_in_two_languages(self, account, language, heading, dates):
        BillingDetails.objects.create(
            organization=account.organization, name="某某科技有限公司" + "W" * 150, address="1 Long Road " * 12
        )
        charge(account, "#1 " + "a_long_name_" * 20)
        invoice = invoices.issue(organization=account.organization)
        invoice.period_start, invoice.period_end = date(2026, 11, 1), date(2026, 11, 30)
        content = invoice_pdf._render(invoice, language)
        assert content.startswith(b"%PDF-")
        shown = words(content)
        if not shown:
            pytest.skip("There is no pdftotext (poppler-utils) on this machine.")
        for wanted in (heading, dates, invoice.number, "Trains Ltd", "10115 Berlin", "DE1", "某某科技有限公司", "1.26"):
            assert wanted in shown
        boxes = words(content, "-bbox")
        (width,) = {float(edge) for edge in re.findall(r'<page width="([\d.]+)"', boxes)}
        margin = 18 / 25.4 * 72  # 18 mm in points
        assert max(float(edge) for edge in re.findall(r'xMax="([\d.]+)"', boxes)) <= width - margin + 0.5

    def test_is_rendered_once_and_stored_and_loads_nothing_that_a_customer_types(self, account, monkeypatch, caplog):
        BillingDetails.objects.create(
            organization=account.organization, name='<img src="file:///etc/passwd">', address='<link href="http://x/">'
        )
        charge(account, '<iframe src="http://evil.example/">')
        invoice = invoices.issue(organization=account.organization)
        first = invoice_pdf.pdf(invoice=invoice, language="../../x")  # an unknown language is English
        shown = words(first)
        assert not shown or "file:///etc/passwd" in shown  # as text
        assert "Failed to load" not in caplog.text
        monkeypatch.setattr(invoice_pdf, "_render", lambda *_arguments: pytest.fail("It was rendered twice."))
        assert invoice_pdf.pdf(invoice=invoice, language="en") == first
        row = InvoiceDocument.objects.get()
        with pytest.raises(IntegrityError, match="append-only"), transaction.atomic():
            InvoiceDocument.objects.filter(pk=row.pk).update(content=b"")


class TestCsv:
    def rows(self, lines) -> list[dict[str, str]]:
        return list(csv.DictReader(io.StringIO("".join(lines))))

    @pytest.mark.usefixtures("seller")
    def test_of_an_invoice_and_its_credit_note(self, account):
        charge(account)
        invoice = invoices.issue(organization=account.organization)
        rows = self.rows(exports.invoice_csv(invoice))
        assert [(row["rule"], row["amount"]) for row in rows] == [
            ("queue", "0.00"),
            ("time_used", "1.20"),
            ("time_used", "0.06"),
            ("credits", "0.00"),
            ("tax_included", "0.20"),
            ("total", "1.26"),
        ]
        time_of_day = slice(11, 16)
        assert [(row["nodes"], row["from"][time_of_day], row["to"][time_of_day]) for row in rows[1:3]] == [
            ("2", "10:00", "10:10"),
            ("1", "10:10", "10:11"),
        ]
        assert {row["unit_price"] for row in rows[1:3]} == {"3.60"}  # in the major unit, like amounts
        run_line = invoice.lines.get()  # an invoice has one line for each run, the CSV one for each part
        note = invoices.correct(invoice=invoice, amounts={run_line.pk: 26}, reason="A slip", user=None)
        assert [(row["rule"], row["amount"]) for row in self.rows(exports.invoice_csv(note))] == [
            ("correction", "-0.26"),
            ("credits", "0.00"),
            ("tax_included", "-0.04"),
            ("total", "-0.26"),
        ]

    def test_contains_no_formula_of_a_customer(self, account):
        (first, *_others) = self.rows(exports.costs_csv([charge(account, HOSTILE)]))
        assert (first["run"], first["workspace"]) == (f"'{HOSTILE}", "'@home")
        for text in ("=1", "+1", "-1", "@x", "＝1", "＋1", "－1", "＠x", "\t=1", "\r=1", "\n=1"):
            assert exports.escape_formula(text).startswith("'")
        assert exports.escape_formula("#1 train.py") == "#1 train.py"
