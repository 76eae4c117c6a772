"""Renderers for file downloads.

The views return the file as an HttpResponse, which DRF does not render. These classes only let DRF accept a request for
the file's content type. If the view raises an error, they render it as JSON.
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
