from __future__ import annotations

import json

import pytest

from runtime.launcher.frameworks import rank_environment
from runtime.launcher.topology import Plan, imported_names, local_rank_flag, rank_arguments

PLAN = Plan(
    run_id="job-1-1",
    node=1,
    nodes=2,
    workers=2,
    framework="pytorch",
    backend="gloo",
    addresses=["10.0.0.1", "10.0.0.2"],
    master_port=29500,
    script="/workspace/train.py",
    arguments=["--depth", "3"],
    epochs=5,
    lr="0.05",
    batch_size=32,
    datasets=["digits", "letters"],
    datasets_path="/datasets",
    workspace="/workspace",
    run_dir="/trainyard/run",
    checkpoint_dir="/trainyard/checkpoints",
    restart_count=1,
    omp_threads=2,
    interface="",
    worker_ports=[],
    spare_ports=[],
    homes=[],
)

CONTRACT = {
    "DATASETS_PATH": "/datasets",
    "DATASETS": "digits,letters",
    "WORKSPACE": "/workspace",
    "EPOCHS": "5",
    "LR": "0.05",
    "BATCH_SIZE": "32",
    "BACKEND": "gloo",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "WORLD_SIZE": "4",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "NODE_RANK": "1",
    "WORKER_PER_NODE": "2",
    "RUN_DIR": "/trainyard/run",
    "CHECKPOINT_DIR": "/trainyard/checkpoints",
    "TENSORBOARD_LOGDIR": "/trainyard/run/tensorboard",
    "METRICS_FILE": "/trainyard/run/metrics.jsonl",
    "RESTART_COUNT": "1",
    "OMP_NUM_THREADS": "2",
    "PYTHONUNBUFFERED": "1",
}


@pytest.mark.parametrize("framework", ["pytorch", "horovod", "tensorflow"])
def test_every_framework_gets_the_contract(framework: str) -> None:
    plan = PLAN._replace(framework=framework, worker_ports=[7000, 7001, 7002, 7003])
    environment = rank_environment(plan, 1)
    assert {name: environment[name] for name in CONTRACT} == CONTRACT


