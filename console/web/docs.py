"""The documentation: guides from `docs/` and every error code, searchable.

It is public, because people read about prices and the environment contract before they sign up. It holds no data of
customers. The text is English in every language.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils.functional import Promise
from django.utils.html import strip_tags
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext_lazy as _
from django.views.decorators.http import require_GET
from markdown_it import MarkdownIt
from markdown_it.token import Token

from console.core.error_codes import ErrorCode
from console.core.error_codes import reference as error_reference


class PageEntry(NamedTuple):
    """How a page is listed."""

    title: str | Promise
    summary: str | Promise
    """One sentence about what the page contains."""


GUIDES = {
    "user-guide": PageEntry(_("User guide"), _("From the first run to models, storage and the API, by task.")),
    "command-line": PageEntry(_("Command line"), _("Train from your own machine with the trainyard command.")),
    "environment": PageEntry(_("Environment contract"), _("Variables, folders, signals and arguments of your code.")),
    "pricing": PageEntry(_("Pricing"), _("Every price and figure, with worked examples.")),
    "compatibility": PageEntry(_("Compatibility"), _("Frameworks, versions, third-party scripts, known obstacles.")),
    "faults": PageEntry(_("Faults"), _("What happens in a fault, who pays, and how a run recovers.")),
}
"""The guides that are shown, by file name in `docs/`."""
ERRORS = "errors"
"""The name of the page of error codes in URLs."""
ERRORS_ENTRY = PageEntry(_("Error codes"), _("Every error of the API: its status and what to do."))
MAX_RESULTS = 30
"""How many sections a search shows."""
MAX_QUERY_LENGTH = 100
"""Longer queries are cut, because anonymous visitors may search, and every section is searched for each word."""
EXCERPT_LENGTH = 180
"""How many characters of a section a search result shows."""
INTERNAL_COLUMN = "tests"
"""The heading of table columns that are for contributors: the console leaves them out."""


@dataclass(frozen=True)
class Section:
    """A heading with the text below it. `page` is the guide's name in URLs, `level` is 2 for a heading with `##`."""

    page: str
    anchor: str
    title: str
    level: int
    text: str


@dataclass(frozen=True)
class Guide:
    """A rendered guide."""

    html: SafeString
    sections: tuple[Section, ...]


@require_GET
def docs(request: HttpRequest) -> HttpResponse:
    """List the guides, or the sections that contain all words of `?q=`."""
    query = request.GET.get("q", "").strip()[:MAX_QUERY_LENGTH]
    context: dict[str, Any] = {"query": query, "pages": _pages()}
    if query:
        context["results"] = _results(query)
    return render(request, "docs/index.html", context)


@require_GET
def docs_page(request: HttpRequest, page: str) -> HttpResponse:
    """Show a guide, or the error codes."""
    context: dict[str, Any] = {"page": page, "pages": _pages()}
    if page == ERRORS:
        context |= {"title": ERRORS_ENTRY.title, "codes": _error_codes()}
    elif page in GUIDES:
        guide = _guide(page)
        contents = [section for section in guide.sections if section.level == 2]
        context |= {"title": GUIDES[page].title, "guide": guide, "contents": contents}
    else:
        raise Http404
    return render(request, "docs/page.html", context)


def _pages() -> dict[str, PageEntry]:
    """Return all pages by their names in URLs."""
    return GUIDES | {ERRORS: ERRORS_ENTRY}


def _results(query: str) -> list[dict[str, Any]]:
    """Return the sections that contain all words, those with a word in the title first."""
    words = query.lower().split()
    pages = _pages()
    matching = [
        section
        for section in _all_sections()
        if all(word in f"{section.title} {section.text}".lower() for word in words)
    ]
    matching.sort(key=lambda section: not any(word in section.title.lower() for word in words))
    return [
        {"section": section, "page_title": pages[section.page].title, "excerpt": _excerpt(section.text, words[0])}
        for section in matching[:MAX_RESULTS]
    ]


