"""Rules about the code and its documentation that ruff, mypy and import-linter do not check."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from django.core.management import get_commands
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import cli
import console
from jobs.states import TRANSITIONS

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("cli", "console", "billing", "storage", "jobs", "runtime")
MODULES = sorted(
    path
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    if not {"migrations", "build"} & set(path.parts)  # `pip install ./cli` leaves a build folder
)
OUTSIDE_RUNTIME = [path for path in MODULES if path.parts[len(ROOT.parts)] != "runtime"]
FORBIDDEN_NAMES = {"utils", "helpers", "common", "manager"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CLI = tomllib.loads((ROOT / "cli" / "pyproject.toml").read_text())["project"]


def lines_with(pattern: str, paths: list[Path]) -> list[str]:
    """Return the lines in which the pattern occurs, each after its file and number."""
    wanted = re.compile(pattern)
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if wanted.search(line)
    ]


def read(*parts: str) -> str:
    return ROOT.joinpath(*parts).read_text()


def test_modules_have_descriptive_names():
    vague = [path for path in MODULES if path.stem in FORBIDDEN_NAMES]
    assert not vague, f"Name these modules after what they do: {vague}"


def test_only_lifecycle_sets_the_state_of_a_job():
    others = [path for path in MODULES if "jobs" in path.parts and path.name != "lifecycle.py"]
    found = lines_with(r"\b(job|self\.job|locked)\.state\s*=[^=]|\bjob\.save\(", others)
    assert not found, "Call lifecycle.transition() instead:\n" + "\n".join(found)


def test_only_the_settings_read_the_environment():
    # The launcher reads the environment of the run, and backends set it for a program. Neither is configuration.
    # The command line runs on other machines, and has no settings.
    exempt = {ROOT / "console" / "settings.py", ROOT / "cli" / "session.py"}
    readers = [path for path in OUTSIDE_RUNTIME if path not in exempt]
    found = lines_with(r"os\.environ(?!\.setdefault\(\"DJANGO_SETTINGS_MODULE\")|getenv\(", readers)
    assert not found, "Read it in console/settings.py:\n" + "\n".join(found)


def test_nothing_sleeps():
    paths = [*MODULES, *sorted((ROOT / "bench").rglob("*.py"))]
    # A sleep whose line has a comment is allowed.
    found = lines_with(r"\btime\.sleep\((?!.*  # )|from time import .*\bsleep\b", paths)
    assert not found, "Wait for an event, a process or a file, or say in a comment why you cannot:\n" + "\n".join(found)


def test_temporary_folders_are_created_only_where_they_are_deleted():
    """Use the fixture `short_folders`. The clusters of tests/kubernetes delete the folders that they create."""
    allowed = {"tests/conftest.py", "tests/kubernetes/real_cluster.py", "tests/kubernetes/cluster.py"}
    found = lines_with(r"mkdtemp[(]", sorted((ROOT / "tests").rglob("*.py")))
    assert [line for line in found if line.split(":")[0] not in allowed] == []


def test_the_makefile_leaves_the_choice_of_tests_to_args():
    """Of several `-k` pytest uses only the last: one in ARGS would replace that of the Makefile."""
    assert lines_with(r"\s-k\s", [ROOT / "Makefile"]) == []


def test_every_command_is_named_in_a_test():
    ours = [name for name, app in get_commands().items() if str(app).split(".")[0] in PACKAGES]
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__))
    missing = [name for name in ours if not re.search(rf"\b{name}\b", tests)]
    assert not missing, f"Write a test of: {', '.join(missing)}"


def test_nothing_is_left_to_do():
    found = lines_with(r"\b(TODO|FIXME|XXX|HACK)\b", [*MODULES, *(ROOT / "templates").rglob("*.html")])
    assert not found, "Do it, or open an issue:\n" + "\n".join(found)


def test_no_import_is_inside_a_function_to_break_a_circle():
    found = lines_with("PLC0415", OUTSIDE_RUNTIME)  # ruff reports imports without this mark
    assert not found, "Move the import to the top. If that makes a circle, split the module:\n" + "\n".join(found)


def test_the_state_diagram_in_the_docs_is_the_table():
    drawn = re.findall(r"^ +([A-Z]+) --> ([A-Z]+)$", read("docs", "architecture.md"), re.MULTILINE)
    table = [(state.name, following.name) for state, after in TRANSITIONS.items() for following in after]
    assert sorted(drawn) == sorted(table), "Draw in docs/architecture.md what jobs/states.py says."


def test_every_setting_is_in_the_operator_guide():
    names = re.findall(r"env\.\w+\(\s*\"([A-Z_]+)\"", read("console", "settings.py"))
    guide = read("docs", "operator-guide", "settings.md")
    missing = [name for name in dict.fromkeys(names) if f"`{name}`" not in guide]
    assert not missing, f"Document these in docs/operator-guide/settings.md: {', '.join(missing)}"


def test_every_fault_names_existing_tests():
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    existing = set(re.findall(r"^\s*def (test_\w+)\(", tests, re.MULTILINE))
    lines = read("docs", "faults.md").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    faults = [row for row in rows[1:] if not row[0].startswith("**")]  # rows in bold are headings
    assert len(faults) > 40, "The table of faults was not found."
    for row in faults:
        assert [bool(cell) for cell in row] == [True] * 6, f"A fault has six cells: {row}"
        named = re.findall(r"`(test_\w+)`", row[5])
        assert named, f"Name the test that causes this fault: {row[0]}"
        assert set(named) <= existing, f"docs/faults.md names tests for '{row[0]}' that do not exist."


def test_the_version_is_the_same_everywhere():
    assert {PROJECT["version"], CLI["version"], cli.VERSION} == {console.__version__}


def test_the_command_line_is_installed_alone_with_what_its_extra_lists():
    assert CLI["dependencies"] == PROJECT["optional-dependencies"]["cli"]


@pytest.mark.parametrize("name", ["base", "demo", "dev"])
def test_the_pinned_requirements_satisfy_every_dependency(name):
    pinned = {
        canonicalize_name(package): version
        for package, version in re.findall(r"^([^\s=]+)==(\S+)", read("requirements", f"{name}.txt"), re.MULTILINE)
    }
    for text in PROJECT["dependencies"] + (PROJECT["optional-dependencies"][name] if name != "base" else []):
        requirement = Requirement(text)
        if requirement.name != "trainyard":
            version = pinned.get(canonicalize_name(requirement.name))
            assert version in requirement.specifier, f"{text}: run `make requirements`"
