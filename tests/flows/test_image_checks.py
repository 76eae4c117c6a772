"""Free checks of an image through the API of a console of real processes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.flows.console import Buyer, Console

pytestmark = pytest.mark.flow


def items(buyer: Buyer, job: int) -> dict[str, Any]:
    return {item["name"]: item for item in buyer.call("GET", f"jobs/{job}/check/")["results"]}


def check(buyer: Buyer, **changes: Any) -> int:
    order = buyer.call("POST", "images/pytorch/check/", json={"node_spec": "nano", "nodes": 2} | changes)
    return int(order["job"])


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
        # The rank that failed may have ended the other before it came to this.
        assert found[name]["ok"] is not False, found[name]
    assert found["sum"]["ok"] is None
    assert buyer.bill(job)["total_minor"] == 0
    assert "[FAIL] framework" in buyer.log(job)


@pytest.mark.torch
def test_a_check_of_the_pytorch_image_finds_everything_in_order(torch_console: Console, torch_buyer: Buyer) -> None:
    job = check(torch_buyer)
    ended = torch_buyer.ended(job)
    assert ended["state"] == "succeeded", torch_buyer.log(job)
    assert {name: item["ok"] for name, item in items(torch_buyer, job).items()} == dict.fromkeys(
        items(torch_buyer, job), True
    )
    assert items(torch_buyer, job)["framework"]["detail"].startswith("torch 2.")
    assert ended["cost_minor"] == 0
    assert torch_console.supervisors() == []
