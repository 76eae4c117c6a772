"""Short names of browsers and systems, from the User-Agent header of a request."""

from __future__ import annotations

BROWSERS = (
    ("Edg", "Edge"),
    ("OPR/", "Opera"),
    ("Firefox/", "Firefox"),
    ("FxiOS/", "Firefox"),
    ("Chrome/", "Chrome"),
    ("CriOS/", "Chrome"),
    ("Safari/", "Safari"),
    ("curl/", "curl"),
)
"""Text in the header, and the name to show. Order matters: Edge and Opera also name Chrome, and Chrome also Safari.
On iOS, Firefox and Chrome send names of their own, and also Safari. Edge's text has no slash, because Edge sends Edg/,
EdgA/ or EdgiOS/."""
SYSTEMS = (
    ("Android", "Android"),
    ("iPhone", "iOS"),
    ("iPad", "iPadOS"),
    ("Windows", "Windows"),
    ("Mac OS X", "macOS"),
    ("CrOS", "ChromeOS"),
    ("Linux", "Linux"),
)
"""Text in the header, and the name to show. Order matters: Android also names Linux. iPhones and iPads also
name Mac OS X."""


def name(user_agent: str) -> str:
    """Return for example "Firefox, Linux"; the first 60 characters of a header that names no known browser."""
    browser = next((title for text, title in BROWSERS if text in user_agent), "")
    system = next((title for text, title in SYSTEMS if text in user_agent), "")
    if not browser:
        return user_agent[:60]
    return f"{browser}, {system}" if system else browser
