"""Customer code cannot make its run free of charge, on any backend.

A new backend must pass every script of `attacks`.
"""

import pytest

from jobs.states import BILLED, PLATFORM_FAULTS, EndReason
from runtime.specs import Resources
from tests.runtime.backends import hostile
from tests.runtime.backends.attacks import ATTACKS, HELPERS

pytestmark = [
    pytest.mark.rerun_if_late("its runs are real processes, with time limits of seconds"),
    pytest.mark.slow,
    pytest.mark.cores(2),
]


CLUSTERS = {"kubernetes": "cluster_harness", "slurm": "slurm_harness"}


@pytest.fixture(params=["cold", "warm", *CLUSTERS])
def hostile_harness(request):
    """The local backend with each way to start ranks, and every other backend."""
    if request.param in CLUSTERS:
        return request.getfixturevalue(CLUSTERS[request.param])
    return hostile.choose_start(request.getfixturevalue("harness"), request.param)


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_run_that_attacks_its_launcher_is_billed_and_not_retried_free(hostile_harness, attack):
    harness = hostile_harness
    status = harness.run(HELPERS + ATTACKS[attack], resources=Resources(cpus=1, memory_mib=256), deadline_seconds=25)
    reason = EndReason(status.outcome.value)
    assert reason in BILLED - PLATFORM_FAULTS, (status.failure, harness.all_logs("job-1-1"))
    if "attacked" in ATTACKS[attack]:  # it prints this once it has tried everything
        assert "attacked" in harness.log(), harness.all_logs("job-1-1")
    assert reason is not EndReason.HUNG, "a hang is billed only in part"
    assert status.finished_at >= status.started_at  # a cluster's times are whole seconds
