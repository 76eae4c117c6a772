"""What a plan gives each rank: environment variables and arguments."""

import json

import pytest

from runtime.launcher.__main__ import _read_sources
from runtime.launcher.frameworks import rank_environment
from runtime.launcher.topology import Plan, find_imports, local_rank_flag, rank_arguments

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


TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"interface": "lo"}, {f"{name}_SOCKET_IFNAME": "lo" for name in ("GLOO", "NCCL", "TP")}),
        ({"interface": "lo", "framework": "horovod"}, {"HOROVOD_GLOO_IFACE": "lo"}),
        ({"output_dir": "/outputs"}, {"OUTPUT_DIR": "/outputs"}),
        ({"traceparent": TRACEPARENT}, {"TRACEPARENT": TRACEPARENT}),
        # One restart so far, and two for the nodes that the run can lose.
        ({"nodes": 4, "min_nodes": 2, "addresses": ["a"] * 4}, {"TORCHELASTIC_MAX_RESTARTS": "3"}),
        ({"nodes": 4, "min_nodes": 2, "addresses": ["a"] * 4, "framework": "horovod"}, {"HOROVOD_ELASTIC": "1"}),
    ],
)
def test_options_of_a_plan_add_variables(changes, expected):
    """Of the node's first rank, local rank 0."""
    assert expected.items() <= rank_environment(PLAN._replace(**changes), 0).items()
    plain = rank_environment(PLAN._replace(framework=changes.get("framework", "pytorch")), 0)
    # Without its option only TORCHELASTIC_MAX_RESTARTS is set, to the restart count.
    assert [plain.get(name) for name in expected] in ([None] * len(expected), ["1"])


def test_mpirun_changes_no_variable_of_pytorch_but_its_backend():
    under_mpi = rank_environment(PLAN._replace(controller="mpi", backend="mpi"), 0)
    assert under_mpi == {**rank_environment(PLAN, 0), "BACKEND": "mpi"}


@pytest.mark.parametrize(
    ("lr", "nodes", "scaled"),
    [("0.1", 3, "0.6"), ("1e-3", 2, "0.004"), ("0.050", 1, "0.100"), ("2e-10", 4, "1.6E-9"), ("3", 2, "12")],
)
def test_the_learning_rate_is_scaled_with_the_processes(lr, nodes, scaled):
    """Each node of PLAN has two processes."""
    plan = PLAN._replace(lr=lr, node=0, nodes=nodes, addresses=["a"] * nodes, warmup_epochs=2)
    get = lambda plan: {name: value for name, value in rank_environment(plan, 0).items() if name.startswith("LR")}
    assert get(plan) == {"LR": lr, "LR_BASE": lr, "LR_WARMUP_EPOCHS": "2"}
    assert get(plan._replace(lr_scaling="linear"))["LR"] == scaled


# Before a port, an IPv6 address needs brackets.
@pytest.mark.parametrize(
    ("addresses", "hosts"), [(["10.0.0.1", "10.0.0.2"],) * 2, (["fd00::1", "fd00::2"], ["[fd00::1]", "[fd00::2]"])]
)
def test_tensorflow_gets_a_cluster_of_workers(addresses, hosts):
    plan = PLAN._replace(framework="tensorflow", addresses=addresses, worker_ports=[1, 2, 3, 4])
    assert json.loads(rank_environment(plan, 0)["TF_CONFIG"]) == {
        "cluster": {"worker": [f"{hosts[0]}:1", f"{hosts[0]}:2", f"{hosts[1]}:3", f"{hosts[1]}:4"]},
        "task": {"type": "worker", "index": 2},  # the first process of node 1
    }


HOROVOD_PLACE = {
    "HOSTNAME": "job-1-1-1", "GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "GLOO_RENDEZVOUS_PORT": "7000",
    "RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "1", "CROSS_SIZE": "2",
}  # fmt: skip


@pytest.mark.parametrize(("controller", "place"), [("gloo", HOROVOD_PLACE), ("mpi", {})])
def test_horovod_gets_its_place_unless_mpirun_assigns_it(controller, place):
    plan = PLAN._replace(framework="horovod", controller=controller, rendezvous_port=7000)
    variables = {name: value for name, value in rank_environment(plan, 1).items() if name.startswith("HOROVOD_")}
    expected = {"CONTROLLER": controller, "CPU_OPERATIONS": controller, **place}
    assert variables == {"HOROVOD_" + name: value for name, value in expected.items()}


