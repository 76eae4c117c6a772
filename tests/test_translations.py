"""Every sentence is in Chinese too, whole and in step with its source.

Babel and Django do the reading: gettext's programs need not be installed.
"""

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
ADVICE = "Run `make messages`, translate what is new in locale/, and run it again."


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
    """Each file that may hold sentences, as Python that Babel can read."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "migrations" not in path.parts:
                yield str(path.relative_to(ROOT)), path.read_text()
    for path in sorted((ROOT / "templates").rglob("*.*")):
        # What stands around the calls is blanked out, and indented as the template is.
        calls = "\n".join(line.strip() for line in templatize(path.read_text()).splitlines())
        yield str(path.relative_to(ROOT)), calls


def marked() -> Iterator[tuple[str, tuple[str | None, str]]]:
    """Each sentence marked for translation, with where it stands."""
    for name, text in sources():
        for line, found, _comments, context in extract("python", BytesIO(text.encode()), KEYWORDS):
            for sentence in all_of(found)[:1]:
                if sentence:
                    yield f"{name}:{line}", (context, sentence)


TRANSLATED = read("django.po")


def test_every_marked_sentence_is_in_the_translations():
    known = {key(message) for message in sentences(TRANSLATED)}
    found = list(marked())
    assert len(found) > 500
    missing = [f"{where}: {sentence!r}" for where, sentence in found if sentence not in known]
    assert not missing, f"{ADVICE}\n" + "\n".join(missing)


def faults(message: Message) -> Iterator[str]:
    given = all_of(message.string)
    # Chinese has one form where English has two: it says what the plural says.
    wanted = sorted(PLACEHOLDER.findall(all_of(message.id)[-1]))
    if message.fuzzy:
        yield "check it, and remove the mark"
    if not given or not all(given):
        yield "not translated"
    elif any(sorted(PLACEHOLDER.findall(text)) != wanted for text in given):
        yield "keep %(names)s and tags as they are"
    if any(HALF_WIDTH.search(text) for text in given):
        yield "punctuation beside Chinese is full-width"


def test_each_translation_is_whole():
    found = [f"{all_of(message.id)[0]!r}: {fault}" for message in sentences(TRANSLATED) for fault in faults(message)]
    assert not found, f"{ADVICE}\n" + "\n".join(found)


def test_the_header_says_what_is_read():
    header = dict(TRANSLATED.mime_headers)
    assert header["Language"] == "zh_Hans"
    assert header["Plural-Forms"] == "nplurals=1; plural=0;"
    assert not TRANSLATED.fuzzy


def test_nothing_old_is_kept():
    assert not TRANSLATED.obsolete, "Remove the lines that begin with #~."


def test_what_is_read_when_serving_is_what_was_translated():
    compiled = {key(message): all_of(message.string) for message in sentences(read("django.mo"))}
    assert compiled == {key(message): all_of(message.string) for message in sentences(TRANSLATED)}, ADVICE
