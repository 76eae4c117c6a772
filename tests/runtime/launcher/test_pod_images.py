"""The archive in Pods with other interpreters and real frameworks."""

import json
from pathlib import Path

import pytest

from tests.runtime.images_of_ours import image_folder

pytestmark = pytest.mark.late("its pods are real processes, with time limits of seconds")

INTERPRETERS = {
    minor: path
    for pattern in (".pyenv/versions/3.*/bin/python3", ".local/share/uv/python/*/bin/python3")
    for path in Path.home().glob(pattern)
    if (minor := int(path.parents[1].name.removeprefix("cpython-").split(".")[1])) >= 8
}
"""The interpreters of this user, by their minor version."""
TRAINS = """
import os
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=float(os.environ["LR"]))
data = torch.full((int(os.environ["BATCH_SIZE"]), 4), 1.0 + dist.get_rank())
for epoch in range(int(os.environ["EPOCHS"])):
    optimizer.zero_grad()
    loss = (model(data) - 1.0).pow(2).mean()
    loss.backward()
    optimizer.step()
print("total", total.item(), "weights", [round(float(one), 6) for one in model.module.weight.detach().flatten()])
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETERS, reason="there are no other interpreters")
@pytest.mark.parametrize("choose", [min, max])
def test_the_oldest_and_the_newest_python_run_the_archive(cluster, choose):
    source = """
    import os, sys, time
    print(sys.version_info[:2])
    while not os.path.exists("/trainyard/run-root/nodes/0.samples.jsonl"): time.sleep(0.05)
    """
    minor = choose(INTERPRETERS)
    pods = cluster.start(source, 2, python=str(INTERPRETERS[minor]), plan={"framework": "horovod"})
    assert cluster.wait() == [0, 0]
    assert [pod.record["causes"] for pod in pods] == [[], []]
    assert cluster.log(1) == f"(3, {minor})\n"


@pytest.mark.slow
@pytest.mark.cores(2)
@pytest.mark.torch
def test_two_pods_train_together(cluster):
    folder = image_folder("pytorch")
    pods = cluster.start(TRAINS, 2, python=str(folder / "bin" / "python"), image=folder, plan={"interface": "lo"})
    assert cluster.wait(120) == [0, 0], [pod.record for pod in pods]
    # Gloo may abort at an interpreter's exit, which adds lines.
    first, second = (cluster.log(rank).splitlines()[0] for rank in range(2))
    assert first.startswith("total 3.0 weights")
    assert first == second, "every rank has the same model"


@pytest.mark.slow
@pytest.mark.cores(2)
@pytest.mark.torch
def test_the_platforms_check_works_in_a_pod(cluster):
    folder = image_folder("pytorch")
    plan = {"interface": "lo", "datasets": []}
    python = str(folder / "bin" / "python")
    cluster.start("", 2, python=python, image=folder, plan=plan, builtin_script="smoke")
    assert cluster.wait(120) == [0, 0], cluster.log()
    for rank in range(2):
        result = json.loads((cluster.root / "run" / "check" / f"rank-{rank}.json").read_bytes())
        assert all(finding["ok"] for finding in result["findings"]), result


@pytest.mark.slow
@pytest.mark.cores(2)
@pytest.mark.torch
def test_mpi_starts_ranks_in_other_pods_without_ssh(cluster):
    folder = image_folder("horovod")
    source = """
    import os
    import horovod.torch as hvd, torch
    NAMES = ("OMPI_COMM_WORLD_RANK", "NODE_RANK")
    hvd.init()
    total = hvd.allreduce(torch.tensor([float(hvd.rank() + 1)]), op=hvd.Sum)
    print("total", total.item(), hvd.rank(), hvd.size(), *map(os.environ.get, NAMES))
    """
    plan = {"framework": "horovod", "controller": "mpi", "backend": "mpi"}
    pods = cluster.start(source, 2, python=str(folder / "bin" / "python"), image=folder, plan=plan)
    assert cluster.wait(120) == [0, 0], ([pod.record for pod in pods], cluster.log())
    for rank in range(2):
        assert f"total 3.0 {rank} 2 {rank} {rank}\n" in cluster.log(rank)
