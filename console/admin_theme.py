"""The admin's theme: colours for django-unfold, its sentences, and a style sheet and a script that correct its pages.

django-unfold uses the colour 500 on dark backgrounds and 600 on light ones. Both have a contrast of at least 4.5:1
there, as WCAG 2.2 requires.
"""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from django.templatetags.static import static
from django.utils.translation import gettext_lazy

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
    gettext_lazy("Add row"),
    gettext_lazy("After you've created a user, you’ll be able to edit more user options."),
    gettext_lazy("All applications"),
    gettext_lazy("Apply Filters"),
    gettext_lazy("Choose file to upload"),
    gettext_lazy("Click to cancel"),
    gettext_lazy("Click to download"),
    gettext_lazy("Collapse"),
    gettext_lazy("Current file"),
    gettext_lazy("Date from"),
    gettext_lazy("Date to"),
    gettext_lazy("Expand row"),
    gettext_lazy("False"),
    gettext_lazy("General"),
    gettext_lazy("Go back"),
    gettext_lazy("Group permissions"),
    gettext_lazy("Image preview"),
    gettext_lazy("Loading more results..."),
    gettext_lazy("More actions"),
    gettext_lazy("No data"),
    gettext_lazy("No recent searches"),
    gettext_lazy("No results found"),
    gettext_lazy("No results matching your query"),
    gettext_lazy("Object"),
    gettext_lazy("Recent searches"),
    gettext_lazy("Record picture"),
    gettext_lazy("Reset filters"),
    gettext_lazy("Return to site"),
    gettext_lazy("Search apps and models..."),
    gettext_lazy("Select action to run"),
    gettext_lazy("Select action"),
    gettext_lazy("Select all rows"),
    gettext_lazy("Select record"),
    gettext_lazy("Select value"),
    gettext_lazy("Submit"),
    gettext_lazy("System"),
    gettext_lazy("This item will be deleted."),
    gettext_lazy("This page yielded into no results. Create a new item or reset your filters."),
    gettext_lazy("Toggle password visibility"),
    gettext_lazy("True"),
    gettext_lazy("Type to search"),
    gettext_lazy("User permissions"),
    gettext_lazy("You have been successfully logged out from the administration"),
)
"""Texts of django-unfold on the admin's pages, for `make messages`: it has no Chinese translations. They are lazy,
because this module is imported while Django's settings are read, and a translation needs them."""


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
