"""RunSpecs as JSON, names of runs, and the capacity of machines."""

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
    environment={"NCCL_DEBUG": "INFO"},
)


def test_a_spec_travels_as_json_without_its_secrets():
    with_secrets = dataclasses.replace(SPEC, secrets={"API_TOKEN": "s3cr3t"})
    assert "s3cr3t" not in with_secrets.to_json() + repr(with_secrets)
    assert RunSpec.from_json(with_secrets.to_json()) == SPEC


@pytest.mark.parametrize(
    ("name", "good"),
    [("a" * 52, True), ("a" * 53, False), ("-a", False), ("a-", False), ("A", False), ("", False), ("a\n", False)],
)
def test_run_names_are_dns_labels_of_at_most_52_characters(name, good):
    assert bool(NAME_PATTERN.match(name)) is good


# Resources are CPUs, MiB of memory, GPUs and the type of these.
HALF_FREE = NodeCapacity("half-free", total=Resources(2, 4096), free=Resources(1, 4096))
WITH_GPUS = NodeCapacity("gpus", total=Resources(16, 65536, 4, "H200"), free=Resources(16, 65536, 3, "H200"))
FOR_GPUS_ONLY = dataclasses.replace(WITH_GPUS, gpus_only=True)


@pytest.mark.parametrize(
    ("machine", "required", "ever", "now"),
    [
        (HALF_FREE, Resources(0.5, 1024), 4, 2),
        (HALF_FREE, Resources(0.5, 4096), 1, 1),
        (WITH_GPUS, Resources(1, 1024, 2), 2, 1),
        (WITH_GPUS, Resources(1, 1024, 2, "H200"), 2, 1),
        (WITH_GPUS, Resources(1, 1024, 2, "A100"), 0, 0),
        (FOR_GPUS_ONLY, Resources(1, 1024), 0, 0),
        (FOR_GPUS_ONLY, Resources(1, 1024, 1), 4, 3),
    ],
)
def test_how_many_nodes_fit_on_a_machine(machine, required, ever, now):
    """`ever` nodes fit if the machine is empty, `now` beside what it runs."""
    capacity = Capacity((machine,))
    assert (capacity.nodes_ever(required), capacity.nodes_now(required)) == (ever, now)
    elastic = Capacity((machine,), elastic=True)
    assert elastic.nodes_now(required) == elastic.nodes_ever(required) == UNLIMITED_NODES


def test_a_machine_counts_for_the_node_types_it_accepts():
    total = Resources(8, 8192)
    reserved = NodeCapacity("reserved", total, total, closed_to=frozenset({"", "small"}))
    free = NodeCapacity("free", total, total, closed_to=frozenset({"large"}))
    capacity = Capacity((reserved, free), placed_kinds=frozenset({"small", "large", "any"}))
    # No machine names "unnamed", which is not in `placed_kinds`: it counts as "", all other node kinds.
    result = {kind: capacity.nodes_ever(Resources(4, 1024), kind) for kind in ("small", "large", "any", "unnamed", "")}
    assert result == {"small": 2, "large": 2, "any": 4, "unnamed": 2, "": 2}
    assert capacity.nodes_now(Resources(8, 1024), "large") == 1
