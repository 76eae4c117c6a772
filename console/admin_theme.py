"""The admin's theme: colours for django-unfold, its sentences, and a style sheet and a script that correct its pages.

django-unfold uses the colour 500 on dark backgrounds and 600 on light ones. Both have a contrast of at least 4.5:1
there, as WCAG 2.2 requires.
"""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from django.templatetags.static import static
from django.utils.translation import gettext_noop

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

TEXTS = (
    gettext_noop("Add row"),
    gettext_noop("After you've created a user, you’ll be able to edit more user options."),
    gettext_noop("All applications"),
    gettext_noop("Apply Filters"),
    gettext_noop("Choose file to upload"),
    gettext_noop("Click to cancel"),
    gettext_noop("Click to download"),
    gettext_noop("Collapse"),
    gettext_noop("Current file"),
    gettext_noop("Date from"),
    gettext_noop("Date to"),
    gettext_noop("Expand row"),
    gettext_noop("False"),
    gettext_noop("General"),
    gettext_noop("Go back"),
    gettext_noop("Group permissions"),
    gettext_noop("Image preview"),
    gettext_noop("Loading more results..."),
    gettext_noop("More actions"),
    gettext_noop("No data"),
    gettext_noop("No recent searches"),
    gettext_noop("No results found"),
    gettext_noop("No results matching your query"),
    gettext_noop("Object"),
    gettext_noop("Recent searches"),
    gettext_noop("Record picture"),
    gettext_noop("Reset filters"),
    gettext_noop("Return to site"),
    gettext_noop("Search apps and models..."),
    gettext_noop("Select action to run"),
    gettext_noop("Select action"),
    gettext_noop("Select all rows"),
    gettext_noop("Select record"),
    gettext_noop("Select value"),
    gettext_noop("Submit"),
    gettext_noop("System"),
    gettext_noop("This item will be deleted."),
    gettext_noop("This page yielded into no results. Create a new item or reset your filters."),
    gettext_noop("Toggle password visibility"),
    gettext_noop("True"),
    gettext_noop("Type to search"),
    gettext_noop("User permissions"),
    gettext_noop("You have been successfully logged out from the administration"),
)
"""Texts of django-unfold that the admin's pages show, for `make messages`: it has no Chinese translations."""


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
