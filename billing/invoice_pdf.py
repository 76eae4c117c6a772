"""Invoices as PDF files, rendered by WeasyPrint.

Each invoice is rendered once per language and stored, so every later download is identical. WeasyPrint needs shared
libraries (Pango) that no wheel contains. Without these libraries everything but PDFs works, and `problem` names what to
install.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import logging
import shutil
import subprocess
from functools import cache
from types import ModuleType
from typing import Any

from django.conf import settings
from django.template.loader import render_to_string
from django.utils import translation
from django.utils.translation import gettext as _

from billing.errors import DocumentUnavailable
from billing.exports import loaded_lines
from billing.models import Invoice, InvoiceDocument
from billing.policy import policy

logger = logging.getLogger(__name__)

FONTS = settings.BASE_DIR / "static" / "vendor" / "fonts"
MAX_DETAILED_RUNS = 300
"""The PDF shows every receipt line only if the invoice has at most this many runs; a longer one shows one row for each
run. A web request renders the PDF, and each row takes time; nobody reads more pages anyway. The CSV has all lines."""


def pdf(*, invoice: Invoice, language: str) -> bytes:
    """Return an invoice as PDF. It is in English if the console has no such `language`. Raises DocumentUnavailable."""
    language = language if language in dict(settings.LANGUAGES) else "en"
    document = InvoiceDocument.objects.filter(invoice=invoice, language=language).first()
    if document is None:
        content = _render(invoice, language)
        digest = hashlib.sha256(content).hexdigest()
        row = InvoiceDocument(invoice=invoice, language=language, content=content, sha256=digest)
        # Two simultaneous requests both render; the first row stored is the document.
        InvoiceDocument.objects.bulk_create([row], ignore_conflicts=True)
        document = InvoiceDocument.objects.get(invoice=invoice, language=language)
    return bytes(document.content)


def context(invoice: Invoice) -> dict[str, Any]:
    """Return the template context of an invoice's page and PDF."""
    lines = loaded_lines(invoice)  # one for each run, with the receipt and the job that the templates show
    return {"invoice": invoice, "lines": lines, "detailed": len(lines) <= MAX_DETAILED_RUNS}


def is_available() -> bool:
    """Return whether WeasyPrint and its libraries can be loaded."""
    try:
        _weasyprint()
    except DocumentUnavailable:
        return False
    return True


def problem() -> str:
    """Return a message that names the packages an administrator must install for PDFs, or an empty string."""
    if not is_available():
        return _(
            "PDF invoices need Pango, which is not installed. On Debian and Ubuntu: apt-get install "
            "libpango-1.0-0 libpangoft2-1.0-0 libharfbuzz-subset0"
        )
    fc_list = shutil.which("fc-list")
    if fc_list and not subprocess.run([fc_list, ":lang=zh-cn"], capture_output=True, check=False).stdout.strip():
        return _("Chinese text on invoices needs a Chinese font. On Debian and Ubuntu: apt-get install fonts-noto-cjk")
    return ""


def seller_problem() -> str:
    """Return a message if the policy lacks the seller's name or address, otherwise an empty string."""
    billing_policy = policy()
    if billing_policy.seller_name and billing_policy.seller_address:
        return ""
    return _("Invoices have no seller name and address. Set both under Billing policy; future invoices include them.")


def _render(invoice: Invoice, language: str) -> bytes:
    engine = _weasyprint()
    with translation.override(language):
        page = render_to_string("billing/document.html", context(invoice) | {"language": language, "font": _font()})
    # Only `data:` URLs, such as the font's: markup that slipped through must not make the server fetch anything.
    fetcher = engine.urls.URLFetcher(allowed_protocols=("data",))
    return bytes(engine.HTML(string=page, url_fetcher=fetcher).write_pdf())


@cache
def _font() -> str:
    """Return the Latin font as a data URL. Other scripts use the machine's fonts."""
    content = base64.b64encode((FONTS / "inter-latin-wght-normal.woff2").read_bytes()).decode()
    return f"data:font/woff2;base64,{content}"


@cache
def _weasyprint() -> ModuleType:
    """Import WeasyPrint on first use: the import loads shared libraries that may be missing."""
    try:
        importlib.import_module("weasyprint.urls")  # a submodule that `_render` needs
        return importlib.import_module("weasyprint")
    except OSError as error:
        logger.warning("WeasyPrint can't be used: %s", error)
        raise DocumentUnavailable from error
