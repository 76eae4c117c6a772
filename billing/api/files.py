"""How files leave the API. The one rule: the file is no DRF Response, and an error is JSON whatever was asked for."""

from __future__ import annotations

from rest_framework.renderers import JSONRenderer


class CsvRenderer(JSONRenderer):
    """Lets a view accept `text/csv`."""

    media_type = "text/csv"
    format = "csv"


class PdfRenderer(JSONRenderer):
    """Lets a view accept `application/pdf`."""

    media_type = "application/pdf"
    format = "pdf"
