"""A sweep of real trainings: it finds better settings than the default within its ceiling, whatever is killed."""

import signal
import subprocess
import sys

import pytest

from runtime import pids
from tests.console.processes import wait_for
from tests.flows import WHOLE_CONSOLE
from tests.flows.console import ROOT

pytestmark = [*WHOLE_CONSOLE, pytest.mark.slow, pytest.mark.torch]
PATIENCE_SECONDS = 420
TRIALS = 8
RUN = {
    "image": "pytorch", "code_path": "mnist_ddp.py", "arguments": [], "datasets": ["digits"], "epochs": 1, "nodes": 1,
    "batch_size": 64,
}  # fmt: skip
DEFAULT_LR = "0.001"


def test_a_sweep_finds_better_settings_although_its_parts_are_killed(console, buyer, tmp_path):
    archive = tmp_path / "digits.tar.gz"
    subprocess.run([sys.executable, ROOT / "examples" / "make_digits.py", archive], check=True)
    buyer.upload_data(archive)
    buyer.upload_script(ROOT / "examples" / "mnist_ddp.py")
    default = buyer.start(**RUN, lr=DEFAULT_LR)
    assert buyer.ended(default)["state"] == "succeeded", buyer.log(default)
    held_before = buyer.call("GET", "wallet/")["held_minor"]

    form = buyer.form(**RUN) | {
        "space": {"LR": {"type": "float", "low": 0.0005, "high": 0.5, "log": True}},
        "objective": {"metric": "accuracy", "goal": "maximize"},
        "method": "tpe",
        "trials": TRIALS,
        "concurrency": 2,
    }
    quote = buyer.call("POST", "sweeps/quotes/", json=form)
    assert quote["estimate"]["p50_minor"] <= quote["ceiling_minor"]
    sweep = buyer.call("POST", "sweeps/", json={"quote": quote["id"]}, headers={"Idempotency-Key": quote["id"]})["id"]
    again = buyer.call("POST", "sweeps/", json={"quote": quote["id"]}, headers={"Idempotency-Key": quote["id"]})["id"]
    assert again == sweep
    assert buyer.call("GET", "wallet/")["held_minor"] <= held_before + quote["ceiling_minor"]

    def state():
        return buyer.call("GET", f"sweeps/{sweep}/")

    wait_for(lambda: state()["trials_done"] >= 2, PATIENCE_SECONDS)
    console.kill(*console.programs("worker", "worker@%h"), *console.programs("manage.py", "watch_runs"))
    wait_for(lambda: state()["trials_done"] >= 4 and console.supervisors(), PATIENCE_SECONDS)
    pid, started = console.supervisors()[0]
    pids.send(pid, started, signal.SIGKILL)  # a node of a trial: a platform fault, which is free and retried
    wait_for(lambda: state()["state"] == "ended", PATIENCE_SECONDS)

    ended, trials = state(), buyer.call("GET", f"sweeps/{sweep}/trials/")["results"]
    assert (ended["reason"], [trial["number"] for trial in trials]) == ("completed", list(range(TRIALS)))
    assert {trial["outcome"] for trial in trials} == {"completed"}
    metrics = buyer.call("GET", f"jobs/{default}/metrics/")["metrics"]
    assert ended["best"]["value"] > metrics["accuracy"][-1][1]
    receipt = buyer.call("GET", f"sweeps/{sweep}/receipt/")
    assert len(receipt["trials"]) == TRIALS
    assert 0 < receipt["total_minor"] == ended["cost_minor"] <= quote["ceiling_minor"]
    assert buyer.call("GET", "wallet/")["held_minor"] == held_before
    charged = "SELECT count(*) FROM billing_transaction WHERE kind = 'charge' AND description LIKE %s"
    assert [console.query(charged, f"#{trial['job']} %") for trial in trials] == [[(1,)]] * TRIALS
