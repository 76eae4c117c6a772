"""Replace the values of secrets in the output of a run before it is stored.

Each occurrence of a value is replaced by `***`, and so is each line of a value of several lines. Other forms of a
value, such as its base64, are not recognized. Values of fewer than MIN_LENGTH characters are not replaced, because they
would also match ordinary text.
"""

from __future__ import annotations

from typing import Any, Iterable, List, Optional, Set

MIN_LENGTH = 6
"""Minimum length of a value, or of one of its lines, to be replaced. Shorter ones occur in ordinary text."""
MAX_LINES = 100
"""Maximum number of lines of one value that are replaced one by one, since each costs a search of the output. A private
key has about 50 lines."""
MASK = b"***"
"""The text that replaces each value."""


class Mask:
    """Replaces the values of secrets in texts and streams. If all values are too short, everything passes unchanged."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        texts: Set[str] = set()
        for value in values:
            # Also without the spaces around it, because code may print a value that it has stripped.
            texts.update([value, value.strip(), *_lines(value)])
        long_texts = [text for text in texts if len(text) >= MIN_LENGTH]
        # Longest first, so that of two values that begin alike, the longer one is replaced. `surrogatepass`, because
        # values come in JSON, which may have lone surrogates, and those have no UTF-8.
        self._texts = [text.encode("utf-8", "surrogatepass") for text in sorted(long_texts, key=len, reverse=True)]

    def new_stream(self) -> Optional[MaskedStream]:
        """Return a filter for one stream; None if there is nothing to replace."""
        return MaskedStream(self) if self._texts else None

    def apply_to_bytes(self, data: bytes) -> bytes:
        """Return bytes with the values replaced."""
        for text in self._texts:
            data = data.replace(text, MASK)
        return data

    def apply_to_cut_bytes(self, data: bytes) -> bytes:
        """Return bytes with the values replaced, and also the beginning of a value that their end may have cut.

        A beginning of fewer than MIN_LENGTH bytes stays: it is likely to be ordinary text, and reveals little.
        """
        data = self.apply_to_bytes(data)
        overlap = max((_overlap_length(data, text) for text in self._texts), default=0)
        return data[:-overlap] + MASK if overlap >= MIN_LENGTH else data

    def apply_to_text(self, text: str) -> str:
        """Return a text that may have been cut within a value, with the values replaced as in `apply_to_cut_bytes`."""
        if not self._texts:
            return text
        return self.apply_to_cut_bytes(text.encode("utf-8", "surrogatepass")).decode("utf-8", "replace")

    def apply_to_message(self, value: Any) -> Any:
        """Return a value of a JSON message with the values replaced in its texts. Names of fields stay."""
        if isinstance(value, str):
            return self.apply_to_text(value)
        if isinstance(value, dict):
            return {name: self.apply_to_message(item) for name, item in value.items()}
        if isinstance(value, list):
            return [self.apply_to_message(item) for item in value]
        return value

    def complete_length(self, data: bytes) -> int:
        """Return how many of these bytes can be stored now. The bytes after them may be the beginning of a value."""
        end = len(data) - max(_overlap_length(data, text) for text in self._texts)
        while True:
            # A value that lies across `end` must not be split, so `end` moves to its start.
            crossing = [data.find(text, max(0, end - len(text) + 1), end + len(text) - 1) for text in self._texts]
            starts = [start for start in crossing if start >= 0]
            if not starts:
                return end
            end = min(starts)


class MaskedStream:
    """Replaces the values in one stream, in which a value may be split between two reads."""

    def __init__(self, mask: Mask) -> None:
        self._mask = mask
        self._pending = b""

    def feed(self, data: bytes) -> bytes:
        """Return these bytes with the values replaced. Bytes that may begin a value are kept for the next call."""
        data = self._pending + data
        end = self._mask.complete_length(data)
        self._pending = data[end:]
        return self._mask.apply_to_bytes(data[:end])

    def finish(self) -> bytes:
        """Return the bytes that were kept, at the end of the stream. A process that was killed may have cut a value."""
        remaining, self._pending = self._pending, b""
        return self._mask.apply_to_cut_bytes(remaining)


def _lines(value: str) -> List[str]:
    return [line.strip() for line in value.splitlines()[:MAX_LINES]]


def _overlap_length(data: bytes, text: bytes) -> int:
    """Return the length of the longest suffix of `data` that is a proper prefix of `text`."""
    start = max(0, len(data) - len(text) + 1)
    while True:
        start = data.find(text[:1], start)
        if start < 0:
            return 0
        if text.startswith(data[start:]):
            return len(data) - start
        start += 1
