"""Free checks of an image through the API of a console of real processes."""

import pytest

from tests.flows import WHOLE_CONSOLE

pytestmark = WHOLE_CONSOLE


def items(buyer, job):
    return {item["name"]: item for item in buyer.call("GET", f"jobs/{job}/check/")["results"]}


def check(buyer, **changes):
    order = buyer.call("POST", "images/pytorch/check/", json={"node_spec": "nano", "nodes": 2} | changes)
    return int(order["job"])


@pytest.mark.slow
def test_a_check_names_what_an_image_lacks_and_costs_nothing(console, buyer):
    """This console's image is a bare interpreter: everything is there but the framework."""
    job = check(buyer)
    ended = buyer.ended(job)
    assert ended["state"] == "failed"
    results = items(buyer, job)
    assert results["framework"]["ok"] is False
    assert "No module named 'torch'" in results["framework"]["detail"]
    assert "Install a version" in results["framework"]["remedy"]
    for name in ("environment", "python", "names", "workspace", "checkpoint_dir", "output_dir", "run_dir"):
        # The rank that failed may have ended the other before it came to this.
        assert results[name]["ok"] is not False, results[name]
    assert results["sum"]["ok"] is None
    assert buyer.bill(job)["total_minor"] == 0
    assert any("[FAIL] framework" in buyer.log(job, rank) for rank in (0, 1))


@pytest.mark.slow
@pytest.mark.torch
def test_a_check_of_the_pytorch_image_finds_everything_in_order(torch_console, torch_buyer):
    job = check(torch_buyer)
    ended = torch_buyer.ended(job)
    assert ended["state"] == "succeeded", torch_buyer.log(job)
    results = items(torch_buyer, job)
    assert {name: item["ok"] for name, item in results.items()} == dict.fromkeys(results, True)
    assert results["framework"]["detail"].startswith("torch 2.")
    assert ended["cost_minor"] == 0
    assert torch_console.supervisors() == []
