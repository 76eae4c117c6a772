"""The documentation in the console: every guide and error code, open to everyone, without dead links."""

import re
from itertools import pairwise

import pytest
from django.urls import reverse
from django.utils import translation

from console.core import error_codes
from console.web import docs, navigation

pytestmark = pytest.mark.django_db


def page(client, name, **parameters):
    answer = client.get(reverse("docs_page", args=[name]) if name else reverse("docs"), parameters)
    assert answer.status_code == 200
    return answer.content.decode()


def test_every_link_of_the_guides_leads_to_a_section(client):
    anchors = {name: set(re.findall(r'id="([^"]+)"', page(client, name))) for name in (*docs.GUIDES, docs.ERRORS)}
    wanted = set(navigation.HELP.values())
    for name in docs.GUIDES:
        assert " style=" not in page(client, name)  # which the content policy refuses
        wanted |= {(name, anchor) for anchor in re.findall(r'href="#([^"]+)"', page(client, name))}
        wanted |= set(re.findall(r'href="/docs/([\w-]+)/#([^"]+)"', page(client, name)))
        # For screen readers: no level of headings is left out, and no picture lacks a text.
        levels = [1, *map(int, re.findall(r"<h(\d)", docs._guide(name).html))]
        assert all(below - above <= 1 for above, below in pairwise(levels)), name
        assert "<img" not in docs._guide(name).html, name
    assert len(wanted) > 50, "the patterns no longer match links"
    assert {(name, anchor) for name, anchor in wanted if anchor and anchor not in anchors[name]} == set()
    # A file of `docs/` that is none of the guides.
    assert client.get(reverse("docs_page", args=["decisions"])).status_code == 404


def test_every_error_code_is_documented(client, settings):
    html = page(client, docs.ERRORS)
    codes = {*error_codes.STATUS_OF_CODE, *error_codes.CODE_OF_EXCEPTION.values(), "internal_error", "malformed"}
    with translation.override("zh-hans"):
        meanings = {error.code: error.meanings for error in error_codes.reference()}
    assert all(text.isascii() for text in meanings["throttled"]), "explanations are English in every language"
    for code in codes:
        assert f'id="{code}"' in html, code
    answer = client.get("/api/v1/jobs/")
    assert answer["Link"] == f'<{settings.TRAINYARD_URL}/docs/errors/#{answer.json()["code"]}>; rel="help"'
    assert f'id="{answer.json()["code"]}"' in html


def test_the_search_finds_sections_with_all_words(client):
    assert "/docs/user-guide/#survive-failures" in page(client, "", q="RETRIES failure")
    assert "/docs/errors/#budget_exceeded" in page(client, "", q="budget_exceeded")
    assert "No section has these words" in page(client, "", q="<nothing>")
    assert "<nothing>" not in page(client, "", q="<nothing>")


def test_an_excerpt_has_whole_words_and_no_markup(client):
    text = " ".join(f"word{number}" for number in range(200))
    for word in ("word0", "word100", "word199"):
        excerpt = docs._excerpt(text, word)
        assert word in excerpt
        assert set(excerpt.strip("…").split()) <= set(text.split())
        assert len(excerpt) <= docs.EXCERPT_LENGTH + 2  # an ellipsis at each end
    long = "a" * 400 + "needle" + "b" * 400
    assert "needle" in docs._excerpt(long, "needle")
    assert [section.title for section in docs._all_sections() if re.search(r"\w [,.;] ", section.text)] == []
    assert all("`" not in section.text for section in docs._all_sections() if section.page == docs.ERRORS)
    assert "<code>missing_minor</code>" in page(client, docs.ERRORS)


def test_columns_for_contributors_are_left_out(client, settings):
    html = page(client, "faults")
    shown = ["fault", "detection", "what the customer sees", "who pays", "recovery"]
    assert re.findall(r"<th>(.*?)</th>", html) == shown
    rows = [row.count("<td") for row in html.split("<tr>") if "<td" in row]
    lines = (settings.BASE_DIR / "docs" / "faults.md").read_text().splitlines()
    assert rows == [5] * sum(line.startswith("| ") and not line.startswith("| fault |") for line in lines)
    assert "test_" not in html  # the column that is left out names tests, such as the one below
    assert "No section has these words" in page(client, "", q="test_runs_go_on_and_end_while_everything_is_dead")


def test_other_languages_say_that_the_text_is_english(client):
    note = 'role="note"'
    assert note not in page(client, "pricing")
    url = reverse("docs_page", args=["pricing"])
    assert note in client.get(url, headers={"accept-language": "zh-hans"}).content.decode()


def test_markup_of_a_guide_is_escaped(settings, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "faults.md").write_text("# T\n\n## <b>x</b>\n\n<script>alert(1)</script> [a](javascript:x)\n")
    settings.BASE_DIR = tmp_path
    docs._guide.cache_clear()
    html = docs._guide("faults").html
    docs._guide.cache_clear()
    assert "<script>" not in html
    assert "javascript:" not in re.findall(r'href="([^"]*)"', html)
