"""Every sentence is translated to Chinese completely and from its present source. Needs no gettext programs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from io import BytesIO
from pathlib import Path

import allauth
from babel.messages.catalog import Catalog, Message
from babel.messages.extract import DEFAULT_KEYWORDS, extract
from babel.messages.mofile import read_mo
from babel.messages.pofile import read_po
from django.utils.translation.template import templatize

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "locale" / "zh_Hans" / "LC_MESSAGES"
ENGLISH = ROOT / "locale" / "en" / "LC_MESSAGES"
"""Our wording of sentences of allauth, which has titles in title case."""
TITLE_CASE = re.compile(r"^[A-Z][a-z-]+( [A-Z][a-z]+)+[?:]?$")
ALLAUTH_PAGES = (
    "account_inactive.html", "base_reauthenticate.html", "email.html", "email_confirm.html", "logout.html",
    "password_change.html", "password_reset.html", "password_reset_done.html", "password_reset_from_key.html",
    "password_reset_from_key_done.html", "password_set.html", "verification_sent.html",
)  # fmt: skip
"""Pages of allauth that the console shows as they are."""
PACKAGES = ("console", "billing", "storage", "jobs", "runtime")
KEYWORDS = DEFAULT_KEYWORDS | {
    "gettext_lazy": None,
    "gettext_noop": None,
    "ngettext_lazy": (1, 2),
    "pgettext_lazy": ((1, "c"), 2),
    "npgettext_lazy": ((1, "c"), 2, 3),
}
PLACEHOLDER = re.compile(r"%\(\w+\)[-#0-9.]*[a-z]|%%|<[^<>]*>")
HALF_WIDTH_PUNCTUATION = re.compile(r"[\u4e00-\u9fff][,;:?!]|[,;?!][\u4e00-\u9fff]|[\u4e00-\u9fff]\.(?![A-Za-z])")
ADVICE = "Run `make messages`, translate the new sentences in locale/, and run it once more."


def read(name: str, folder: Path = FOLDER) -> Catalog:
    with (folder / name).open("rb") as file:
        return read_mo(file) if name.endswith(".mo") else read_po(file, locale="zh_Hans", abort_invalid=True)


def sentences(catalog: Catalog) -> list[Message]:
    return [message for message in catalog if message.id]


def forms_of(value: str | tuple[str, ...] | list[str]) -> list[str]:
    """Return the forms of a sentence as a list: one, or a singular and a plural."""
    return [value] if isinstance(value, str) else list(value)


def key(message: Message) -> tuple[str | None, str]:
    context = message.context
    # Babel reads the context of a compiled file as bytes, and that of a .po as text.
    return context.decode() if isinstance(context, bytes) else context, forms_of(message.id)[0]


def sources() -> Iterator[tuple[str, str]]:
    """Yield each file with sentences, as Python code that Babel can read."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "migrations" not in path.parts:
                yield str(path.relative_to(ROOT)), path.read_text()
    for path in sorted((ROOT / "templates").rglob("*.*")):
        yield str(path.relative_to(ROOT)), python_of(path)


def python_of(template: Path) -> str:
    """Return a template's sentences as Python code."""
    # The text around the calls is blanked out, but keeps its indentation.
    return "\n".join(line.strip() for line in templatize(template.read_text()).splitlines())


def extracted(code: str) -> Iterator[tuple[int, tuple[str | None, str]]]:
    """Yield the line, context and text of each sentence in Python code."""
    for line, forms, _comments, context in extract("python", BytesIO(code.encode()), KEYWORDS):
        if sentence := forms_of(forms)[0]:
            yield line, (context, sentence)


@cache
def marked() -> list[tuple[str, tuple[str | None, str]]]:
    """Return the place, context and text of each sentence that is marked for translation. It takes seconds."""
    return [(f"{name}:{line}", sentence) for name, code in sources() for line, sentence in extracted(code)]


TRANSLATED = read("django.po")


def test_every_marked_sentence_is_in_the_catalog():
    known = {key(message) for message in sentences(TRANSLATED)}
    assert len(marked()) > 500, "The marks in the code were not found."
    missing = [f"{place}: {sentence!r}" for place, sentence in marked() if sentence not in known]
    assert not missing, f"{ADVICE}\n" + "\n".join(missing)


def faults(message: Message) -> Iterator[str]:
    """Yield what is wrong with a translation."""
    translations = forms_of(message.string)
    # Chinese has one form where English has two, with the placeholders of the plural.
    placeholders = sorted(PLACEHOLDER.findall(forms_of(message.id)[-1]))
    if message.fuzzy:
        yield "check it, and remove the mark `fuzzy`"
    if not translations or not all(translations):
        yield "not translated"
    elif any(sorted(PLACEHOLDER.findall(text)) != placeholders for text in translations):
        yield "keep %(names)s and tags as they are"
    if any(HALF_WIDTH_PUNCTUATION.search(text) for text in translations):
        yield "use full-width punctuation beside Chinese"


def test_each_translation_is_complete():
    found = [f"{forms_of(message.id)[0]!r}: {fault}" for message in sentences(TRANSLATED) for fault in faults(message)]
    assert not found, f"{ADVICE}\n" + "\n".join(found)


def test_the_catalog_is_chinese_without_obsolete_sentences():
    header = dict(TRANSLATED.mime_headers)
    assert (header["Language"], header["Plural-Forms"]) == ("zh_Hans", "nplurals=1; plural=0;")
    assert not TRANSLATED.fuzzy
    assert not TRANSLATED.obsolete, "Remove the lines that begin with #~."


def test_the_compiled_catalog_is_up_to_date():
    compiled = {key(message): forms_of(message.string) for message in sentences(read("django.mo"))}
    assert compiled == {key(message): forms_of(message.string) for message in sentences(TRANSLATED)}, ADVICE


def test_our_english_of_allauth_is_in_sentence_case_and_compiled():
    english = {forms_of(message.id)[0]: message.string for message in sentences(read("django.po", ENGLISH))}
    compiled = {forms_of(message.id)[0]: message.string for message in sentences(read("django.mo", ENGLISH))}
    assert english == compiled, "Run `manage.py compilemessages`"
    assert not [text for text in english.values() if TITLE_CASE.search(text)]
    assert set(english) <= {sentence for _place, (_context, sentence) in marked()}, "It needs our Chinese too"
    for name in ALLAUTH_PAGES:
        template = Path(allauth.__file__).parent / "templates" / "account" / name
        shown = {sentence for _line, (_context, sentence) in extracted(python_of(template))}
        # Each title of the page must have a wording of ours.
        assert {sentence for sentence in shown if TITLE_CASE.search(sentence)} <= set(english), name
