"""Every sentence is translated to Chinese completely and from its present source. Needs no gettext programs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from babel.messages.catalog import Catalog, Message
from babel.messages.extract import DEFAULT_KEYWORDS, extract
from babel.messages.mofile import read_mo
from babel.messages.pofile import read_po
from django.utils.translation.template import templatize

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "locale" / "zh_Hans" / "LC_MESSAGES"
PACKAGES = ("console", "billing", "storage", "jobs", "runtime")
KEYWORDS = DEFAULT_KEYWORDS | {
    "gettext_lazy": None,
    "gettext_noop": None,
    "ngettext_lazy": (1, 2),
    "pgettext_lazy": ((1, "c"), 2),
    "npgettext_lazy": ((1, "c"), 2, 3),
}
PLACEHOLDER = re.compile(r"%\(\w+\)[-#0-9.]*[a-z]|%%|<[^<>]*>")
HALF_WIDTH = re.compile(r"[\u4e00-\u9fff][,;:?!]|[,;?!][\u4e00-\u9fff]|[\u4e00-\u9fff]\.(?![A-Za-z])")
ADVICE = "Run `make messages`, translate the new sentences in locale/, and run it once more."


def read(name: str) -> Catalog:
    with (FOLDER / name).open("rb") as file:
        return read_mo(file) if name.endswith(".mo") else read_po(file, locale="zh_Hans", abort_invalid=True)


def sentences(catalog: Catalog) -> list[Message]:
    return [message for message in catalog if message.id]


def all_of(value: str | tuple[str, ...] | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def key(message: Message) -> tuple[str | None, str]:
    context = message.context
    # Babel reads the context of a compiled file as bytes, and that of a .po as text.
    return context.decode() if isinstance(context, bytes) else context, all_of(message.id)[0]


def sources() -> Iterator[tuple[str, str]]:
    """Yield each file with sentences, as Python code that Babel can read."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "migrations" not in path.parts:
                yield str(path.relative_to(ROOT)), path.read_text()
    for path in sorted((ROOT / "templates").rglob("*.*")):
        # The text around the calls is blanked out, but keeps its indentation.
        calls = "\n".join(line.strip() for line in templatize(path.read_text()).splitlines())
        yield str(path.relative_to(ROOT)), calls


def marked() -> Iterator[tuple[str, tuple[str | None, str]]]:
    """Yield the place, context and text of each sentence that is marked for translation."""
    for name, text in sources():
        for line, forms, _comments, context in extract("python", BytesIO(text.encode()), KEYWORDS):
            if sentence := all_of(forms)[0]:
                yield f"{name}:{line}", (context, sentence)


TRANSLATED = read("django.po")


def test_every_marked_sentence_is_in_the_catalog():
    known = {key(message) for message in sentences(TRANSLATED)}
    found = list(marked())
    assert len(found) > 500
    missing = [f"{place}: {sentence!r}" for place, sentence in found if sentence not in known]
    assert not missing, f"{ADVICE}\n" + "\n".join(missing)


def faults(message: Message) -> Iterator[str]:
    translations = all_of(message.string)
    # Chinese has one form where English has two, with the placeholders of the plural.
    placeholders = sorted(PLACEHOLDER.findall(all_of(message.id)[-1]))
    if message.fuzzy:
        yield "check it, and remove the mark"
    if not translations or not all(translations):
        yield "not translated"
    elif any(sorted(PLACEHOLDER.findall(text)) != placeholders for text in translations):
        yield "keep %(names)s and tags as they are"
    if any(HALF_WIDTH.search(text) for text in translations):
        yield "punctuation beside Chinese is full-width"


def test_each_translation_is_complete():
    found = [f"{all_of(message.id)[0]!r}: {fault}" for message in sentences(TRANSLATED) for fault in faults(message)]
    assert not found, f"{ADVICE}\n" + "\n".join(found)


def test_the_catalog_is_chinese_without_obsolete_sentences():
    header = dict(TRANSLATED.mime_headers)
    assert (header["Language"], header["Plural-Forms"]) == ("zh_Hans", "nplurals=1; plural=0;")
    assert not TRANSLATED.fuzzy
    assert not TRANSLATED.obsolete, "Remove the lines that begin with #~."


def test_the_compiled_catalog_is_up_to_date():
    compiled = {key(message): all_of(message.string) for message in sentences(read("django.mo"))}
    assert compiled == {key(message): all_of(message.string) for message in sentences(TRANSLATED)}, ADVICE
