"""Runs that wait for machines, images, quotas and queues, but not for ever.

A test creates another backend to change a setting of the cluster, and before it asks for the capacity a second time: a
backend reuses a capacity for up to a second.
"""

import pytest

from runtime.backends.kubernetes import pending
from runtime.specs import UNLIMITED_NODES, FailureCode, Image, Outcome, PullSecret, Resources, RunPhase, WaitingCode
from tests.runtime.backends.cluster_runs import NAME, job_of, wait_for_code
from tests.runtime.backends.contract import WAIT

pytestmark = [pytest.mark.rerun_if_late("its runs are real processes, with time limits of seconds"), pytest.mark.slow]


def test_a_partly_placed_run_is_ended(own_harness):
    own_harness.backend = own_harness.new_backend(gang_seconds=2)  # how long a run may be partly placed
    # The cluster has two machines of 8 cores, so only two of the three nodes fit.
    own_harness.submit(WAIT, nodes=3, resources=Resources(5, 256))
    status = wait_for_code(own_harness, WaitingCode.CPUS)
    assert status.waiting_data == {"wanted": 5.0, "nodes": 1, "free": 3.0}
    ended = own_harness.wait_for_end()
    assert (ended.outcome, ended.started_at, ended.spans) == (Outcome.NO_CAPACITY, None, ())
    assert ended.failure.data["placed"] == 2
    assert [machine.free.cpus for machine in own_harness.new_backend().capacity().machines] == [8.0, 8.0]


def test_a_run_too_large_for_every_machine_waits_until_one_is_added_or_it_is_stopped(own_harness, fake):
    large = Resources(12, 256)
    assert own_harness.backend.capacity().nodes_ever(large) == 0
    own_harness.submit(WAIT, resources=large)
    assert "that large" in wait_for_code(own_harness, WaitingCode.TOO_LARGE).waiting_for
    # An elastic cluster may add machines, at most those of its declared capacity.
    assert own_harness.new_backend(elastic=True).capacity().nodes_now(large) == UNLIMITED_NODES
    pool = own_harness.new_backend(elastic=True, capacity=[{"cpus": 12, "memory_mib": 4096, "count": 2}])
    assert pool.describe(NAME).waiting_code == WaitingCode.CPUS
    assert (pool.capacity().nodes_ever(large), pool.capacity().nodes_now(large)) == (2, 1), "the run takes the other"
    fake.add_node("large", {"cpu": "16", "memory": "16Gi"})
    own_harness.wait_for_text("ready")
    assert own_harness.new_backend().capacity().nodes_ever(large) == 1
    own_harness.submit(WAIT, name="job-2-1", resources=Resources(20, 256))
    status = own_harness.wait("job-2-1", lambda status: status.waiting_code == WaitingCode.TOO_LARGE)
    assert (status.phase, status.started_at) == (RunPhase.STARTING, None)
    own_harness.backend.stop("job-2-1", 5)
    ended = own_harness.wait_for_end("job-2-1")
    assert (ended.outcome, ended.started_at, ended.spans) == (Outcome.STOPPED, None, ())


def test_a_private_image_without_its_credentials_ends_the_run_free(own_harness, fake, monkeypatch):
    """Both limits are 2 s here. `IMAGE_REFUSED_SECONDS` counts, since the registry refuses the image; `start_seconds`
    limits other waits."""
    reference = "private.acme.example/vision:1"
    fake.registry.passwords["private.acme.example"] = "right"
    fake.registry.images[reference] = next(iter(fake.registry.images.values()))
    for kubelet in fake.nodes.values():
        kubelet.pulled.add(reference)  # for a run of another organization
    right, wrong = (PullSecret("private.acme.example", "acme", word) for word in ("right", "wrong"))
    monkeypatch.setattr(pending, "IMAGE_REFUSED_SECONDS", 2.0)
    own_harness.backend = own_harness.new_backend(start_seconds=2)
    own_harness.submit(WAIT, image=Image(reference=reference), pull_secret=wrong)
    assert wait_for_code(own_harness, WaitingCode.IMAGE_CREDENTIALS).waiting_data["image"] == reference
    assert own_harness.wait_for_failure(Outcome.CODE_FAILED).code is FailureCode.IMAGE_CREDENTIALS
    assert own_harness.backend.describe(NAME).started_at is None, "no time is billed"
    own_harness.backend = own_harness.new_backend()
    own_harness.complete("print(1)", image=Image(reference=reference), pull_secret=right, name="job-2-1")


def test_kueue_starts_a_run_and_ends_it_free_and_a_run_that_was_not_admitted_can_be_stopped(own_harness, fake):
    own_harness.backend = own_harness.new_backend(queue="training")
    own_harness.submit(WAIT)
    assert wait_for_code(own_harness, WaitingCode.ADMISSION).waiting_data["queue"] == "training"
    assert job_of(fake)["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "training"
    # Kueue admits the run.
    fake.store.edit("jobs", own_harness.site.namespace, NAME, lambda job: job["spec"].update(suspend=False))
    own_harness.wait_for_text("ready")
    own_harness.wait(NAME, lambda status: status.started_at is not None)
    # Kueue preempts it.
    fake.store.edit("jobs", own_harness.site.namespace, NAME, lambda job: job["spec"].update(suspend=True))
    assert own_harness.wait_for_failure(Outcome.NODE_LOST).code is FailureCode.PREEMPTED
    own_harness.submit(WAIT, name="job-2-1")
    own_harness.backend.stop("job-2-1", 10)
    status = own_harness.backend.describe("job-2-1")
    assert (status.phase, status.outcome, status.started_at) == (RunPhase.ENDED, Outcome.STOPPED, None), "at once"
    assert own_harness.backend.names(live=True) == []
    assert job_of(fake, "job-2-1")["spec"]["parallelism"] == 0, "if Kueue admitted it now, no pod would start"
