"""Short names of browsers and systems, from the User-Agent header of a request."""

from __future__ import annotations

# Order matters: Edge and Opera also name Chrome, and Chrome also names Safari.
BROWSERS = (
    ("Edg", "Edge"),
    ("OPR/", "Opera"),
    ("Firefox/", "Firefox"),
    ("Chrome/", "Chrome"),
    ("Safari/", "Safari"),
    ("curl/", "curl"),
)
SYSTEMS = (
    ("Android", "Android"),
    ("iPhone", "iOS"),
    ("iPad", "iPadOS"),
    ("Windows", "Windows"),
    ("Mac OS X", "macOS"),
    ("CrOS", "ChromeOS"),
    ("Linux", "Linux"),
)


def name(user_agent: str) -> str:
    """Return for example "Firefox, Linux"; the first 60 characters of a header that names no known browser."""
    browser = next((title for mark, title in BROWSERS if mark in user_agent), "")
    system = next((title for mark, title in SYSTEMS if mark in user_agent), "")
    return ", ".join(filter(None, (browser, system))) if browser else user_agent[:60]
