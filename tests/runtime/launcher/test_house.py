"""The launcher imports the standard library only, parses on Python 3.8, and imports nothing slow to start."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCHER = Path(__file__).resolve().parents[3] / "runtime" / "launcher"


@pytest.mark.parametrize("path", sorted(LAUNCHER.rglob("*.py")), ids=lambda path: str(path.relative_to(LAUNCHER)))
def test_modules_run_in_any_image(path):
    tree = ast.parse(path.read_text(), feature_version=(3, 8))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        else:
            continue
        assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names


SLOW = {"ast", "asyncio", "dataclasses", "http.server", "inspect", "logging", "pathlib", "subprocess", "urllib.request"}
"""Modules of the standard library that take several milliseconds each, and that only some runs need."""


def test_nothing_slow_is_imported_before_the_ranks_start():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import launcher.__main__; imported = [*sys.modules]; "
        "import json; print(json.dumps(imported))"
    )
    command = [sys.executable, "-I", "-S", "-c", code, str(LAUNCHER.parent)]
    imported = set(json.loads(subprocess.run(command, capture_output=True, check=True).stdout))
    assert "launcher.worker_group" in imported
    assert imported & SLOW == set()
