"""What the pages bring along: the icons that are named, no others, and nothing from elsewhere."""

from __future__ import annotations

import re

from django.conf import settings

from console.web.navigation import SECTIONS

TEMPLATES = sorted((settings.BASE_DIR / "templates").rglob("*.html"))
NAMED = re.compile(r'\{% icon "([a-z0-9-]+)"|\bicon="([a-z0-9-]+)"')
ELSEWHERE = re.compile(r"""(?:src|href|action)=["'](?:https?:)?//""")


def test_every_icon_named_is_vendored_and_no_other() -> None:
    named = {name for each in TEMPLATES for pair in NAMED.findall(each.read_text()) for name in pair if name}
    named |= {entry.icon for section in SECTIONS for entry in section.entries}
    vendored = {path.stem for path in (settings.BASE_DIR / "static/vendor/tabler-icons").glob("*.svg")}
    assert named == vendored


def test_nothing_is_loaded_from_elsewhere() -> None:
    assert [each.name for each in TEMPLATES if ELSEWHERE.search(each.read_text())] == []


def test_every_template_opens_with_what_it_is() -> None:
    assert [each.name for each in TEMPLATES if not each.read_text().startswith(("{#", "{% comment %}"))] == []
