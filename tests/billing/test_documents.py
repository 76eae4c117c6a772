"""Invoices as files: what is on the PDF, that its bytes stay, and CSV that no spreadsheet runs."""

from __future__ import annotations

import csv
import io
import os
import shutil
import subprocess
from decimal import Decimal
from types import SimpleNamespace

import pytest
from django.db import IntegrityError, transaction

from billing import charges, documents, exports, invoices
from billing.errors import DocumentUnavailable
from billing.models import BillingDetails, BillingPolicy, InvoiceDocument
from billing.pricing import Range, Usage
from tests.factories.billing import book, quote, wallet

pytestmark = pytest.mark.django_db
HOSTILE = '=HYPERLINK("http://evil.example/","#1")'


@pytest.fixture
def account():
    book()
    return wallet(balance_minor=10_000)


def charge(account, title: str = "#1 train.py"):
    made = quote(account, seconds=3600, nodes=2)
    hold = charges.hold(quote=made, reference=str(made.pk), labels={"workspace": "@home", "node_spec": "small"})
    ranges = [
        Range(600, 2, "2026-11-20T10:00:00+00:00", "2026-11-20T10:10:00+00:00"),
        Range(60, 1, "2026-11-20T10:10:00+00:00", "2026-11-20T10:11:00+00:00"),
    ]
    free = [charges.free_line(rule="queue", seconds=12)]
    return charges.settle(hold=hold, usage=Usage.of(ranges, completed=True), title=title, free_lines=free)


@pytest.fixture
def invoice(account):
    BillingPolicy.objects.create(seller_name="Trains Ltd", seller_address="1 Yard Road", tax_percent=Decimal(19))
    BillingDetails.objects.create(organization=account.organization, name="某某科技有限公司", address="上海市")
    charge(account)
    return invoices.issue(organization=account.organization)


@pytest.fixture
def _needs_pango():
    if not documents.is_available():
        if os.environ.get("CI") == "true":
            pytest.fail(documents.problem())
        pytest.skip(documents.problem())


def words(content: bytes) -> str:
    reader = shutil.which("pdftotext")
    if reader is None:
        return ""
    return subprocess.run([reader, "-layout", "-", "-"], input=content, capture_output=True, check=True).stdout.decode()


@pytest.mark.usefixtures("_needs_pango")
@pytest.mark.parametrize(("language", "heading"), [("en", "Invoice"), ("zh-hans", "发票")])
def test_a_document_in_two_languages(invoice, language, heading):
    content = documents.pdf(invoice=invoice, language=language)
    assert content.startswith(b"%PDF-")
    if told := words(content):
        for wanted in (heading, invoice.number, "Trains Ltd", "某某科技有限公司", "1.26", "#1 train.py"):
            assert wanted in told


@pytest.mark.usefixtures("_needs_pango")
def test_it_is_drawn_once_and_kept(invoice, monkeypatch):
    first = documents.pdf(invoice=invoice, language="en")
    monkeypatch.setattr(documents, "_draw", lambda *_arguments: pytest.fail("It was drawn again."))
    assert documents.pdf(invoice=invoice, language="en") == first
    row = InvoiceDocument.objects.get()
    with pytest.raises(IntegrityError, match="append-only"), transaction.atomic():
        InvoiceDocument.objects.filter(pk=row.pk).update(content=b"")


@pytest.mark.usefixtures("_needs_pango")
def test_what_a_customer_types_leads_nowhere(account, caplog):
    BillingDetails.objects.create(
        organization=account.organization, name='<img src="file:///etc/passwd">', address='<link href="http://x/">'
    )
    charge(account, '<iframe src="http://evil.example/">')
    made = invoices.issue(organization=account.organization)
    told = words(documents.pdf(invoice=made, language="en"))
    assert not told or "file:///etc/passwd" in told
    assert "Failed to load" not in caplog.text


def test_an_unknown_language_is_english(invoice, monkeypatch):
    monkeypatch.setattr(documents, "_draw", lambda _invoice, language: language.encode())
    assert documents.pdf(invoice=invoice, language="../../x") == b"en"


def test_without_pango_the_console_says_what_to_install(invoice, monkeypatch):
    def missing(_name):
        raise OSError("cannot load library 'libpango-1.0-0'")

    documents._weasyprint.cache_clear()
    monkeypatch.setattr(documents, "importlib", SimpleNamespace(import_module=missing))
    with pytest.raises(DocumentUnavailable):
        documents.pdf(invoice=invoice, language="en")
    assert "apt-get install libpango-1.0-0" in documents.problem()
    assert not InvoiceDocument.objects.exists()


def test_a_machine_without_a_chinese_font_is_told(monkeypatch):
    monkeypatch.setattr(documents, "is_available", lambda: True)
    monkeypatch.setattr(documents.shutil, "which", lambda _name: "/bin/true")
    assert "fonts-noto-cjk" in documents.problem()
    monkeypatch.setattr(documents.shutil, "which", lambda _name: "/bin/echo")  # it says something
    assert documents.problem() == ""


# CSV


def rows(lines) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO("".join(lines))))


def test_an_invoice_row_by_row(invoice):
    found = rows(exports.invoice_csv(invoice))
    assert [(row["rule"], row["amount"]) for row in found] == [
        ("queue", "0.00"),
        ("time_used", "1.20"),
        ("time_used", "0.06"),
        ("credits", "0.00"),
        ("tax_included", "0.20"),
        ("total", "1.26"),
    ]
    ranges = found[1:3]
    assert [(row["nodes"], row["from"][11:16], row["to"][11:16]) for row in ranges] == [
        ("2", "10:00", "10:10"),
        ("1", "10:10", "10:11"),
    ]
    assert sum(Decimal(row["amount"]) for row in found[:3]) == Decimal(found[-1]["amount"])


def test_a_credit_note_row_by_row(invoice):
    line = invoice.lines.get()
    note = invoices.correct(invoice=invoice, amounts={line.pk: 26}, reason="A slip", user=None)
    found = rows(exports.invoice_csv(note))
    assert [(row["rule"], row["amount"]) for row in found] == [
        ("correction", "-0.26"),
        ("credits", "0.00"),
        ("tax_included", "-0.04"),
        ("total", "-0.26"),
    ]


def test_no_text_of_a_customer_becomes_a_formula(account):
    receipt = charge(account, HOSTILE)
    (first, *_others) = rows(exports.costs_csv([receipt]))
    assert first["run"] == f"'{HOSTILE}"
    assert first["workspace"] == "'@home"


@pytest.mark.parametrize("text", ["=1", "+1", "-1", "@x", "＝1", "＋1", "－1", "＠x", "\t=1", "\r=1", "\n=1"])
def test_what_a_spreadsheet_would_run(text):
    assert exports.safe(text).startswith("'")


def test_what_it_would_not():
    assert exports.safe("#1 train.py") == "#1 train.py"
