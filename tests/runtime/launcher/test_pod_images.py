"""The archive in Pods with other interpreters and real frameworks."""

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


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETERS, reason="there are no other interpreters")
def test_the_oldest_python_runs_the_archive(cluster):
    source = """
    import os, sys, time
    print(sys.version_info[:2])
    while not os.path.exists("/trainyard/run-root/nodes/0.samples.jsonl"): time.sleep(0.05)
    """
    minor = min(INTERPRETERS)
    pods = cluster.start(source, 2, python=str(INTERPRETERS[minor]), plan={"framework": "horovod"})
    assert cluster.wait() == [0, 0]
    assert [pod.record["causes"] for pod in pods] == [[], []]
    assert cluster.log(1) == f"(3, {minor})\n"


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
