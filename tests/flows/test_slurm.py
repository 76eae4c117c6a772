"""Training on a real Slurm through the API. `test_killed` tests that such runs survive the console."""

import pytest

from tests.flows import WHOLE_CONSOLE

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


def test_ddp_on_two_nodes_is_trained_and_charged(console, buyer, slurm_spec):
    if not slurm_spec:
        pytest.skip("There is no Slurm: apt-get install slurm-wlm munge.")
    buyer.call("PUT", "workspaces/main/files/ddp.py", content=DDP)
    job = buyer.start("ddp", image="pytorch", code_path="ddp.py", nodes=2, node_spec=slurm_spec)
    ended = buyer.ended(job)
    assert ended["state"] == "succeeded", buyer.log(job)
    assert "epoch 3/3" in buyer.log(job)
    assert "same weights on 2 ranks: True" in buyer.log(job)
    bill = buyer.bill(job)
    assert 0 < bill["total_minor"] == ended["cost_minor"]
    done = console.manage("check_cluster", "hpc", COLUMNS="300")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Two nodes met and finished" in done.stdout
