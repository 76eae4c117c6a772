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
    models=["net", "embeddings"],
    workspace="/workspace",
    run_dir="/trainyard/run",
    checkpoint_dir="/trainyard/checkpoints",
    restart_count=1,
    omp_threads=2,
    interface="",
    worker_ports=[],
    spare_ports=[],
    original_nodes=[],
)


def test_an_interface_is_named_to_every_library():
    environment = rank_environment(PLAN._replace(interface="lo", framework="horovod"), 0)
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE")
    assert {environment[name] for name in names} == {"lo"}


@pytest.mark.parametrize(
    ("lr", "nodes", "scaled"),
    [("0.1", 3, "0.6"), ("1e-3", 2, "0.004"), ("0.050", 1, "0.100"), ("2e-10", 4, "1.6E-9"), ("3", 2, "12")],
)
def test_the_learning_rate_is_scaled_with_the_processes(lr, nodes, scaled):
    plan = PLAN._replace(lr=lr, node=0, nodes=nodes, addresses=["a"] * nodes, warmup_epochs=2)
    get = lambda plan: {name: value for name, value in rank_environment(plan, 0).items() if name.startswith("LR")}
    assert get(plan) == {"LR": lr, "LR_BASE": lr, "LR_WARMUP_EPOCHS": "2"}
    assert get(plan._replace(lr_scaling="linear"))["LR"] == scaled


def test_the_plan_of_an_earlier_version_has_no_output_folder():
    assert "OUTPUT_DIR" not in rank_environment(PLAN, 0)
    assert rank_environment(PLAN._replace(output_dir="/trainyard/outputs"), 0)["OUTPUT_DIR"] == "/trainyard/outputs"


def test_tensorflow_gets_a_cluster_of_workers():
    plan = PLAN._replace(framework="tensorflow", worker_ports=[7000, 7001, 7002, 7003])
    assert json.loads(rank_environment(plan, 0)["TF_CONFIG"]) == {
        "cluster": {"worker": ["10.0.0.1:7000", "10.0.0.1:7001", "10.0.0.2:7002", "10.0.0.2:7003"]},
        "task": {"type": "worker", "index": 2},
    }


def test_tensorflow_gets_ipv6_addresses_in_brackets():
    plan = PLAN._replace(framework="tensorflow", addresses=["fd00::1", "fd00::2"], worker_ports=[7000] * 4)
    workers = json.loads(rank_environment(plan, 0)["TF_CONFIG"])["cluster"]["worker"]
    assert workers == ["[fd00::1]:7000"] * 2 + ["[fd00::2]:7000"] * 2


def test_horovod_gets_its_rendezvous():
    environment = rank_environment(PLAN._replace(framework="horovod", rendezvous_port=7000), 1)
    result = {name[8:]: value for name, value in environment.items() if name.startswith("HOROVOD_")}
    assert result == {
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


def test_horovod_with_mpi_gets_no_rank_variables():
    environment = rank_environment(PLAN._replace(framework="horovod", controller="mpi", backend="mpi"), 1)
    result = {name[8:]: value for name, value in environment.items() if name.startswith("HOROVOD_")}
    assert result == {"CONTROLLER": "mpi", "CPU_OPERATIONS": "mpi"}
    assert environment["BACKEND"] == "mpi"


@pytest.mark.parametrize(
    ("timeout", "warning", "expected"),
    [
        (0, 0, {}),
        (0, 20, {"STALL_CHECK_TIME_SECONDS": "20"}),
        (90, 0, {"GLOO_TIMEOUT_SECONDS": "90", "STALL_SHUTDOWN_TIME_SECONDS": "90", "STALL_CHECK_TIME_SECONDS": "60"}),
        # Horovod gives up on nothing that it has not warned of.
        (30, 45, {"GLOO_TIMEOUT_SECONDS": "30", "STALL_SHUTDOWN_TIME_SECONDS": "30", "STALL_CHECK_TIME_SECONDS": "30"}),
    ],
)
def test_horovod_gets_the_orders_timeouts(timeout, warning, expected):
    plan = PLAN._replace(framework="horovod", collective_timeout_seconds=timeout, stall_check_seconds=warning)
    environment = rank_environment(plan, 0)
    result = {name[8:]: value for name, value in environment.items() if "TIME" in name and name.startswith("HOROVOD_")}
    assert result == expected
    assert environment.get("COLLECTIVE_TIMEOUT_SECONDS") == (str(timeout) if timeout else None)


def test_an_elastic_run_sets_its_maximum_number_of_restarts():
    plan = PLAN._replace(nodes=4, min_nodes=2, addresses=["10.0.0.1"] * 4)
    assert rank_environment(plan, 0)["TORCHELASTIC_MAX_RESTARTS"] == "3"
    assert rank_environment(plan._replace(framework="horovod"), 0)["HOROVOD_ELASTIC"] == "1"
    assert "HOROVOD_ELASTIC" not in rank_environment(PLAN._replace(framework="horovod"), 0)


def test_ranks_get_a_traceparent_only_in_a_trace():
    place = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert "TRACEPARENT" not in rank_environment(PLAN, 0)
    assert rank_environment(PLAN._replace(traceparent=place), 0)["TRACEPARENT"] == place


def test_a_plan_travels_as_json():
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
        ("parser.add_option('--local_rank', type='int')", "--local_rank"),
        ("flags.DEFINE_integer('local_rank', 0, 'set by the launcher')", "--local_rank"),
        ("parser.add_argument('--' + 'local_rank')", None),
        ("# parser.add_argument('--local_rank')", None),
        ("print('--local_rank')", None),
        ("os.environ['LOCAL_RANK']", None),
        ("parser.add_argument('--local_rank_of_mine')", None),
        ("this is not Python --local_rank", None),
        ("", None),
    ],
)
def test_which_local_rank_flag_is_declared(source, flag):
    assert local_rank_flag([source]) == flag


@pytest.mark.parametrize(
    ("choice", "flag"),
    [("auto", "--local-rank"), ("underscore", "--local_rank"), ("dash", "--local-rank"), ("none", None)],
)
def test_a_chosen_flag_overrides_the_declared_one(choice, flag):
    assert local_rank_flag(["add_argument('--local-rank')"], choice) == flag


def test_the_first_source_that_declares_the_flag_decides():
    assert local_rank_flag(["import options", "add_argument('--local-rank')", "add_argument('--local_rank')"]) == (
        "--local-rank"
    )


def test_imported_names():
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
def test_rank_arguments(arguments, flag, expected):
    assert rank_arguments(PLAN._replace(arguments=arguments), 1, flag, {}) == expected


def test_a_source_that_is_nested_without_end_declares_nothing():
    assert (
        local_rank_flag(["add_argument('--local_rank')\n" + "(" * 5000, "x = " + "-" * 50_000 + "1 # --local_rank"])
        is None
    )
