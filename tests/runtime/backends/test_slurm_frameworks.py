"""Real frameworks on two nodes of a real Slurm: they find each other, and their collectives work.

PyTorch on Slurm is in `tests/flows/test_slurm.py`.
"""

import dataclasses

import pytest

from runtime.specs import Outcome, Resources
from tests.runtime.images_of_ours import use_image
from tests.runtime.test_contract import Case, found_by, spec_of

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.cores(2)]


@pytest.mark.parametrize("framework", ["horovod", "tensorflow"])
def test_a_framework_runs_on_two_nodes(slurm_harness, framework):
    harness = use_image(slurm_harness, framework)
    spec = spec_of(harness, Case(framework), nodes=2, workers=1)
    spec = dataclasses.replace(spec, resources=Resources(cpus=2, memory_mib=4096))
    harness.backend.submit(spec)
    status = harness.wait(spec.name, lambda status: status.outcome is not None, seconds=200)
    assert status.outcome is Outcome.COMPLETED, harness.all_logs(spec.name)
    # Each rank's rank, the number of ranks, and the sum 1 + 2 of their contributions.
    assert [found_by(harness, rank)[:3] for rank in range(2)] == [[rank, 2, 3.0] for rank in range(2)]
    assert {harness.machine(node, spec.name) for node in range(2)} == {"n0", "n1"}
