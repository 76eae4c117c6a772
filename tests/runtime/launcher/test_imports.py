"""The launcher imports the standard library only, parses on Python 3.8, and imports nothing slow to start."""

import ast
import json
import subprocess
import sys
from pathlib import Path

LAUNCHER = Path(__file__).resolve().parents[3] / "runtime" / "launcher"


def test_modules_run_in_any_image():
    for path in LAUNCHER.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(), path, feature_version=(3, 8))))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
        assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names, path


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