@pytest.mark.parametrize(
    ("timeout", "warning", "expected"),
    [
        (0, 0, {}),
        (0, 20, {"STALL_CHECK_TIME_SECONDS": "20"}),
        # Without a time of its own, the warning comes after 60 s, as by Horovod's default.
        (90, 0, {"GLOO_TIMEOUT_SECONDS": "90", "STALL_SHUTDOWN_TIME_SECONDS": "90", "STALL_CHECK_TIME_SECONDS": "60"}),
        # Horovod must warn before it gives up, so the warning comes no later than the time-out.
        (30, 45, {"GLOO_TIMEOUT_SECONDS": "30", "STALL_SHUTDOWN_TIME_SECONDS": "30", "STALL_CHECK_TIME_SECONDS": "30"}),
    ],
)
def test_horovod_gets_the_orders_timeouts(timeout, warning, expected):
    plan = PLAN._replace(framework="horovod", collective_timeout_seconds=timeout, stall_check_seconds=warning)
    environment = rank_environment(plan, 0)
    variables = {name: value for name, value in environment.items() if "TIME" in name and name.startswith("HOROVOD_")}
    assert variables == {"HOROVOD_" + name: value for name, value in expected.items()}
    assert environment.get("COLLECTIVE_TIMEOUT_SECONDS") == (str(timeout) if timeout else None)


@pytest.mark.parametrize(
    ("source", "flag"),
    [
        ("parser.add_argument('--local_rank', type=int)", "--local_rank"),
        ('parser.add_argument("--local-rank", type=int, default=0)', "--local-rank"),
        ("add_argument('-l', '--local_rank', '--local-rank')", "--local_rank"),
        ("@click.option('--local_rank')\ndef main(): pass", "--local_rank"),
        ("parser.add_option('--local_rank', type='int')", "--local_rank"),
        ("flags.DEFINE_integer('local_rank', 0, 'set by the launcher')", "--local_rank"),
        ("parser.add_argument('--' + 'local_rank')", None),
        ("# parser.add_argument('--local_rank')", None),
        ("print('--local_rank')", None),
        ("parser.add_argument('--local_rank_of_mine')", None),
        ("this is not Python --local_rank", None),
        # Python's parser refuses what is nested too deeply.
        ("add_argument('--local_rank')\n" + "(" * 5000, None),
        ("x = " + "-" * 50_000 + "1 # --local_rank", None),
    ],
)
def test_the_declared_local_rank_flag_is_found(source, flag):
    assert local_rank_flag([source]) == flag
    first_declaration = flag or "--local-rank"
    assert local_rank_flag(["import options", source, "add_argument('--local-rank')"]) == first_declaration


@pytest.mark.parametrize(
    ("choice", "flag"),
    [("auto", "--local-rank"), ("underscore", "--local_rank"), ("dash", "--local-rank"), ("none", None)],
)
def test_a_chosen_flag_overrides_the_declared_one(choice, flag):
    assert local_rank_flag(["add_argument('--local-rank')"], choice) == flag


@pytest.mark.parametrize(
    ("script", "arguments", "flag"),
    [
        ("import other", [], "--local_rank"),
        ("import runpy, sys\nrunpy.run_path(sys.argv[1])", ["other.py"], "--local_rank"),
        ("import sys", ["other.py"], None),
    ],
    ids=["in an imported module", "in a script that the script runs", "in a script that is only named"],
)
def test_a_flag_that_another_file_declares_is_found(tmp_path, script, arguments, flag):
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "other.py").write_text("add_argument('--local_rank')")
    plan = PLAN._replace(script=str(tmp_path / "train.py"), arguments=arguments)
    assert local_rank_flag(list(_read_sources(plan, str(tmp_path)))) == flag


def test_top_level_names_of_imports_are_found():
    source = "import os, options as o, package.inner\nfrom models import net\n    import late\nfrom .near import x\n"
    assert find_imports(source) == ["os", "options", "package", "models", "late", "near"]


@pytest.mark.parametrize(
    ("arguments", "flag", "expected"),
    [
        ([], None, []),
        (["--depth", "3"], "--local_rank", ["--depth", "3", "--local_rank=1"]),
        (["--local-rank=0"], "--local-rank", ["--local-rank=0"]),
        (["--local_rank", "0"], "--local_rank", ["--local_rank", "0"]),
    ],
)
def test_the_local_rank_flag_is_added_unless_the_arguments_have_it(arguments, flag, expected):
    assert rank_arguments(PLAN._replace(arguments=arguments), local_rank=1, flag=flag, environment={}) == expected
