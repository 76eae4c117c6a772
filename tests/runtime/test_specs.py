import dataclasses

import pytest

from runtime.specs import (
    NAME_PATTERN,
    UNLIMITED_NODES,
    Capacity,
    Framework,
    Image,
    Mount,
    NodeCapacity,
    Resources,
    RunSpec,
)

SPEC = RunSpec(
    name="job-1-1",
    framework=Framework.HOROVOD,
    image=Image(builtin="horovod"),
    nodes=2,
    workers_per_node=3,
    resources=Resources(cpus=0.5, memory_mib=1024),
    script="train.py",
    deadline_seconds=60,
    arguments=("--depth", "3"),
    datasets=("digits",),
    mounts=(Mount("/a", "/workspace", False),),
    labels={"organization": "7"},
)


def test_a_spec_travels_as_json():
    assert RunSpec.from_json(SPEC.to_json()) == SPEC


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": "x"}', "null"])
def test_invalid_specs_are_refused(text):
    with pytest.raises((ValueError, TypeError, KeyError)):
        RunSpec.from_json(text)


@pytest.mark.parametrize(
    ("name", "good"),
    [("job-1-1", True), ("a" * 52, True), ("a" * 53, False), ("-a", False), ("a-", False), ("A", False), ("", False)],
)
def test_run_names(name, good):
    assert bool(NAME_PATTERN.match(name)) is good


def test_a_half_core_fits_twice():
    machine = NodeCapacity("m", total=Resources(2, 4096), free=Resources(1, 4096))
    capacity = Capacity((machine,))
    wanted = Resources(cpus=0.5, memory_mib=1024)
    assert capacity.nodes_ever(wanted) == 4
    assert capacity.nodes_now(wanted) == 2


def test_gpus_count_by_type():
    total = Resources(16, 65536, gpus=4, gpu_type="H200")
    capacity = Capacity((NodeCapacity("m", total, total),))
    wanted = Resources(1, 1024, gpus=2)
    assert capacity.nodes_ever(wanted) == 2
    assert capacity.nodes_ever(dataclasses.replace(wanted, gpu_type="H200")) == 2
    assert capacity.nodes_ever(dataclasses.replace(wanted, gpu_type="A100")) == 0


def test_a_machine_counts_for_the_node_types_it_accepts():
    total = Resources(8, 8192)
    kept = NodeCapacity("kept", total, total, closed_to=frozenset({"", "small"}))
    free = NodeCapacity("free", total, total, closed_to=frozenset({"large"}))
    capacity = Capacity((kept, free), kinds=frozenset({"small", "large", "any"}))
    result = {kind: capacity.nodes_ever(Resources(4, 1024), kind) for kind in ("small", "large", "any", "unnamed", "")}
    assert result == {"small": 2, "large": 2, "any": 4, "unnamed": 2, "": 2}
    assert capacity.nodes_now(Resources(8, 1024), "large") == 1


def test_a_machine_reserved_for_gpus_accepts_nothing_else():
    total = Resources(8, 8192, gpus=2, gpu_type="A100")
    capacity = Capacity((NodeCapacity("m", total, total, gpus_only=True),))
    assert capacity.nodes_ever(Resources(1, 1024)) == 0
    assert capacity.nodes_ever(Resources(1, 1024, gpus=1)) == 2


def test_an_elastic_cluster_has_unlimited_capacity():
    capacity = Capacity((), elastic=True)
    assert (
        capacity.nodes_now(Resources(64, 2**20, 8, "H200")) == capacity.nodes_ever(Resources(1, 1)) == UNLIMITED_NODES
    )
