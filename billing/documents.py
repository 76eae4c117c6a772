"""Invoices as PDF files. Hides WeasyPrint and what it needs of the machine.

The one rule: a document is drawn once in a language and kept; who asks later gets the same bytes. WeasyPrint wants
shared libraries (Pango) that no wheel carries: a machine without them serves everything else, and says what to install.
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
from billing.exports import lines_of
from billing.models import Invoice, InvoiceDocument

logger = logging.getLogger(__name__)

FONTS = settings.BASE_DIR / "static" / "vendor" / "fonts"
DETAILS_UP_TO = 300
"""An invoice of more runs shows each run in one row; its lines are in the CSV."""


def pdf(*, invoice: Invoice, language: str) -> bytes:
    """An invoice in a language of `settings.LANGUAGES` (another one: English). Raises DocumentUnavailable."""
    wanted = language if language in dict(settings.LANGUAGES) else "en"
    known = InvoiceDocument.objects.filter(invoice=invoice, language=wanted).first()
    if known is None:
        drawn = _draw(invoice, wanted)
        digest = hashlib.sha256(drawn).hexdigest()
        row = InvoiceDocument(invoice=invoice, language=wanted, content=drawn, sha256=digest)
        # Two who ask at once draw twice; the first that is kept is the document.
        InvoiceDocument.objects.bulk_create([row], ignore_conflicts=True)
        known = InvoiceDocument.objects.get(invoice=invoice, language=wanted)
    return bytes(known.content)


def context(invoice: Invoice) -> dict[str, Any]:
    """What the page and the file of an invoice show."""
    lines = lines_of(invoice)
    return {"invoice": invoice, "lines": lines, "detailed": len(lines) <= DETAILS_UP_TO}


def is_available() -> bool:
    """Whether this machine has what PDF files take."""
    try:
        _weasyprint()
    except DocumentUnavailable:
        return False
    return True


def problem() -> str:
    """What an administrator has to install for PDF files, as a sentence; empty where nothing is missing."""
    if not is_available():
        return _(
            "Invoices can't be made as PDF: Pango is missing. On Debian and Ubuntu:"
            " apt-get install libpango-1.0-0 libpangoft2-1.0-0 libharfbuzz-subset0"
        )
    lister = shutil.which("fc-list")
    if lister and not subprocess.run([lister, ":lang=zh-cn"], capture_output=True, check=False).stdout.strip():
        return _(
            "Chinese text on invoices needs a font that has it. On Debian and Ubuntu: apt-get install fonts-noto-cjk"
        )
    return ""


def _draw(invoice: Invoice, language: str) -> bytes:
    engine = _weasyprint()
    with translation.override(language):
        page = render_to_string("billing/document.html", context(invoice) | {"language": language, "font": _font()})
    # It may fetch nothing: the font stands in the page, and what a customer typed leads nowhere.
    fetcher = engine.urls.URLFetcher(allowed_protocols=("data",))
    return bytes(engine.HTML(string=page, url_fetcher=fetcher).write_pdf())


@cache
def _font() -> str:
    """The font of Latin text as a data address; other scripts take one that the machine has."""
    content = base64.b64encode((FONTS / "inter-latin-wght-normal.woff2").read_bytes()).decode()
    return f"data:font/woff2;base64,{content}"


@cache
def _weasyprint() -> ModuleType:
    """The library, loaded when it is first needed: importing it opens shared libraries that may not be there."""
    try:
        importlib.import_module("weasyprint.urls")
        return importlib.import_module("weasyprint")
    except OSError as error:
        logger.warning("WeasyPrint can't be used: %s", error)
        raise DocumentUnavailable from error
