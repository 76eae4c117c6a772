"""Read a customer's requirements file. Pure.

Only names with versions are accepted, since options, paths and addresses would bypass the configured package indexes.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from runtime.errors import RuntimeFault

MAX_BYTES = 64 * 1024
"""Maximum size of a requirements file. A file with every package of a large project has a few KiB."""
MAX_REQUIREMENTS = 500
"""Maximum number of requirements in one file. Large projects have about a hundred."""
_MAX_QUOTED_LENGTH = 100
"""How many characters of a faulty line an error quotes: enough to recognize the line."""
_COMMENT = re.compile(r"(^|\s)#.*$")
_OPTION = re.compile(r"(^|\s)--?[A-Za-z]")
"""An option of pip, such as `--index-url` or `-e`."""
_LOCATION = re.compile(r"^(\.|/|~|[A-Za-z]:\\|(git|hg|svn|bzr)\+)|://|^file:", re.IGNORECASE)
"""A requirement that is a path, an address or a repository."""


class Problem(enum.StrEnum):
    """The reason why a requirements file is refused."""

    TOO_LARGE = "too_large"
    """The file has more than `MAX_BYTES`."""
    TOO_MANY = "too_many"
    """The file has more than `MAX_REQUIREMENTS`."""
    EMPTY = "empty"
    OPTION = "option"
    """A line has an option of pip."""
    PLACE = "place"
    """A requirement is a path, an address or a repository."""
    SYNTAX = "syntax"


class InvalidRequirements(RuntimeFault):
    """A requirements file is refused. `line` is the number of the line at fault, 0 for the whole file."""

    code = "invalid_requirements"

    def __init__(self, problem: Problem, *, line: int = 0, text: str = "") -> None:
        super().__init__(f"Line {line}: {problem}: {text}" if line else str(problem))
        self.problem = problem
        self.line = line
        self.text = text[:_MAX_QUOTED_LENGTH]


@dataclass(frozen=True)
class Conflict:
    """A requirement that the image cannot meet: it has the version `installed_version` of the package `name`."""

    requirement: str
    name: str
    installed_version: str


def parse(text: str) -> tuple[str, ...]:
    """Return the requirements in a normal form, sorted and without repetitions. Raises InvalidRequirements."""
    if len(text.encode()) > MAX_BYTES:
        raise InvalidRequirements(Problem.TOO_LARGE)
    requirements = {str(_parse_requirement(line, number)) for number, line in _join_lines(text)}
    if not requirements:
        raise InvalidRequirements(Problem.EMPTY)
    if len(requirements) > MAX_REQUIREMENTS:
        raise InvalidRequirements(Problem.TOO_MANY)
    return tuple(sorted(requirements))


def find_conflict(requirements: Sequence[str], installed_versions: Mapping[str, str]) -> Conflict | None:
    """Return the first requirement for another version of a package that the image has; None if there is none.

    `installed_versions` has versions by canonical name. Requirements with an environment marker are left to the
    installer.
    """
    for text in requirements:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        version = installed_versions.get(name)
        if version is None or requirement.marker is not None:
            continue
        if not requirement.specifier.contains(version, prereleases=True):  # the image may have a pre-release
            return Conflict(text, name, version)
    return None


def _join_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield each requirement with the number of its first line. Join lines and remove comments as pip does."""
    joined, first_number = "", 0
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), start=1):
        first_number = first_number or number
        if line.endswith("\\") and not line.lstrip().startswith("#"):
            joined += line[:-1]
            continue
        content = _COMMENT.sub("", joined + line).strip()
        if content:
            yield first_number, content
        joined, first_number = "", 0
    # The last line may end with a backslash.
    if content := _COMMENT.sub("", joined).strip():
        yield first_number, content


def _parse_requirement(line: str, number: int) -> Requirement:
    """Parse one requirement, which begins in the line `number`. Raises InvalidRequirements."""
    if _LOCATION.search(line):
        raise InvalidRequirements(Problem.PLACE, line=number, text=line)
    if _OPTION.search(line):
        raise InvalidRequirements(Problem.OPTION, line=number, text=line)
    try:
        requirement = Requirement(line)
    except InvalidRequirement:
        raise InvalidRequirements(Problem.SYNTAX, line=number, text=line) from None
    if requirement.url:
        raise InvalidRequirements(Problem.PLACE, line=number, text=line)
    return requirement
