"""The launcher's own house rules: the standard library alone, and the grammar of Python 3.8."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCHER = Path(__file__).resolve().parents[3] / "runtime" / "launcher"


@pytest.mark.parametrize("path", sorted(LAUNCHER.glob("*.py")), ids=lambda path: path.name)
def test_modules_carry_into_any_image(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=(3, 8))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        else:
            continue
        assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names


SLOW = {"typing", "dataclasses", "inspect", "subprocess", "pathlib", "logging", "ast", "threading", "asyncio"} | {
    *("socket", "signal", "json", "re", "selectors", "ctypes", "enum", "collections", "functools", "array")
}
"""Modules of the standard library that take milliseconds each."""


def test_nothing_slow_is_imported_before_the_ranks_start() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import launcher.__main__; there = [*sys.modules]; "
        "import json; print(json.dumps(there))"
    )
    command = [sys.executable, "-I", "-S", "-c", code, str(LAUNCHER.parent)]
    imported = set(json.loads(subprocess.run(command, capture_output=True, check=True).stdout))
    assert "launcher.ranks" in imported
    assert imported & SLOW == set()
