"""The launcher's own house rules: the standard library alone, and the grammar of Python 3.8."""

from __future__ import annotations

import ast
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
