"""Free checks of images through the API of a console of real processes."""

import pytest

from tests.flows import WHOLE_CONSOLE
from tests.flows.console import BARE_IMAGE

pytestmark = [*WHOLE_CONSOLE, pytest.mark.slow, pytest.mark.torch]


def check(buyer, image):
    """Check an image on two nodes. Return the ended job and the checklist's items by name."""
    form = {"framework": "pytorch", "node_spec": "nano", "nodes": 2}
    job = int(buyer.call("POST", f"images/{image}/check/", json=form)["job"])
    ended = buyer.ended(job)
    assert ended["cost_minor"] == buyer.bill(job)["total_minor"] == 0
    return ended, {item["name"]: item for item in buyer.call("GET", f"jobs/{job}/check/")["results"]}


def test_a_check_names_what_an_image_lacks_and_costs_nothing(buyer):
    ended, results = check(buyer, BARE_IMAGE)
    assert ended["state"] == "failed"
    assert results["framework"]["ok"] is False
    assert "No module named 'torch'" in results["framework"]["detail"]
    assert "Install a version" in results["framework"]["remedy"]
    for name in ("environment", "python", "names", "workspace", "checkpoint_dir", "output_dir", "run_dir"):
        # Not True: the rank that failed may have ended the other one before it checked this.
        assert results[name]["ok"] is not False, results[name]
    assert results["sum"]["ok"] is None  # not tried: it needs the framework
    assert any("[FAIL] framework" in buyer.log(ended["id"], rank) for rank in (0, 1))


def test_a_check_of_the_pytorch_image_finds_everything_in_order(console, buyer):
    ended, results = check(buyer, "pytorch")
    assert ended["state"] == "succeeded", buyer.log(ended["id"])
    assert {name: item["ok"] for name, item in results.items()} == dict.fromkeys(results, True)
    assert results["framework"]["detail"].startswith("torch 2.")
    assert console.supervisors() == []
