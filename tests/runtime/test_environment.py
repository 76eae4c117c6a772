"""Names of variables that customers cannot set."""

import pytest

from runtime.environment import CONTRACT, OVERRIDABLE, is_name, is_reserved
from runtime.launcher.frameworks import rank_environment
from tests.runtime.launcher.test_topology import PLAN


@pytest.mark.parametrize("framework", ["pytorch", "horovod", "tensorflow"])
@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_variables_that_the_platform_sets_are_reserved(framework, controller):
    # With every setting that adds variables; the values do not matter.
    plan = PLAN._replace(
        framework=framework, controller=controller, interface="lo", min_nodes=1, collective_timeout_seconds=9,
        stall_check_seconds=9, traceparent="x", worker_ports=[1, 2, 3, 4],
    )  # fmt: skip
    names = rank_environment(plan, 0)
    assert {name for name in names if not is_reserved(name)} <= OVERRIDABLE


def test_names_of_the_platform_are_reserved_and_those_of_libraries_are_not():
    reserved = ("TRAINYARD_X", "KUBERNETES_PORT", "PYTHONHOME", "CUDA_VISIBLE_DEVICES", "OMPI_COMM_WORLD_RANK")
    assert [name for name in reserved if not is_reserved(name)] == []
    # Customers may set these.
    own = ("NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "HOROVOD_FUSION_THRESHOLD", "LD_PRELOAD", "PATH", "OMP_NUM_THREADS", "A")
    assert [name for name in own if is_reserved(name)] == []
    assert {"LR", "RANK", "OUTPUT_DIR", "DATASETS_PATH"} <= CONTRACT
    assert [name for name in ("", "1A", "A-B", "A B", "A\n", "Ä", "A" * 101) if is_name(name)] == []
