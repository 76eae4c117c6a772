"""Show the beginning of a file that customers' code wrote, as text, a table or a picture.

HTML and SVG are shown as text, because they could contain scripts. The bytes of a file decide whether it is a picture
or text. For text, the name decides whether it is shown as a table, as indented JSON, or as it is.
"""

from __future__ import annotations

import codecs
import csv
import itertools
import json
import posixpath
from dataclasses import dataclass

from storage.files import OpenFile

TEXT_BYTES = 256 * 1024
"""How much of a text is shown: about 4,000 lines. Browsers are slow with longer pages."""
IMAGE_BYTES = 20 * 1024**2
"""The size of the largest picture that is shown. Browsers need seconds to load larger ones."""
MAX_ROWS, MAX_COLUMNS, MAX_CELL_CHARACTERS = 200, 50, 500
"""How much of a table is shown. Browsers are slow with larger tables."""
COUNTED_BYTES = 256 * 1024**2
"""The lines of larger files are not counted, because reading this much takes about a second."""
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
"""The delimiter of a table's cells, by the extension of the file's name."""
_IMAGE_TYPES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
}
"""The media type of a picture, by its first bytes. `image_type` knows WebP too."""


@dataclass(frozen=True)
class Preview:
    """The part of a file that a page shows. Only one of the first three attributes is set; none for a binary file.

    `image_type` is the media type of a picture, which the page loads by another request. `is_complete` is False if the
    file has more than is shown.
    """

    text: str | None = None
    rows: tuple[tuple[str, ...], ...] = ()
    image_type: str = ""
    is_complete: bool = True


def preview(file: OpenFile, *, name: str) -> Preview:
    """Return the preview of an open file. The file stays open."""
    head = file.stream.read(TEXT_BYTES)
    if (media_type := image_type(head)) and file.size <= IMAGE_BYTES:
        return Preview(image_type=media_type)
    is_complete = len(head) >= file.size
    text = _text(head, is_complete=is_complete)
    if text is None:
        return Preview()
    extension = posixpath.splitext(name)[1].lower()
    if extension in _DELIMITERS and (table := _table(text, _DELIMITERS[extension], is_complete=is_complete)):
        return table
    if extension == ".json" and is_complete:
        text, is_complete = _indented(text)
    return Preview(text=text, is_complete=is_complete)


def line_count(file: OpenFile) -> int | None:
    """Return the number of lines; None for a file larger than COUNTED_BYTES. The last line may have no line end."""
    if file.size > COUNTED_BYTES:
        return None
    count, last = 0, b"\n"
    for chunk in file.section(0, file.size):
        count += chunk.count(b"\n")
        last = chunk[-1:]
    return count + (last != b"\n")


def image_type(head: bytes) -> str:
    """Return the media type of a PNG, JPEG, GIF or WebP picture by its first bytes; empty if it is none of these."""
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "image/webp"
    return next((media_type for magic, media_type in _IMAGE_TYPES.items() if head.startswith(magic)), "")


def _text(head: bytes, *, is_complete: bool) -> str | None:
    """Return the text of UTF-8 bytes; None if they are no text. Unless `is_complete`, drop a cut last character."""
    if b"\0" in head:
        return None
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(head, final=is_complete)
    except UnicodeDecodeError:
        return None


def _table(text: str, delimiter: str, *, is_complete: bool) -> Preview | None:
    """Return the first rows of a table; None if the text is no table with at least two columns."""
    lines = text.splitlines(keepends=True)
    if not is_complete:
        lines.pop()  # the last line may be cut off
    reader = csv.reader(lines, delimiter=delimiter)
    try:
        rows = list(itertools.islice(reader, MAX_ROWS + 1))
    except csv.Error:  # a field is longer than Python's limit
        return None
    if not rows or len(rows[0]) < 2:
        return None
    shown = tuple(_shown_cells(row) for row in rows[:MAX_ROWS])
    is_cut = len(rows) > MAX_ROWS or any(len(row) > MAX_COLUMNS for row in rows)
    return Preview(rows=shown, is_complete=is_complete and not is_cut)


def _shown_cells(row: list[str]) -> tuple[str, ...]:
    return tuple(cell[:MAX_CELL_CHARACTERS] for cell in row[:MAX_COLUMNS])


def _indented(text: str) -> tuple[str, bool]:
    """Return indented JSON, and whether it is complete. Return text that is no valid JSON unchanged.

    Indentation can make deeply nested JSON a thousand times longer, so the result has a limit.
    """
    parts: list[str] = []
    length = 0
    try:
        for part in json.JSONEncoder(indent=2, ensure_ascii=False).iterencode(json.loads(text)):
            length += len(part)
            if length > 4 * TEXT_BYTES:  # usual JSON becomes less than four times as long
                return "".join(parts), False
            parts.append(part)
    except (ValueError, RecursionError):
        return text, True
    return "".join(parts), True
