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
ITEM = r"\\.|\[:[a-z]*:\]|[^\\]"
"""A regular expression for one item of a set: an escaped character, a class such as `[:digit:]`, or a character."""
TOKENS = re.compile(
    r"(?P<any>(?:^|(?<=/))\*\*+/)|(?P<rest>(?:^|(?<=/))\*\*+$)|(?P<star>\*+)|(?P<one>\?)|\\(?P<raw>.)"
    rf"|\[(?P<negation>[!^]?)(?P<set>(?:{ITEM})(?:(?!\])(?:{ITEM}))*+)\]"
)
"""The parts of a pattern that are not literal: `**/`, `**` at the end, `*`, `?`, an escaped character, and a set `[…]`.
The first item of a set may be `]`."""
EXPRESSIONS = {"any": "(?:.*/)?", "rest": ".*", "star": "[^/]*", "one": "[^/]"}
"""The regular expression for each kind of part in TOKENS, except `set` and `raw`, whose text decides it."""
CLASSES = {
    "alnum": "0-9A-Za-z", "alpha": "A-Za-z", "blank": r" \t", "cntrl": r"\0-\x1f\x7f", "digit": "0-9",
    "graph": "!-~", "lower": "a-z", "print": " -~", "punct": r"!-/:-@\[-`{-~", "space": r" \t-\r",
    "upper": "A-Z", "xdigit": "0-9A-Fa-f",
}  # fmt: skip
"""The characters of each class in a set, as in a regular expression."""


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
    line = line.removesuffix("/")
    # A pattern with a slash matches from the top of the folder, a pattern without at any depth.
    is_anchored = "/" in line
    # git compares the literal beginning of a pattern separately, and the rest as a pattern of its own. So a `**` at the
    # beginning of the rest counts as if a slash preceded it.
    line = line.removeprefix("/")
    literal = re.split(r"[*?\[\\]", line, maxsplit=1)[0]
    try:
        expression = re.escape(literal) + "".join(_translate_pattern(line.removeprefix(literal), is_anchored))
        pattern = re.compile(expression if is_anchored else f"(?:.*/)?{expression}", re.DOTALL)
    except re.error:
        raise InvalidChoice(f"{FILE_NAME} has a pattern that is not understood: {line}") from None
    return _Rule(pattern, is_negated, folders_only)


def _translate_pattern(pattern: str, is_anchored: bool) -> Iterable[str]:
    """Yield the parts of the regular expression for a pattern. Raises re.error if the pattern is malformed.

    `*`, `?` and `[…]` match within the name of one file or folder, `**` also across slashes. Malformed patterns are not
    ignored as in git: files would be sent that somebody meant to leave out.
    """
    position = 0
    while position < len(pattern):
        if token := TOKENS.match(pattern, position):
            position = token.end()
            kind = str(token.lastgroup)
            if kind == "set":
                yield f"(?!/)[{'^' if token['negation'] else ''}{_translate_set(token['set'])}]"
            elif kind == "raw":
                yield re.escape(token["raw"])
            else:
                # A pattern that is not anchored matches one name, so its `**` at the end is a `*`.
                yield EXPRESSIONS["star" if kind == "rest" and not is_anchored else kind]
        elif pattern[position] in "[\\":
            raise re.error("The set or the escaped character is incomplete.")
        else:
            yield re.escape(pattern[position])
            position += 1


def _translate_set(text: str) -> str:
    """Return the items of a pattern's set as those of a regular expression. Raises re.error for an unknown class."""
    items, parts = re.findall(ITEM, text, re.DOTALL), []
    while items:
        item = items.pop(0)
        if len(item) > 2:  # a class such as `[:digit:]`
            if item[2:-2] not in CLASSES:
                raise re.error("There is no such class of characters.")
            parts.append(CLASSES[item[2:-2]])
        elif len(items) > 1 and items[0] == "-":  # a range such as `a-z`
            # [-1]: without the backslash of an escaped character.
            parts.append(f"{re.escape(item[-1])}-{re.escape(items[1][-1])}")
            del items[:2]
        else:
            parts.append(re.escape(item[-1]))
    return "".join(parts)
