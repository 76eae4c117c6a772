"""Decide which files of a folder are left out, by rules in the form of `.gitignore`.

The rules are DEFAULTS and those of the folder's file `.trainyardignore`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from .errors import InvalidChoice

FILE_NAME = ".trainyardignore"
DEFAULTS = (
    ".git/", ".hg/", ".svn/", ".venv/", "venv/", "node_modules/", "__pycache__/", "*.pyc", ".ipynb_checkpoints/",
    ".mypy_cache/", ".pytest_cache/", ".ruff_cache/", ".DS_Store", ".env", ".ssh/", "/trainyard-jobs/",
)  # fmt: skip
"""Version control, environments, caches, files that often hold secrets, and downloaded files of jobs. The rule `!.env`
includes `.env` again."""
TOKENS = re.compile(r"(?P<any>\*\*/)|(?P<rest>/\*\*$)|(?P<star>\*+)|(?P<one>\?)|(?P<set>\[!?\]?[^\]]*\])|\\(?P<raw>.)")
"""The parts of a pattern that are not literal: `**/`, `/**` at the end, `*`, `?`, `[…]`, and an escaped character."""
EXPRESSIONS = {"any": "(?:.*/)?", "rest": "/.+", "star": "[^/]*", "one": "[^/]"}
"""The regular expression for each kind of part in TOKENS, except `set` and `raw`, whose text decides it."""


@dataclass(frozen=True)
class _Rule:
    """A line of a rule file. A negated rule (`!`) includes what an earlier rule leaves out."""

    pattern: re.Pattern[str]
    is_negated: bool
    folders_only: bool


class Ignore:
    """The rules of a folder. As in git, the last rule that matches decides."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._rules = [rule for line in lines if (rule := _parse_rule(line))]

    def matches(self, path: str, *, is_folder: bool) -> bool:
        """Return whether a file or folder is left out. `path` is its path from the folder with the rules.

        Rules for its parent folders are not considered: the caller does not enter a folder that is left out.
        """
        for rule in reversed(self._rules):
            if (is_folder or not rule.folders_only) and rule.pattern.fullmatch(path):
                return not rule.is_negated
        return False


def _parse_rule(line: str) -> _Rule | None:
    """Return the rule of a line; None for an empty line or a comment."""
    line = line.rstrip("\r\n")
    line = line if line.endswith("\\ ") else line.rstrip(" ")  # as in git, spaces at the end count only if escaped
    if not line or line.startswith("#"):
        return None
    is_negated = line.startswith("!")
    line = line.removeprefix("!") if is_negated else line
    folders_only = line.endswith("/")
    line = line.rstrip("/")
    # A pattern with a slash matches from the top of the folder, a pattern without at any depth.
    is_anchored = "/" in line
    expression = "".join(_translate_pattern(line.lstrip("/")))
    try:
        pattern = re.compile(expression if is_anchored else f"(?:.*/)?{expression}", re.DOTALL)
    except re.error:
        raise InvalidChoice(f"{FILE_NAME} has a pattern that is not understood: {line}") from None
    return _Rule(pattern, is_negated, folders_only)


def _translate_pattern(pattern: str) -> Iterable[str]:
    """Yield the parts of the regular expression for a pattern.

    `*`, `?` and `[…]` match within the name of one file or folder, `**` also across slashes.
    """
    position = 0
    while position < len(pattern):
        if token := TOKENS.match(pattern, position):
            position = token.end()
            kind = token.lastgroup
            if kind == "set":
                inner = token["set"][1:-1].replace("\\", "\\\\")
                # A pattern negates a set with `!`, a regular expression with `^`, which is literal in a pattern.
                inner = f"^{inner[1:]}" if inner.startswith("!") else inner.replace("^", r"\^")
                yield f"[{inner}]"
            else:
                yield re.escape(token["raw"]) if kind == "raw" else EXPRESSIONS[str(kind)]
        else:
            yield re.escape(pattern[position])
            position += 1
