"""Find the variables and datasets that a script reads, and warn of datasets that are missing in its purchase.

The script is searched with patterns instead of parsed, because hostile input could exhaust the recursion of Python's
parser. Names that code assembles at run time are not found. The results are therefore warnings, and never errors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext as _

from console.accounts.models import Organization
from console.core.errors import CustomerError
from runtime import environment
from storage import files, sharing
from storage import selectors as storage

MAX_WARNINGS = 5
"""Warnings that are shown. If there are more, the patterns have probably misread the script."""
COMMENT = re.compile(r"^[ \t]*#.*$", re.MULTILINE)
"""Matches lines with nothing but a comment."""
VARIABLE = re.compile(r"\bDATASETS(_PATH)?\b")
"""Matches the variables that tell a script of its datasets: DATASETS (their names) and DATASETS_PATH (their folder)."""
QUOTED_NAME = re.compile(r"""(?<=["'/])[a-z0-9][a-z0-9_-]{0,62}(?=["'/])""")
"""Matches whole strings and whole parts of paths that could be the name of a dataset."""
JOINED_NAME = re.compile(
    r"""DATASETS_PATH (?: \}?/ | ["'] (?:\s*,\s*["'][^"'\n]{0,200}["'])? \s*[\])]{1,4}\s*"""
    r"""(?: [,/+]\s*f?["']/? | \}/ ) ) ([a-z0-9][a-z0-9_-]{0,62})\b""",
    re.VERBOSE,
)
"""Matches a name directly after DATASETS_PATH, joined by os.path.join, `/`, `+`, an f-string, or shell syntax."""
QUOTED_VARIABLE = re.compile(r"""["']([A-Z][A-Z0-9_]+)["']""")
"""Matches a string that has the form of an environment variable's name."""


@dataclass(frozen=True)
class DatasetUse:
    """The datasets of a script: whether it uses any, names that are surely datasets, and strings that could be."""

    uses_datasets: bool = False
    certain: frozenset[str] = frozenset()
    possible: frozenset[str] = frozenset()


def find_datasets(text: str) -> DatasetUse:
    """Return the datasets that a script's text refers to."""
    code = COMMENT.sub("", text)
    if not VARIABLE.search(code):
        return DatasetUse()
    return DatasetUse(
        uses_datasets=True, certain=frozenset(JOINED_NAME.findall(code)), possible=frozenset(QUOTED_NAME.findall(code))
    )


def contract_variables(text: str) -> list[str]:
    """Return the variables of the environment contract that a script's text names as strings, in alphabetical order."""
    return sorted(environment.CONTRACT & set(QUOTED_VARIABLE.findall(COMMENT.sub("", text))))


def warnings(organization: Organization, purchase: Mapping[str, Any]) -> list[str]:
    """Return a warning for each dataset that the script reads and the purchase does not include.

    Empty if the script cannot be read.
    """
    if purchase.get("exact"):
        return []  # an exact rerun reads the datasets of its original
    script = str(purchase.get("code_path", ""))
    ordered = {str(dataset).partition("@")[0] for dataset in purchase.get("datasets") or ()}
    try:
        workspace = storage.workspace_named(organization, str(purchase.get("workspace", "")))
        use = find_datasets(files.read_text(root=storage.workspace_folder(workspace), path=script))
    except CustomerError:
        return []
    if not use.uses_datasets:
        return []
    existing_names = set(sharing.usable_datasets(organization).values_list("name", flat=True))
    # A string that could be a name counts only if a dataset has this name.
    missing_names = (use.certain | use.possible & existing_names) - ordered
    # No name in the script is surely a dataset: the script may get names from elsewhere, such as its arguments.
    if not missing_names and not ordered and not use.certain:
        return [_("%(script)s uses datasets, but none is chosen.") % {"script": script}]
    not_chosen = _("%(script)s reads the dataset %(name)s, which is not chosen.")
    not_existing = _("%(script)s reads the dataset %(name)s, which your organization does not have. Upload it first.")
    return [
        (not_chosen if name in existing_names else not_existing) % {"script": script, "name": name}
        for name in sorted(missing_names)[:MAX_WARNINGS]
    ]
