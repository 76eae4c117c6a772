"""A script of 2019, written for another platform, bought and run unchanged through the whole console."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.flows.console import ROOT, Buyer, Console

pytestmark = [pytest.mark.flow, pytest.mark.torch]
SCRIPT = ROOT / "examples" / "legacy_mnist.py"


@pytest.fixture(scope="module")
def researcher(torch_buyer: Buyer, tmp_path_factory: pytest.TempPathFactory) -> Buyer:
    """The customer, with data and the script."""
    archive = tmp_path_factory.mktemp("digits") / "digits.tar.gz"
    subprocess.run([sys.executable, str(ROOT / "examples" / "make_digits.py"), str(archive)], check=True)
    torch_buyer.bring_data(Path(archive))
    torch_buyer.call("PUT", "workspaces/main/files/legacy_mnist.py", content=SCRIPT.read_bytes())
    return torch_buyer


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_it_learns_on_any_number_of_nodes(torch_console: Console, researcher: Buyer, nodes: int) -> None:
    smallest = researcher.call("GET", "node-specs/")["results"][0]
    assert smallest["name"] == "nano"
    job = researcher.start(
        f"legacy-{nodes}", code_path="legacy_mnist.py", arguments=[], datasets=["digits"], nodes=nodes,
        node_spec=smallest["name"], epochs=3, lr="0.05",
    )  # fmt: skip
    ended = researcher.ended(job)
    assert ended["state"] == "succeeded", (ended, researcher.log(job))
    assert ended["progress"]["fraction"] == 1
    curves = researcher.call("GET", f"jobs/{job}/metrics/")["metrics"]
    assert curves["loss"][-1][1] < curves["loss"][0][1]
    assert curves["test_accuracy"][-1][1] > 0.3
    bill = researcher.bill(job)
    assert 0 < bill["total_minor"] <= ended["ceiling_minor"]
    assert float(bill["lines"]["time_used"]["quantity"]) > 0
    assert torch_console.supervisors() == []
