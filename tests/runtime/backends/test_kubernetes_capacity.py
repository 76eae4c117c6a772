"""The capacity of a Kubernetes cluster, computed from its Nodes, Pods and waiting Jobs."""

import pytest

from runtime.backends.kubernetes.capacity import (
    compute_capacity,
    cpus,
    mebibytes,
    pending_requests,
    quantity,
)
from runtime.backends.kubernetes.config import ClusterConfig
from runtime.specs import Resources

VOLUME = {"claim": "c", "root": "/srv"}
CONFIG = ClusterConfig.from_data(
    "east", {"volume": VOLUME, "tolerations": {"gpu": [{"key": "pool", "value": "gpu", "effect": "NoSchedule"}]}}
)


def node(name, *, ready=True, taints=(), cordoned=False, **offers):
    """A Node with 8 cores, 16 GiB and what it `offers`, where "__" stands for "/"."""
    allocatable = {"cpu": "8", "memory": "16Gi", **{key.replace("__", "/"): value for key, value in offers.items()}}
    condition = {"type": "Ready", "status": "True" if ready else "Unknown"}
    return {
        "metadata": {"name": name, "labels": {"nvidia.com/gpu.product": "A100"}},
        "spec": {"taints": list(taints), **({"unschedulable": True} if cordoned else {})},
        "status": {"allocatable": allocatable, "conditions": [condition]},
    }


def pod(machine, cpu, memory="1Gi", phase="Running", **more):
    containers = [{"resources": {"requests": {"cpu": cpu, "memory": memory, **more}}}]
    return {
        "metadata": {"labels": {}},
        "spec": {"nodeName": machine, "containers": containers},
        "status": {"phase": phase},
    }


def free(*nodes, pods=(), **more):
    """Return the free resources of each machine by its name."""
    return {machine.name: machine.free for machine in compute_capacity(nodes, pods, CONFIG, **more).machines}


def test_requests_of_pods_are_not_free():
    pods = [pod("a", "500m"), pod("a", "1", "2048Mi"), pod("b", "4", phase="Succeeded"), pod("b", "4", phase="Failed")]
    result = free(node("a"), node("b"), pods=pods)
    assert result["a"] == Resources(6.5, 16384 - 3072)
    assert result["b"] == Resources(8.0, 16384)


def test_larger_init_containers_and_gpus_count():
    one = pod("a", "1", **{"nvidia.com/gpu": "3"})
    one["spec"]["initContainers"] = [{"resources": {"requests": {"cpu": "3", "memory": "1Mi"}}}]
    result = free(node("a", **{"nvidia.com__gpu": "4"}), pods=[one])
    # Its init container needs 3 cores, which is more than the 1 that it needs later.
    assert result["a"] == Resources(8.0 - 3, 16384 - 1024, 4 - 3, "A100")


def test_a_machine_that_is_not_ready_or_cordoned_has_nothing_free():
    result = compute_capacity([node("a", ready=False), node("b", cordoned=True)], (), CONFIG)
    assert [machine.free.cpus for machine in result.machines] == [0.0, 0.0]
    assert result.nodes_ever(Resources(8, 1024)) == 2
    assert result.nodes_now(Resources(1, 1)) == 0


def test_machines_with_untolerated_taints_do_not_count():
    master = {"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}
    tolerated = {"key": "pool", "value": "gpu", "effect": "NoSchedule"}
    untolerated = {"key": "pool", "value": "web", "effect": "NoSchedule"}
    soft = {"key": "old", "effect": "PreferNoSchedule"}
    driver = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}
    taints = (master, tolerated, untolerated, soft, driver)
    nodes = [node(name, taints=[taint]) for name, taint in zip("abcde", taints, strict=True)]
    assert set(free(*nodes)) == {"b", "d", "e"}
    # Only Pods that ask for GPUs tolerate the taint of the GPUs' driver.
    gpus = compute_capacity([node("a", taints=[driver], **{"nvidia.com__gpu": "4"})], (), CONFIG)
    assert [gpus.nodes_ever(Resources(1, 1024, gpus=count)) for count in (0, 2)] == [0, 2]


def test_daemonset_and_static_pods_reduce_the_total():
    daemon, static, other = pod("a", "500m"), pod("a", "250m"), pod("a", "1")
    daemon["metadata"]["ownerReferences"] = [{"kind": "DaemonSet", "name": "network"}]
    static["metadata"]["ownerReferences"] = [{"kind": "Node", "name": "a"}]
    other["metadata"]["ownerReferences"] = [{"kind": "ReplicaSet", "name": "web"}]
    (machine,) = compute_capacity([node("a")], [daemon, static, other], CONFIG).machines
    assert (machine.total.cpus, machine.free.cpus) == (7.25, 6.25)


def test_a_node_kind_counts_the_machines_that_accept_it():
    config = ClusterConfig.from_data(
        "east",
        {
            "volume": VOLUME,
            "node_selectors": {"gpu": {"pool": "gpu"}, "none": {"pool": "none"}},
            "tolerations": {"gpu": [{"key": "pool", "operator": "Exists"}]},
        },
    )
    reserved = node("kept", taints=[{"key": "pool", "value": "gpu", "effect": "NoSchedule"}])
    reserved["metadata"]["labels"]["pool"] = "gpu"
    result = compute_capacity([reserved, node("plain")], (), config)
    wanted = Resources(8, 1024)
    # The settings do not name `small`, so it is treated as "". No machine has the label that `none` selects.
    room = {kind: result.nodes_ever(wanted, kind) for kind in ("gpu", "none", "small", "")}
    assert room == {"gpu": 1, "none": 0, "small": 1, "": 1}
    request = job("job-1-1", 1, "8")
    request["metadata"]["annotations"] = {"trainyard.dev/spec": '{"kind": "gpu"}'}
    remaining = compute_capacity([reserved, node("plain")], (), config, pending=pending_requests([request], (), config))
    assert {kind: remaining.nodes_now(wanted, kind) for kind in ("gpu", "small")} == {"gpu": 0, "small": 1}


def job(name, nodes, cpu, **status):
    template = {"spec": {"containers": [{"resources": {"requests": {"cpu": cpu, "memory": "1Gi"}}}]}}
    return {"metadata": {"name": name}, "spec": {"completions": nodes, "template": template}, "status": status}


def test_pending_pods_reserve_their_requests():
    placed = pod("a", "2")
    placed["metadata"]["labels"] = {"trainyard.dev/run": "job-1-1"}
    # Two of three Pods of the first job are missing. All Pods of the second have ended.
    waiting = pending_requests(
        [job("job-1-1", 3, "2"), job("job-2-1", 2, "1", succeeded=1, failed=1)], [placed], CONFIG
    )
    assert waiting == [(Resources(2.0, 1024), "")] * 2
    result = free(node("a"), node("b"), pods=[placed], pending=waiting)
    # Each missing Pod counts on the first machine that it fits on.
    assert result["a"].cpus == 8.0 - 2 - 2 * 2
    assert result["b"].cpus == 8.0


QUANTITIES = {"1": 1, "500m": 0.5, "1.5": 1.5, "2Ki": 2048, "1Gi": 2**30, "1G": 1e9, "1e3": 1000, "100u": 1e-4}


def test_quantities_of_kubernetes_are_converted():
    assert {text: quantity(text) for text in QUANTITIES} == pytest.approx(QUANTITIES)
    assert (cpus("250m"), mebibytes("1Gi"), mebibytes("1000000000")) == (0.25, 1024, 953)
    for text in ("", "x", "1Zi", "--1", "1 Gi"):
        with pytest.raises(ValueError, match="not a valid quantity"):
            quantity(text)