def _excerpt(text: str, word: str) -> str:
    """Return the part of a text around a word, cut between words: a third of the excerpt is before the word."""
    word_start = max(0, text.lower().find(word))
    start = max(0, word_start - EXCERPT_LENGTH // 3)
    if start:  # at the next space, unless that is after the word
        start = text.find(" ", start - 1, word_start) + 1 or start
    end = start + EXCERPT_LENGTH
    if end < len(text):  # at the last space, unless that is in or before the word
        end = max(text.rfind(" ", word_start + len(word), end + 1), 0) or end
    return ("…" if start else "") + text[start:end].strip() + ("…" if end < len(text) else "")


def _all_sections() -> list[Section]:
    """Return the sections of all guides and the error codes."""
    sections = [section for page in GUIDES for section in _guide(page).sections]
    for error in error_reference():
        text = " ".join([*error.meanings, *map(str, error.messages)]).replace("`", "")
        sections.append(Section(ERRORS, error.code, error.code, 2, text))
    return sections


def _error_codes() -> list[ErrorCode]:
    """Return all error codes, with their meanings as HTML."""
    markdown = MarkdownIt("commonmark", {"html": False})
    return [
        replace(
            error,
            meanings=tuple(mark_safe(markdown.renderInline(meaning)) for meaning in error.meanings),  # noqa: S308  # from docstrings of this release, with raw HTML escaped
        )
        for error in error_reference()
    ]


@cache
def _guide(page: str) -> Guide:
    """Render a guide of this release, once per process."""
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = markdown.parse((settings.BASE_DIR / "docs" / f"{page}.md").read_text())
    tokens = _without_column(_without_contents(_without_title(tokens)), INTERNAL_COLUMN)
    anchors: dict[str, int] = {}
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):  # a heading's text follows its opening
        if token.type == "heading_open" and following is not None:
            token.attrSet("id", _anchor(_plain(following), anchors))
        elif token.type == "table_open":
            token.attrSet("class", "table table-sm")
        for child in token.children or ():
            if child.type == "link_open":
                child.attrSet("href", _link_url(str(child.attrGet("href")), page))
    html = markdown.renderer.render(tokens, markdown.options, {})
    # With `tabindex`, the keyboard can scroll a table or a code block that is wider than the page.
    html = html.replace("<table", '<div class="table-responsive" tabindex="0"><table').replace(
        "</table>", "</table></div>"
    )
    # An empty header cell is an error of accessibility: screen readers announce a header without a name.
    html = html.replace("<th></th>", "<td></td>").replace("<pre>", '<pre class="code-block" tabindex="0">')
    return Guide(mark_safe(html), tuple(_sections(page, tokens)))  # noqa: S308  # from files of this release, with raw HTML escaped


def _without_title(tokens: list[Token]) -> list[Token]:
    """Leave out the first heading, because the page shows its own title. A heading has three tokens."""
    has_title = bool(tokens) and tokens[0].type == "heading_open" and tokens[0].tag == "h1"
    return tokens[3:] if has_title else tokens


def _without_contents(tokens: list[Token]) -> list[Token]:
    """Leave out the file's own table of contents, a list of links to sections: the page shows one beside the text."""
    for start, token in enumerate(tokens):
        if token.type == "heading_open":
            break
        if token.type == "bullet_list_open" and token.level == 0:
            closing = (
                index
                for index, later in enumerate(tokens[start:], start)
                if later.type == "bullet_list_close" and later.level == 0
            )
            end = next(closing)
            children = (child for inner in tokens[start:end] for child in inner.children or ())
            links = [child for child in children if child.type == "link_open"]
            if links and all(str(link.attrGet("href")).startswith("#") for link in links):
                return tokens[:start] + tokens[end + 1 :]
    return tokens


def _without_column(tokens: list[Token], heading: str) -> list[Token]:
    """Leave out the columns of tables that have this heading."""
    shown_tokens: list[Token] = []
    hidden_column: int | None = None
    column = 0
    for index, token in enumerate(tokens):
        if token.type == "table_open":
            hidden_column = None
        elif token.type == "tr_open":
            column = -1  # before the row's first cell, or after its last one
        elif token.type in {"th_open", "td_open"}:
            column += 1
            if token.type == "th_open" and _plain(tokens[index + 1]) == heading:
                hidden_column = column
        elif token.type in {"tr_close", "table_close"}:
            column = -1
        # A cell has three tokens: its opening, its contents, and its end.
        if hidden_column is None or column != hidden_column:
            shown_tokens.append(token)
    return shown_tokens


def _sections(page: str, tokens: list[Token]) -> list[Section]:
    """Return the sections of a guide in order, with their texts."""
    headings = [index for index, token in enumerate(tokens) if token.type == "heading_open"]
    sections: list[Section] = []
    for start, end in pairwise([*headings, len(tokens)]):
        heading, title = tokens[start], _plain(tokens[start + 1])
        # The text begins after the three tokens of the heading.
        texts = [_plain(token) for token in tokens[start + 3 : end] if token.type in {"inline", "fence"}]
        sections.append(Section(page, str(heading.attrGet("id")), title, int(heading.tag[1:]), " ".join(texts)))
    return sections


def _plain(token: Token) -> str:
    """Return the text of a token without markup."""
    if token.children is None:
        return token.content
    text = "".join(" " if child.type in {"softbreak", "hardbreak"} else child.content for child in token.children)
    return " ".join(text.split())


def _anchor(title: str, used: dict[str, int]) -> str:
    """Return a heading's anchor by GitHub's rules; a repeated one gets a number. `used` counts the anchors so far."""
    anchor = re.sub(r"[^\w\- ]", "", strip_tags(title).lower()).replace(" ", "-")
    used[anchor] = used.get(anchor, 0) + 1
    return anchor if used[anchor] == 1 else f"{anchor}-{used[anchor] - 1}"


def _link_url(href: str, page: str) -> str:
    """Return the URL for a link in the guide `page`. A link to a file that is not shown leads to `page`."""
    if href.startswith(("#", "https://", "http://")):
        return href
    name, _hash, fragment = href.partition("#")
    slug = name.removesuffix(".md")
    target = slug if slug in GUIDES else page
    url = reverse("docs_page", args=[target])
    return f"{url}#{fragment}" if fragment and slug in GUIDES else url
