"""The environment contract (docs/environment.md): in every framework, from inside real runs.

The script prints what it sees and then does a real collective of its framework, so that a variable which is there but
wrong fails too. The table of names and meanings below is the public contract, written down a second time on purpose.
Arguments, folders and rights are in `backends/test_backend_contract.py`, since they are the same in every framework.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

import pytest

from runtime.specs import Controller, Framework, Image, LrScaling, Mount, Outcome, Resources
from tests.runtime.backends.contract import SHOW, seen
from tests.runtime.images_of_ours import use_image

pytestmark = pytest.mark.rerun_if_late("its runs are real processes, with time limits of seconds")

COLLECTIVES = {
    "pytorch": """
    import torch, torch.distributed as dist
    dist.init_process_group(os.environ["BACKEND"], init_method="env://")
    given = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(given)
    found = [dist.get_rank(), dist.get_world_size(), given.item()]
    dist.destroy_process_group()
    """,
    "horovod": """
    import torch, horovod.torch as hvd
    hvd.init()
    total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum)
    found = [hvd.rank(), hvd.size(), total.item()]
    found += [hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), hvd.mpi_enabled()]
    """,
    "tensorflow": """
    import tensorflow as tf
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rank = strategy.cluster_resolver.task_id
    def give():
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.constant(rank + 1.0))
    found = [rank, strategy.num_replicas_in_sync, float(strategy.run(tf.function(give)))]
    """,
}
PRINT = """
    print("FOUND " + json.dumps(found), flush=True)
