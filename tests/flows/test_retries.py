"""Retries and checks of an image through the API of a console of real processes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.flows.console import Buyer, Console

pytestmark = pytest.mark.flow

STUMBLES = """
import os, pathlib, sys
saved = pathlib.Path(os.environ["CHECKPOINT_DIR"], "step")
if os.environ["RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "0":
        saved.write_text("7")
        sys.exit(5)
    while True:
        pass
print("goes on from", saved.read_text(), flush=True)
"""


def items(buyer: Buyer, job: int) -> dict[str, Any]:
    return {item["name"]: item for item in buyer.call("GET", f"jobs/{job}/check/")["results"]}


def check(buyer: Buyer, **changes: Any) -> int:
    order = buyer.call("POST", "images/pytorch/check/", json={"node_spec": "nano", "nodes": 2} | changes)
    return int(order["job"])


def test_a_fault_of_the_code_is_tried_again_from_its_checkpoint_and_both_are_paid(
    console: Console, buyer: Buyer
) -> None:
    buyer.call("PUT", "workspaces/main/files/stumbles.py", content=STUMBLES.encode())
    job = buyer.start("stumbles", code_path="stumbles.py", arguments=[], retries=1, retry_backoff_seconds=1)
    waits = buyer.until(job, lambda data: data["not_before"] is not None)
    assert "It waits until" in waits["waiting_for"]
    ended = buyer.ended(job)
    assert ended["state"] == "succeeded", (ended, buyer.log(job, attempt=2))
    assert "goes on from 7" in buyer.log(job, attempt=2)
    first, second = ended["attempts"]
    assert (first["reason"], second["reason"]) == ("code_failed", "completed")
    assert first["detail"] == "Rank 0 on node 0 exited with code 5."
    assert first["checkpoint_at"] is not None
    assert 0 <= first["lost_seconds"] < 30
    bill = buyer.bill(job)
    assert len([line for line in bill["lines"] if line == "time_used"]) == 1  # by rule; both stand on the receipt
    used = [line for line in buyer.call("GET", f"jobs/{job}/receipt/")["lines"] if line["rule"] == "time_used"]
    assert len(used) == 2
    assert bill["total_minor"] <= ended["ceiling_minor"]
    assert console.supervisors() == []


def test_a_check_names_what_an_image_lacks_and_costs_nothing(console: Console, buyer: Buyer) -> None:
    """This console's image is a bare interpreter: everything is there but the framework."""
    job = check(buyer)
    ended = buyer.ended(job)
    assert ended["state"] == "failed"
    found = items(buyer, job)
    assert found["framework"]["ok"] is False
    assert "No module named 'torch'" in found["framework"]["detail"]
    assert "Install it there" in found["framework"]["remedy"]
    for name in ("environment", "python", "names", "workspace", "checkpoint_dir", "run_dir"):
        assert found[name]["ok"] is True, found[name]
    assert found["sum"]["ok"] is None
    assert buyer.bill(job)["total_minor"] == 0
    assert "[FAIL] framework" in buyer.log(job)


@pytest.mark.torch
def test_a_check_of_the_pytorch_image_finds_everything_in_order(torch_console: Console) -> None:
    customer = Buyer(torch_console)
    job = check(customer)
    ended = customer.ended(job)
    assert ended["state"] == "succeeded", customer.log(job)
    assert {name: item["ok"] for name, item in items(customer, job).items()} == dict.fromkeys(
        items(customer, job), True
    )
    assert items(customer, job)["framework"]["detail"].startswith("torch 2.")
    assert ended["cost_minor"] == 0
    assert torch_console.supervisors() == []
