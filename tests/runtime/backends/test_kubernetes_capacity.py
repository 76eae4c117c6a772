from typing import Any

import pytest

from runtime.backends.kubernetes_capacity import (
    capacity,
    cpus,
    declared,
    lost_since,
    mebibytes,
    quantity,
    waiting_requests,
)
from runtime.backends.kubernetes_config import ClusterConfig
from runtime.specs import Capacity, NodeCapacity, Resources

VOLUME = {"claim": "c", "root": "/srv"}
CONFIG = ClusterConfig.from_data(
    "east", {"volume": VOLUME, "tolerations": {"gpu": [{"key": "pool", "value": "gpu", "effect": "NoSchedule"}]}}
)


def node(name: str, *, ready: bool = True, taints: Any = (), cordoned: bool = False, **offers: str) -> dict[str, Any]:
    allocatable = {"cpu": "8", "memory": "16Gi", **{key.replace("__", "/"): value for key, value in offers.items()}}
    condition = {
        "type": "Ready",
        "status": "True" if ready else "Unknown",
        "lastTransitionTime": "1970-01-01T00:01:00Z",
    }
    return {
        "metadata": {"name": name, "labels": {"nvidia.com/gpu.product": "A100"}},
        "spec": {"taints": list(taints), **({"unschedulable": True} if cordoned else {})},
        "status": {"allocatable": allocatable, "conditions": [condition]},
    }


def pod(machine: str, cpu: str, memory: str = "1Gi", phase: str = "Running", **more: Any) -> dict[str, Any]:
    held = [{"resources": {"requests": {"cpu": cpu, "memory": memory, **more}}}]
    return {"metadata": {"labels": {}}, "spec": {"nodeName": machine, "containers": held}, "status": {"phase": phase}}


def free(*nodes: Any, pods: Any = (), **more: Any) -> dict[str, Resources]:
    return {machine.name: machine.free for machine in capacity(nodes, pods, CONFIG, **more).machines}


def test_what_pods_hold_is_not_free() -> None:
    pods = [pod("a", "500m"), pod("a", "1", "2048Mi"), pod("b", "4", phase="Succeeded"), pod("b", "4", phase="Failed")]
    found = free(node("a"), node("b"), pods=pods)
    assert found["a"] == Resources(6.5, 16384 - 3072)
    assert found["b"] == Resources(8.0, 16384)


def test_an_init_container_counts_where_it_asks_for_more() -> None:
    one = pod("a", "1")
    one["spec"]["initContainers"] = [{"resources": {"requests": {"cpu": "3", "memory": "1Mi"}}}]
    assert free(node("a"), pods=[one])["a"] == Resources(5.0, 15360)


def test_gpus_are_counted_with_their_type() -> None:
    found = free(node("a", nvidia_com="0", **{"nvidia.com__gpu": "4"}), pods=[pod("a", "1", **{"nvidia.com/gpu": "3"})])
    assert (found["a"].gpus, found["a"].gpu_type) == (1, "A100")


def test_a_machine_that_is_not_ready_or_cordoned_has_nothing_free_but_may_again() -> None:
    found = capacity([node("a", ready=False), node("b", cordoned=True)], (), CONFIG)
    assert [machine.free.cpus for machine in found.machines] == [0.0, 0.0]
    assert found.nodes_ever(Resources(8, 1024)) == 2
    assert found.nodes_now(Resources(1, 1)) == 0


def test_machines_that_are_kept_for_others_are_not_counted() -> None:
    master = {"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}
    ours = {"key": "pool", "value": "gpu", "effect": "NoSchedule"}
    theirs = {"key": "pool", "value": "web", "effect": "NoSchedule"}
    soft = {"key": "old", "effect": "PreferNoSchedule"}
    driver = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}
    nodes = [
        node(name, taints=[taint]) for name, taint in zip("abcde", (master, ours, theirs, soft, driver), strict=True)
    ]
    assert set(free(*nodes)) == {"b", "d", "e"}


