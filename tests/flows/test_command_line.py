"""The command line against a whole console: one command from a folder to a receipt and the run's files."""

import json
import os
import subprocess
import sys

import pytest

from tests.flows import WHOLE_CONSOLE
from tests.flows.console import ROOT

pytestmark = [*WHOLE_CONSOLE, pytest.mark.slow]
TRAIN = """
import os, pathlib, sys
import helper

for epoch in range(1, 4):
    print(f"epoch {epoch}/3 loss {1 / epoch}", flush=True)
if os.environ["RANK"] == "0":
    pathlib.Path(os.environ["OUTPUT_DIR"], "model.txt").write_text(helper.TEXT + sys.argv[1])
if "FAIL" in os.environ:
    raise RuntimeError("as asked")
"""


def trainyard(buyer, home, *words):
    """Run the program as on another machine: with a home of its own, and nothing of the console's settings."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRAINYARD_", "DJANGO_"))}
    environment |= {"PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": f"{home}/config", "XDG_STATE_HOME": f"{home}/state"}
    environment |= {"TRAINYARD_URL": buyer.url, "TRAINYARD_TOKEN": buyer.token}
    return subprocess.run(
        [sys.executable, "-m", "cli", *words],
        cwd=home / "digits",
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_one_command_from_a_folder_to_a_receipt(buyer, tmp_path):
    project = tmp_path / "digits"
    project.mkdir()
    (project / "train.py").write_text(TRAIN)
    (project / "helper.py").write_text("TEXT = 'trained '\n")
    run = ("run", "train.py", "--nodes", "2", "--node-spec", "nano", "--epochs", "3", "--max-minutes", "10")

    done = trainyard(buyer, tmp_path, *run, "--yes", "--get", "outputs", "--json", "deep")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["job"]["state"] == "succeeded"
    assert 0 < result["receipt"]["total_minor"] <= result["receipt"]["ceiling_minor"]
    (saved,) = result["files"]
    assert (project / saved).read_text() == "trained deep"
    for line in ("2 files sent", "epoch 3/3 loss 0.33", "succeeded", "1 file in"):
        assert line in done.stderr, done.stderr

    failed = trainyard(buyer, tmp_path, *run, "--max-price", "10", "--env", "FAIL=1", "again")
    assert failed.returncode == 3, failed.stderr  # the exit status for a failed job
    assert "0 files sent (0 bytes), 2 unchanged" in failed.stdout
    assert "Charged" in failed.stdout
    assert "train.py, line 10: raise RuntimeError" in failed.stdout
    assert "loss" in trainyard(buyer, tmp_path, "metrics", str(result["job"]["id"])).stdout