"""
BASE = {"PATH", "HOME", "USER", "LOGNAME", "LANG", "CUDA_VISIBLE_DEVICES", "SSL_CERT_FILE"}
"""Variables of every sandboxed process, which the contract does not name. None has its value from the host."""
# What mpirun and the libraries that it starts tell their processes; it differs from version to version.
OF_MPI = re.compile(r"^(OMPI|OPAL|ORTE|PMIX|PRTE|PMI|HWLOC|IPATH|PSM[23]|HFI|NCCL|UCX|TMPDIR|PWD|SHLVL|OLDPWD|_)")
PORTS = ("MASTER_PORT", "HOROVOD_GLOO_RENDEZVOUS_PORT")
"""Variables whose value the platform chooses anew for each run."""


class Case(NamedTuple):
    """A framework and its controller."""

    framework: str
    controller: Controller = Controller.GLOO

    @property
    def backend(self):
        return "mpi" if self.controller is Controller.MPI else "gloo"


CASES = [
    Case("pytorch"),
    Case("horovod"),
    Case("horovod", Controller.MPI),
    Case("tensorflow"),
]
NODES, WORKERS = 2, 2


def contract(case, rank):
    """Return the contract's variables of one rank, without ports."""
    node, local_rank = divmod(rank, WORKERS)
    everywhere = {
        "DATASETS_PATH": "/datasets",
        "DATASETS": "letters,digits",
        "MODELS_PATH": "/models",
        "MODELS": "",
        "WORKSPACE": "/workspace",
        "EPOCHS": "7",
        "LR": "0.200",  # LR_BASE for four ranks, by linear scaling
        "LR_BASE": "0.050",
        "LR_WARMUP_EPOCHS": "3",
        "BATCH_SIZE": "48",
        "BACKEND": case.backend,
        "MASTER_ADDR": "127.0.0.1",
        "WORLD_SIZE": str(NODES * WORKERS),
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "NODE_RANK": str(node),
        "WORKER_PER_NODE": str(WORKERS),
        "OMP_NUM_THREADS": "1",
        "RUN_DIR": "/trainyard/run",
        "CHECKPOINT_DIR": "/trainyard/checkpoints",
        "OUTPUT_DIR": "/trainyard/outputs",
        "TENSORBOARD_LOGDIR": "/trainyard/run/tensorboard",
        "METRICS_FILE": "/trainyard/run/metrics.jsonl",
        "RESTART_COUNT": "2",
    }
    torchrun = {
        "LOCAL_WORLD_SIZE": str(WORKERS),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(NODES),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(NODES * WORKERS),
        "TORCHELASTIC_RUN_ID": "job-1-1",
        "TORCHELASTIC_RESTART_COUNT": "2",
    }
    horovod = {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(NODES * WORKERS),
        "HOROVOD_LOCAL_RANK": str(local_rank),
        "HOROVOD_LOCAL_SIZE": str(WORKERS),
        "HOROVOD_CROSS_RANK": str(node),
        "HOROVOD_CROSS_SIZE": str(NODES),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }
    mpi = {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"}
    own = {
        Case("pytorch"): torchrun,
        Case("horovod"): {**torchrun, **horovod},
        Case("horovod", Controller.MPI): {**torchrun, **mpi},
        Case("tensorflow"): {},  # it reads TF_CONFIG, which the test compares
    }
    return {**everywhere, **own[case]}


def without_ports(environment):
    """Replace every port by 0, as `Backend.environment` does."""
    reported = {name: "0" if name in PORTS else value for name, value in environment.items()}
    if "TF_CONFIG" in reported:
        config = json.loads(reported["TF_CONFIG"])
        config["cluster"]["worker"] = [worker.rpartition(":")[0] + ":0" for worker in config["cluster"]["worker"]]
        reported["TF_CONFIG"] = config
    return reported


def spec_of(harness, case, nodes, workers):
    letters = harness.folder / "letters"
    letters.mkdir()
    return harness.spec(
        SHOW + COLLECTIVES[case.framework] + PRINT,
        framework=Framework(case.framework),
        image=Image(builtin=case.framework),
        nodes=nodes,
        workers_per_node=workers,
        resources=Resources(cpus=1, memory_mib=4096),
        epochs=7,
        lr="0.050",
        lr_scaling=LrScaling.LINEAR,
        warmup_epochs=3,
        batch_size=48,
        restart_count=2,
        deadline_seconds=180,
        controller=case.controller,
        datasets=("letters", "digits"),
        mounts=(
            Mount(str(harness.workspace), "/workspace", read_only=False),
            Mount(str(letters), "/datasets/letters"),
            Mount(str(harness.dataset), "/datasets/digits"),
        ),
    )


def found_by(harness, rank):
    """Return what the framework told a rank: its rank, the number of ranks, the sum of all contributions, and more."""
    lines = [line for line in harness.log(rank).splitlines() if line.startswith("FOUND ")]
    assert len(lines) == 1, harness.all_logs("job-1-1")
    return json.loads(lines[0].removeprefix("FOUND "))


@pytest.mark.cores(2)
@pytest.mark.torch
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id="-".join(case), marks=[] if case.framework == "pytorch" else [pytest.mark.slow])
        for case in CASES
    ],
)
def test_every_rank_sees_the_variables_of_the_contract(harness, case):
    use_image(harness, case.framework)
    spec = spec_of(harness, case, NODES, WORKERS)
    harness.patience = 200
    harness.backend.submit(spec)
    harness.wait_for_outcome(Outcome.COMPLETED, spec.name)

    size = NODES * WORKERS
    environments = [seen(harness, rank)["environment"] for rank in range(size)]
    for rank, environment in enumerate(environments):
        expected = contract(case, rank)
        assert {name: environment.get(name) for name in expected} == expected
        node, local_rank = divmod(rank, WORKERS)
        found = [rank, size, size * (size + 1) / 2]
        if case.framework == "horovod":
            found += [local_rank, WORKERS, node, NODES, case.controller is Controller.MPI]
        assert found_by(harness, rank) == found

        reported = without_ports(harness.backend.environment(spec, rank))
        received = {name: value for name, value in without_ports(environment).items() if name not in BASE}
        if case.controller is Controller.MPI:
            received = {name: value for name, value in received.items() if name in reported or not OF_MPI.match(name)}
        assert received == reported, "the backend reports exactly what a rank sees"
        assert expected.keys() <= reported.keys()

    for name in PORTS:
        assert len({environment.get(name) for environment in environments}) == 1, "all ranks must meet at one port"
    if case.framework == "tensorflow":
        configs = [json.loads(environment["TF_CONFIG"]) for environment in environments]
        workers_told = configs[0]["cluster"]["worker"]
        assert len(set(workers_told)) == len(workers_told) == size, "each process has a port of its own"
        for rank, config in enumerate(configs):
            assert config["cluster"] == {"worker": workers_told}
            assert config["task"] == {"type": "worker", "index": rank}
