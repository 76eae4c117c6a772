"""Compare two texts line by line, for people to read."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import takewhile

CONTEXT_LINES = 3
"""How many unchanged lines are shown before and after a change; `diff -u` shows as many."""
MATCH_LIMIT = 2000
"""The most lines that `difflib` compares: its time grows with the square of their number. A longer part that differs is
shown as one change."""


@dataclass(frozen=True)
class DiffLine:
    """A line of a diff. `sign` is `+` for an added line, `-` for a removed one, a space for an unchanged one.

    A line with `@` stands for unchanged lines that are left out.
    """

    sign: str
    text: str


def line_diff(*, old: str, new: str) -> list[DiffLine]:
    """Return the lines that differ, with unchanged lines around them; an empty list if the texts are equal."""
    if old == new:
        return []
    old_lines, new_lines = old.splitlines(keepends=True), new.splitlines(keepends=True)
    # `difflib` compares only the part that differs: most lines are usually equal at the beginning or at the end.
    skipped_at_start = max(0, _common_count(old_lines, new_lines) - CONTEXT_LINES)
    old_lines, new_lines = old_lines[skipped_at_start:], new_lines[skipped_at_start:]
    skipped_at_end = max(0, _common_count(old_lines[::-1], new_lines[::-1]) - CONTEXT_LINES)
    old_lines, new_lines = old_lines[: len(old_lines) - skipped_at_end], new_lines[: len(new_lines) - skipped_at_end]
    if max(len(old_lines), len(new_lines)) > MATCH_LIMIT:
        return [*_gap(skipped_at_start), *_one_change(old_lines, new_lines), *_gap(skipped_at_end)]
    lines: list[DiffLine] = []
    for group in SequenceMatcher(None, old_lines, new_lines).get_grouped_opcodes(CONTEXT_LINES):
        # A group begins at line `group[0][1]` of `old_lines`. Before the first line of the text, nothing is skipped.
        lines += _gap(skipped_at_start + group[0][1])
        for tag, old_start, old_end, new_start, new_end in group:
            if tag == "equal":
                lines += _lines(" ", old_lines[old_start:old_end])
            else:
                lines += _lines("-", old_lines[old_start:old_end]) + _lines("+", new_lines[new_start:new_end])
    return [*lines, *_gap(skipped_at_end)]


def _one_change(old_lines: list[str], new_lines: list[str]) -> list[DiffLine]:
    """Return all lines from the first that differs to the last as one change, with the equal lines around it."""
    equal_at_start = _common_count(old_lines, new_lines)
    removed, added = old_lines[equal_at_start:], new_lines[equal_at_start:]
    equal_at_end = _common_count(removed[::-1], added[::-1])
    return [
        *_lines(" ", old_lines[:equal_at_start]),
        *_lines("-", removed[: len(removed) - equal_at_end]),
        *_lines("+", added[: len(added) - equal_at_end]),
        *_lines(" ", removed[len(removed) - equal_at_end :]),
    ]


def _common_count(first: list[str], second: list[str]) -> int:
    """Return how many lines at the beginning of both are equal."""
    return sum(1 for _pair in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _gap(skipped_lines: int) -> list[DiffLine]:
    """Return the line that stands for skipped lines, if there are any."""
    return [DiffLine("@", "")] if skipped_lines else []


def _lines(sign: str, lines: list[str]) -> list[DiffLine]:
    return [DiffLine(sign, line.rstrip("\r\n")) for line in lines]