def test_what_belongs_to_a_machine_is_never_there_for_runs() -> None:
    daemon, own, other = pod("a", "500m"), pod("a", "250m"), pod("a", "1")
    daemon["metadata"]["ownerReferences"] = [{"kind": "DaemonSet", "name": "network"}]
    own["metadata"]["ownerReferences"] = [{"kind": "Node", "name": "a"}]
    other["metadata"]["ownerReferences"] = [{"kind": "ReplicaSet", "name": "web"}]
    (machine,) = capacity([node("a")], [daemon, own, other], CONFIG).machines
    assert (machine.total.cpus, machine.free.cpus) == (7.25, 6.25)


def test_a_node_kind_counts_the_machines_that_take_it() -> None:
    on = ClusterConfig.from_data(
        "east",
        {
            "volume": VOLUME,
            "node_selectors": {"gpu": {"pool": "gpu"}, "none": {"pool": "none"}},
            "tolerations": {"gpu": [{"key": "pool", "operator": "Exists"}]},
        },
    )
    kept = node("kept", taints=[{"key": "pool", "value": "gpu", "effect": "NoSchedule"}])
    kept["metadata"]["labels"]["pool"] = "gpu"
    found = capacity([kept, node("plain")], (), on)
    wanted = Resources(8, 1024)
    room = {kind: found.nodes_ever(wanted, kind) for kind in ("gpu", "none", "small", "")}
    assert room == {"gpu": 1, "none": 0, "small": 1, "": 1}
    asked = job("job-1-1", 1, "8")
    asked["metadata"]["annotations"] = {"trainyard.dev/spec": '{"kind": "gpu"}'}
    held = capacity([kept, node("plain")], (), on, waiting=waiting_requests([asked], (), on))
    assert {kind: held.nodes_now(wanted, kind) for kind in ("gpu", "small")} == {"gpu": 0, "small": 1}


def test_a_machine_with_the_gpus_own_taint_takes_runs_with_gpus_alone() -> None:
    driver = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}
    found = capacity([node("a", taints=[driver], **{"nvidia.com__gpu": "4"})], (), CONFIG)
    assert found.nodes_ever(Resources(1, 1024)) == 0
    assert found.nodes_ever(Resources(1, 1024, gpus=2)) == 2


def job(name: str, nodes: int, cpu: str, **status: int) -> dict[str, Any]:
    template = {"spec": {"containers": [{"resources": {"requests": {"cpu": cpu, "memory": "1Gi"}}}]}}
    return {"metadata": {"name": name}, "spec": {"completions": nodes, "template": template}, "status": status}


def test_what_is_about_to_be_placed_holds_what_it_asks_for() -> None:
    placed = pod("a", "2")
    placed["metadata"]["labels"] = {"trainyard.dev/run": "job-1-1"}
    waiting = waiting_requests(
        [job("job-1-1", 3, "2"), job("job-2-1", 2, "1", succeeded=1, failed=1)], [placed], CONFIG
    )
    assert waiting == [(Resources(2.0, 1024), "")] * 2
    found = free(node("a"), node("b"), pods=[placed], waiting=waiting)
    assert found["a"].cpus == 2.0
    assert found["b"].cpus == 8.0


def test_what_settings_declare_is_there_less_what_our_own_jobs_hold() -> None:
    told = Capacity((NodeCapacity("a", Resources(4, 8192), Resources(4, 8192)),))
    found = declared(told, [job("job-1-1", 2, "1500m")], CONFIG)
    assert found.machines[0].free == Resources(1.0, 6144)
    assert found.machines[0].total == Resources(4, 8192)


def test_a_machine_is_lost_from_when_it_stopped_being_ready() -> None:
    assert lost_since(node("a")) is None
    assert lost_since(node("a", ready=False)) == 60.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1", 1),
        ("500m", 0.5),
        ("1.5", 1.5),
        ("2Ki", 2048),
        ("1Gi", 2**30),
        ("1G", 1e9),
        ("1e3", 1000),
        ("100u", 1e-4),
        ("2k", 2000),
    ],
)
def test_quantities(text: str, number: float) -> None:
    assert quantity(text) == pytest.approx(number)


@pytest.mark.parametrize("text", ["", "x", "1Zi", "--1", "1 Gi"])
def test_what_is_no_quantity(text: str) -> None:
    with pytest.raises(ValueError, match="no quantity"):
        quantity(text)


def test_cores_and_mebibytes() -> None:
    assert cpus("250m") == 0.25
    assert mebibytes("1Gi") == 1024
    assert mebibytes("1000000000") == 953
