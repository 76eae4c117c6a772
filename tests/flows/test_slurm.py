"""Training on a real Slurm through the API of a console of real processes."""

import json

import pytest

from tests.flows import WHOLE_CONSOLE
from tests.flows.console import Buyer, Console, served
from tests.runtime.images_of_ours import IMAGES
from tests.slurm.fixtures import slurm_cluster

__all__ = ["slurm_cluster"]
pytestmark = [*WHOLE_CONSOLE, pytest.mark.slow, pytest.mark.torch]
DDP = b"""
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(1, 4):
    inputs = torch.randn(64, 8)
    loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"epoch {epoch}/3 loss {loss.item():.4f}", flush=True)
weights = [torch.empty_like(model.module.weight) for _ in range(dist.get_world_size())]
dist.all_gather(weights, model.module.weight.detach())
print("same weights on", len(weights), "ranks:", torch.equal(*weights), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def slurm_console(slurm_cluster, short_folders):
    """A console whose only cluster is a Slurm of three machines with two cores each."""
    clusters = {"hpc": {"backend": "slurm", "conf": str(slurm_cluster.conf), "poll_seconds": 1}}
    yield from served(Console(short_folders(), IMAGES, TRAINYARD_CLUSTERS=json.dumps(clusters)))


@pytest.fixture
def customer(slurm_console):
    created = Buyer(slurm_console)
    yield created
    created.cancel_what_goes_on()
    created.http.close()


def test_ddp_on_two_nodes_is_trained_and_charged(slurm_console, customer):
    customer.call("PUT", "workspaces/main/files/ddp.py", content=DDP)
    job = customer.start("ddp", code_path="ddp.py", node_spec="medium")
    ended = customer.ended(job)
    assert ended["state"] == "succeeded", customer.log(job)
    assert "epoch 3/3" in customer.log(job)
    assert "same weights on 2 ranks: True" in customer.log(job)
    bill = customer.bill(job)
    assert 0 < bill["total_minor"] == ended["cost_minor"]
    done = slurm_console.manage("check_cluster", "hpc", COLUMNS="300")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Two nodes met and finished" in done.stdout


def test_a_run_goes_on_without_the_console_and_is_charged_once(slurm_console, customer):
    job = customer.start("alone", node_spec="medium")
    customer.running(job)
    slurm_console.kill_all()
    workspaces = slurm_console.var / "storage" / "workspaces"
    for workspace in workspaces.iterdir():
        (workspace / "go-alone").touch()
    slurm_console.up()
    ended = customer.ended(job)
    assert (ended["state"], len(ended["attempts"])) == ("succeeded", 1)
    assert customer.bill(job)["total_minor"] == ended["cost_minor"] > 0
