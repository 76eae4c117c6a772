"""Renderers for file downloads.

DRF negotiates the content type by them, but renders only errors, as JSON: views return the file as an HttpResponse.
"""

from __future__ import annotations

from rest_framework.renderers import JSONRenderer


class CsvRenderer(JSONRenderer):
    """Accept `text/csv` in content negotiation."""

    media_type = "text/csv"
    format = "csv"


class PdfRenderer(JSONRenderer):
    """Accept `application/pdf` in content negotiation."""

    media_type = "application/pdf"
    format = "pdf"
