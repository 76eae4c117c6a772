"""The wheel of the command line, which people install on a laptop without the console."""

import shutil
import subprocess
import sys

from tests.flows.console import ROOT

BUILD = "import sys, setuptools.build_meta as backend; print(backend.build_wheel(sys.argv[1]))"
IMPORT_ALONE = """
import sys
sys.path.insert(0, sys.argv[1])
from trainyard_cli.main import main
main(["--version"], standalone_mode=False)
main(["run", "--help"], standalone_mode=False)
others = {"django", "rest_framework", "celery", "console", "cli"} & set(sys.modules)
sys.exit(f"It imports {others}." if others else 0)
"""


def test_the_wheel_has_the_program_and_needs_nothing_of_the_console(tmp_path):
    source = tmp_path / "cli"
    shutil.copytree(ROOT / "cli", source, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    subprocess.run([sys.executable, "-c", BUILD, tmp_path], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALONE, wheel], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "trainyard, version" in done.stdout