def test_pytorch_gets_what_torchrun_sets() -> None:
    environment = rank_environment(PLAN, 1)
    assert {name: value for name, value in environment.items() if name not in CONTRACT} == {
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
        "TORCHELASTIC_RUN_ID": "job-1-1",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


def test_an_interface_is_named_to_every_library() -> None:
    environment = rank_environment(PLAN._replace(interface="lo", framework="horovod"), 0)
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE")
    assert {environment[name] for name in names} == {"lo"}


def test_tensorflow_gets_a_cluster_of_workers() -> None:
    plan = PLAN._replace(framework="tensorflow", worker_ports=[7000, 7001, 7002, 7003])
    assert json.loads(rank_environment(plan, 0)["TF_CONFIG"]) == {
        "cluster": {"worker": ["10.0.0.1:7000", "10.0.0.1:7001", "10.0.0.2:7002", "10.0.0.2:7003"]},
        "task": {"type": "worker", "index": 2},
    }


def test_tensorflow_gets_addresses_of_the_new_kind_in_brackets() -> None:
    plan = PLAN._replace(framework="tensorflow", addresses=["fd00::1", "fd00::2"], worker_ports=[7000] * 4)
    workers = json.loads(rank_environment(plan, 0)["TF_CONFIG"])["cluster"]["worker"]
    assert workers == ["[fd00::1]:7000"] * 2 + ["[fd00::2]:7000"] * 2


def test_horovod_gets_its_rendezvous() -> None:
    environment = rank_environment(PLAN._replace(framework="horovod", rendezvous_port=7000), 1)
    found = {name[8:]: value for name, value in environment.items() if name.startswith("HOROVOD_")}
    assert found == {
        "HOSTNAME": "job-1-1-1",
        "RANK": "3",
        "SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_SIZE": "2",
        "CROSS_RANK": "1",
        "CROSS_SIZE": "2",
        "GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
        "GLOO_RENDEZVOUS_PORT": "7000",
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
    }


def test_horovod_with_mpi_is_told_no_places() -> None:
    environment = rank_environment(PLAN._replace(framework="horovod", controller="mpi", backend="mpi"), 1)
    found = {name[8:]: value for name, value in environment.items() if name.startswith("HOROVOD_")}
    assert found == {"CONTROLLER": "mpi", "CPU_OPERATIONS": "mpi"}
    assert environment["BACKEND"] == "mpi"


@pytest.mark.parametrize(
    ("timeout", "warning", "expected"),
    [
        (0, 0, {}),
        (0, 20, {"STALL_CHECK_TIME_SECONDS": "20"}),
        (
            90,
            0,
            {"GLOO_TIMEOUT_SECONDS": "90", "STALL_SHUTDOWN_TIME_SECONDS": "90", "STALL_CHECK_TIME_SECONDS": "60"},
        ),
        # Horovod gives up on nothing that it has not warned of.
        (
            30,
            45,
            {"GLOO_TIMEOUT_SECONDS": "30", "STALL_SHUTDOWN_TIME_SECONDS": "30", "STALL_CHECK_TIME_SECONDS": "30"},
        ),
    ],
)
def test_horovod_waits_as_long_as_the_order_says(timeout: int, warning: int, expected: dict[str, str]) -> None:
    plan = PLAN._replace(framework="horovod", collective_timeout_seconds=timeout, stall_check_seconds=warning)
    environment = rank_environment(plan, 0)
    found = {name[8:]: value for name, value in environment.items() if "TIME" in name and name.startswith("HOROVOD_")}
    assert found == expected
    assert environment.get("COLLECTIVE_TIMEOUT_SECONDS") == (str(timeout) if timeout else None)


def test_an_elastic_run_says_how_often_it_may_start_again() -> None:
    plan = PLAN._replace(nodes=4, min_nodes=2, addresses=["10.0.0.1"] * 4)
    assert rank_environment(plan, 0)["TORCHELASTIC_MAX_RESTARTS"] == "3"
    assert rank_environment(plan._replace(framework="horovod"), 0)["HOROVOD_ELASTIC"] == "1"
    assert "HOROVOD_ELASTIC" not in rank_environment(PLAN._replace(framework="horovod"), 0)


def test_ranks_are_told_their_place_in_a_trace_only_where_there_is_one() -> None:
    place = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert "TRACEPARENT" not in rank_environment(PLAN, 0)
    assert rank_environment(PLAN._replace(traceparent=place), 0)["TRACEPARENT"] == place


def test_no_dataset_is_an_empty_list() -> None:
    assert rank_environment(PLAN._replace(datasets=[]), 0)["DATASETS"] == ""


def test_a_plan_travels_as_json() -> None:
    data = json.loads(json.dumps({**PLAN._asdict(), "something": "newer"}))
    assert Plan.from_data(data) == PLAN


@pytest.mark.parametrize(
    ("source", "flag"),
    [
        ("parser.add_argument('--local_rank', type=int)", "--local_rank"),
        ('parser.add_argument("--local-rank", type=int, default=0)', "--local-rank"),
        ("p.add_argument('-l', '--local_rank')", "--local_rank"),
        ("add_argument('--local_rank', '--local-rank')", "--local_rank"),
        ("@click.option('--local_rank')\ndef main(): pass", "--local_rank"),
        ("# parser.add_argument('--local_rank')", None),
        ("print('--local_rank')", None),
        ("os.environ['LOCAL_RANK']", None),
        ("parser.add_argument('--local_rank_of_mine')", None),
        ("this is not Python --local_rank", None),
        ("", None),
    ],
)
def test_which_local_rank_flag_is_declared(source: str, flag: str | None) -> None:
    assert local_rank_flag([source]) == flag


def test_the_first_source_that_declares_the_flag_decides() -> None:
    assert local_rank_flag(["import options", "add_argument('--local-rank')", "add_argument('--local_rank')"]) == (
        "--local-rank"
    )


def test_imported_names() -> None:
    source = "import os, options as o, package.inner\nfrom models import net\n    import late\nfrom .near import x\n"
    assert imported_names(source) == ["os", "options", "package", "models", "late", "near"]


@pytest.mark.parametrize(
    ("arguments", "flag", "expected"),
    [
        ([], None, []),
        (["--depth", "3"], "--local_rank", ["--depth", "3", "--local_rank=1"]),
        (["--local-rank=0"], "--local-rank", ["--local-rank=0"]),
        (["--local_rank", "0"], "--local_rank", ["--local_rank", "0"]),
    ],
)
def test_rank_arguments(arguments: list[str], flag: str | None, expected: list[str]) -> None:
    assert rank_arguments(PLAN._replace(arguments=arguments), 1, flag) == expected


def test_a_source_that_is_nested_without_end_declares_nothing() -> None:
    assert (
        local_rank_flag(["add_argument('--local_rank')\n" + "(" * 5000, "x = " + "-" * 50_000 + "1 # --local_rank"])
        is None
    )
