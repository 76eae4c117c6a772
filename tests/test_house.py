"""The rules of the house (design.md, section 8) that a machine can keep."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from django.core.management import get_commands

from jobs.states import TRANSITIONS

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("console", "billing", "storage", "jobs", "runtime")
LONGEST = 400
LONGEST_SETTINGS = 300
FORBIDDEN_NAMES = {"utils", "helpers", "common", "manager"}


def modules() -> list[Path]:
    return sorted(
        path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if "migrations" not in path.parts
    )


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def lines_with(pattern: str, paths: list[Path]) -> list[str]:
    wanted = re.compile(pattern)
    return [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if wanted.search(line)
    ]


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_module_is_short_explained_and_well_named(path):
    text = path.read_text()
    limit = LONGEST_SETTINGS if path == ROOT / "console" / "settings.py" else LONGEST
    length = text.count("\n")
    assert length <= limit, f"{length} lines, {limit} at most: there is a seam in it. Split it there."
    assert ast.get_docstring(ast.parse(text)), "Begin with what the module hides, and its one rule."
    assert path.stem not in FORBIDDEN_NAMES, "Name it by what it does: everything could be in a module of this name."


def test_only_lifecycle_sets_the_state_of_a_job():
    others = [path for path in modules() if path.parts[-2] == "jobs" and path.name != "lifecycle.py"]
    found = lines_with(r"\b(job|self\.job|locked)\.state\s*=[^=]|\bjob\.save\(", others)
    assert not found, "Call lifecycle.transition() instead:\n" + "\n".join(found)


def test_only_the_settings_read_the_environment():
    # The launcher reads the environment of the run; the backends hand a program theirs. Neither is configuration.
    readers = [path for path in modules() if path.parts[len(ROOT.parts)] != "runtime"]
    readers.remove(ROOT / "console" / "settings.py")
    found = lines_with(r"os\.environ(?!\.setdefault\(\"DJANGO_SETTINGS_MODULE\")|getenv\(", readers)
    assert not found, "Read it in console/settings.py and take it from there:\n" + "\n".join(found)


def test_nothing_sleeps():
    awake = [*modules(), *sorted((ROOT / "bench").rglob("*.py"))]
    found = lines_with(r"\btime\.sleep\((?!.*  # )|from time import .*\bsleep\b", awake)
    advice = "Wait for what you wait for (an Event, a process, a file), or say in a comment why it can't be waited for"
    assert not found, f"{advice}:\n" + "\n".join(found)


def test_every_command_is_named_in_a_test():
    ours = [name for name, app in get_commands().items() if str(app).split(".")[0] in PACKAGES]
    told = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__))
    missing = [name for name in ours if not re.search(rf"\b{name}\b", told)]
    assert not missing, f"Write a test of: {', '.join(missing)}"


def test_nothing_is_left_to_do():
    paths = [*modules(), *(ROOT / "templates").rglob("*.html")]
    found = lines_with(r"\b(TODO|FIXME|XXX|HACK)\b", paths)
    assert not found, "Do it, or open an issue:\n" + "\n".join(found)


def test_imports_stand_at_the_top():
    """No import hides inside a function to break a circle."""
    found = []
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found += [
                    f"{name_of(path)}:{inner.lineno}: in {node.name}()"
                    for inner in ast.walk(node)
                    if isinstance(inner, ast.Import | ast.ImportFrom) and "runtime" not in path.parts
                ]
    assert not found, "Move the import up; if that makes a circle, the seam is wrong:\n" + "\n".join(found)


def test_the_state_diagram_in_the_docs_is_the_table():
    drawn = re.findall(r"^ +([A-Z]+) --> ([A-Z]+)$", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    table = {(state.name, following.name) for state, after in TRANSITIONS.items() for following in after}
    assert set(drawn) == table, "Draw in docs/architecture.md what jobs/states.py says."
    assert len(drawn) == len(set(drawn))


def test_every_setting_is_in_the_operator_guide():
    read = re.findall(r"env\.\w+\(\s*\"([A-Z_]+)\"", (ROOT / "console" / "settings.py").read_text())
    guide = (ROOT / "docs" / "operator-guide.md").read_text()
    missing = [name for name in dict.fromkeys(read) if f"`{name}`" not in guide]
    assert not missing, f"Say in docs/operator-guide.md what these do: {', '.join(missing)}"


def test_every_fault_names_tests_that_are_there():
    written = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    there = set(re.findall(r"^\s*def (test_\w+)\(", written, re.MULTILINE))
    lines = (ROOT / "docs" / "faults.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    faults = [row for row in rows[1:] if not row[0].startswith("**")]
    assert len(faults) > 40
    for row in faults:
        assert [bool(cell) for cell in row] == [True] * 6, f"A fault has six cells: {row}"
        named = re.findall(r"`(test_\w+)`", row[5])
        assert named, f"Name the test that makes this happen: {row[0]}"
        missing = set(named) - there
        assert not missing, f"docs/faults.md names {missing} for '{row[0]}', and there is no such test."
