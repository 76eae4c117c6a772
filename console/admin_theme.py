"""The admin's theme: colours for django-unfold, and a style sheet and a script that correct its pages.

django-unfold uses the colour 500 on dark backgrounds and 600 on light ones. Both have a contrast of at least 4.5:1
there, as WCAG 2.2 requires.
"""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from django.templatetags.static import static

PRIMARY = {
    "50": "#eef2ff",
    "100": "#e0e7ff",
    "200": "#c7d2fe",
    "300": "#a5b4fc",
    "400": "#8ea4ff",
    "500": "#6f8bff",
    "600": "#3454d1",
    "700": "#2b47b4",
    "800": "#243a91",
    "900": "#1f3174",
    "950": "#131a38",
}


def style(_request: HttpRequest) -> str:
    """Return the URL of the console's style sheet for the admin."""
    return static("css/admin.css")


def script(_request: HttpRequest) -> str:
    """Return the URL of the console's script for the admin."""
    return static("js/admin.js")


def icon(_request: HttpRequest) -> str:
    """Return the URL of the favicon."""
    return static("img/mark.svg")


UNFOLD: dict[str, Any] = {
    "SITE_TITLE": "Trainyard administration",
    "SITE_HEADER": "Trainyard",
    "SITE_SYMBOL": "train",
    "SITE_FAVICONS": [{"rel": "icon", "type": "image/svg+xml", "href": icon}],
    "DASHBOARD_CALLBACK": "console.monitoring.health.dashboard",
    "COLORS": {"primary": PRIMARY},
    "STYLES": [style],
    "SCRIPTS": [script],
}
