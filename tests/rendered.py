"""A page's form as a browser submits it unchanged."""

from __future__ import annotations

from html.parser import HTMLParser

UNSENT = {"submit", "button", "image", "reset", "file"}
"""Types of inputs that a browser does not send with a form that is submitted unchanged."""


class _Controls(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, list[str]] = {}
        self.select = self.first = ""
        self.chosen: list[str] = []
        self.is_multiple = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        name, value = known.get("name") or "", known.get("value") or ""
        if tag == "input" and name and known.get("type") not in UNSENT:
            is_box = known.get("type") in {"checkbox", "radio"}
            if not is_box or "checked" in known:
                self.values.setdefault(name, []).append(value or ("on" if is_box else ""))
        elif tag == "textarea" and name:
            self.values.setdefault(name, []).append("")
        elif tag == "select":
            self.select, self.first, self.chosen, self.is_multiple = name, "", [], "multiple" in known
        elif tag == "option" and self.select:
            # The prefix distinguishes an empty first value from no option.
            self.first = self.first if self.chosen or self.first else f"first:{value}"
            self.chosen += [value] if "selected" in known else []

    def handle_endtag(self, tag: str) -> None:
        if tag == "select" and self.select:
            # If no option is selected, a browser sends the first one, unless several may be selected.
            usual = [] if self.is_multiple else [self.first.removeprefix("first:")]
            self.values.setdefault(self.select, []).extend(self.chosen or usual)
            self.select = ""


def form_of(page: str) -> dict[str, list[str]]:
    """Return each control of a page with its values, without the rows that a script copies (`__prefix__`)."""
    controls = _Controls()
    controls.feed(page)
    return {name: values for name, values in controls.values.items() if "__prefix__" not in name}
