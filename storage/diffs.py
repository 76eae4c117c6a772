"""Compare two texts line by line, for people to read."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import takewhile

CONTEXT_LINES = 3
"""Unchanged lines that are shown around a change, as `diff -u` does."""
MATCH_LIMIT = 2000
"""Lines that `difflib` compares, whose time grows with their square. Longer differences are shown as one change."""


@dataclass(frozen=True)
class DiffLine:
    """A line of a diff. `sign` is `+` for a new line, `-` for an old one, a space for both, `@` for a gap."""

    sign: str
    text: str


def line_diff(*, old: str, new: str) -> list[DiffLine]:
    """Return the lines that differ, with unchanged lines around them; an empty list if the texts are equal."""
    if old == new:
        return []
    before, after = old.splitlines(keepends=True), new.splitlines(keepends=True)
    start = max(0, _common(before, after) - CONTEXT_LINES)
    end = max(0, _common(before[start:][::-1], after[start:][::-1]) - CONTEXT_LINES)
    before, after = before[start : len(before) - end], after[start : len(after) - end]
    if max(len(before), len(after)) > MATCH_LIMIT:
        return [*_gap(start), *_lines("-", before), *_lines("+", after), *_gap(end)]
    lines: list[DiffLine] = []
    for group in SequenceMatcher(None, before, after).get_grouped_opcodes(CONTEXT_LINES):
        lines += _gap(start + group[0][1])
        for tag, old_start, old_end, new_start, new_end in group:
            if tag == "equal":
                lines += _lines(" ", before[old_start:old_end])
            else:
                lines += _lines("-", before[old_start:old_end]) + _lines("+", after[new_start:new_end])
    return [*lines, *_gap(end)]


def _common(first: list[str], second: list[str]) -> int:
    """Return how many lines both begin with."""
    return sum(1 for _pair in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _gap(skipped: int) -> list[DiffLine]:
    return [DiffLine("@", "")] if skipped else []


def _lines(sign: str, lines: list[str]) -> list[DiffLine]:
    return [DiffLine(sign, line.rstrip("\r\n")) for line in lines]
