"""Faults on real processes: runs on a local cluster, and workers that `kill -9` ends, so that nothing cleans up."""

import itertools
import os
import signal
import venv
from datetime import timedelta

import pytest
from django.db import connection

from billing.models import Receipt, Transaction
from jobs import dispatch, reconciliation, run_specs
from jobs.clusters import cluster
from jobs.models import Attempt
from jobs.states import JobState
from runtime.backends.local.backend import LocalBackend
from runtime.backends.local.runs import Run
from runtime.backends.local.warm_pool.client import WarmPool
from runtime.images import venvs
from tests.runtime.conftest import processes_below

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("sent_tasks")]
COUNT_STARTS = """
import os
with open(os.path.join(os.environ["WORKSPACE"], "starts"), "a") as file:
    file.write(os.environ["RESTART_COUNT"])
"""
"""A script that notes in its workspace that it was started, and in which attempt: 0 is the first."""


@pytest.fixture(scope="session")
def bare_images(tmp_path_factory):
    """An images root whose `pytorch` is an interpreter and nothing else."""
    root = tmp_path_factory.mktemp("images")
    venv.create(root / "pytorch", with_pip=False, symlinks=True)
    venvs.mark_ready(root / "pytorch", "bare")
    return root


@pytest.fixture
def backend(monkeypatch, tmp_path, bare_images):
    """The cluster: this machine."""
    local = LocalBackend(root=tmp_path / "runs", images_root=bare_images, cpus=8, memory_mib=16384)
    monkeypatch.setattr("jobs.clusters.create", lambda _kind, **_options: local)
    cluster.cache_clear()
    yield local
    cluster.cache_clear()
    for name in local.names():
        local.delete(name)
    local.stop_prepared_processes()
    assert local.names() == []
    assert processes_below(tmp_path / "runs") == []


def killed(call, owner, name, after):
    """Call in a worker process, which is killed before or after it calls the function `owner.name`."""
    connection.close()  # a connection cannot be shared with a fork
    worker = os.fork()
    if not worker:
        try:
            function = getattr(owner, name)

            def die(*arguments, **options):
                if after:
                    function(*arguments, **options)
                os.kill(os.getpid(), signal.SIGKILL)

            setattr(owner, name, die)
            call()
        finally:
            os._exit(1)
    _pid, status = os.waitpid(worker, 0)
    assert os.WIFSIGNALED(status), "the worker did not reach the function"
    assert os.WTERMSIG(status) == signal.SIGKILL


def ended(backend, job, seconds=60):
    """Reconcile now and at every change of the cluster until the job has ended; return the job."""
    for _names in itertools.chain([set()], backend.changes(stop_after_seconds=seconds)):
        reconciliation.reconcile()
        job.refresh_from_db()
        if job.is_ended:
            return job
    raise AssertionError(f"the job has not ended in {seconds} s: {job.state} {job.waiting_code}")


def assert_charged_once(customer, job):
    """One attempt of one run, one charge, nothing held."""
    assert (job.state, job.reason) == ("succeeded", "completed")
    assert Attempt.objects.count() == 1
    assert customer.backend.names() == [f"job-{job.pk}-1"]
    assert (customer.folder / "starts").read_text() == "0", "the code was started once"
    assert Receipt.objects.count() == 1
    assert Transaction.objects.filter(kind="charge").count() == 1
    assert Receipt.objects.get().total_minor > 0
    assert customer.wallet.held_minor == 0
    assert customer.wallet.posted_minor == 100_000 - Receipt.objects.get().total_minor
    assert list(job.events.values_list("kind", flat=True)).count("settled") == 1


BEFORE, AFTER = False, True
"""Whether the worker dies before or after it calls a function. The steps are those of the backend; `test_crashes` has
those of the console's own code."""
STEPS_OF_A_START = {
    "after its folders are created": (Run, "create_folders", AFTER),
    # Every start passes through `WarmPool.starting`, also a cold one, as here.
    "before its launcher starts": (WarmPool, "starting", BEFORE),
    "before its record is written": (Run, "record_submission", BEFORE),
}


@pytest.mark.parametrize("step", STEPS_OF_A_START)
def test_a_worker_killed_while_it_starts_a_run_leaves_one_run(customer, backend, step):
    customer.write("train.py", COUNT_STARTS)
    job = customer.job(nodes=1)
    killed(dispatch.dispatch_queue, *STEPS_OF_A_START[step])
    assert_charged_once(customer, ended(backend, job))


def test_a_hang_is_paid_to_its_last_progress_and_retried_from_its_checkpoint(customer, backend, monkeypatch):
    monkeypatch.setattr(run_specs, "HANG_SECONDS", 4)
    customer.write(
        "train.py",
        "import os, pathlib, signal, time\n"
        "saved = pathlib.Path(os.environ['CHECKPOINT_DIR'], os.environ['RANK'])\n"  # the nodes share the folder
        "time.sleep(1.5)\n"
        "print('continues from', saved.read_text() if saved.exists() else 0, flush=True)\n"
        "while os.environ['RESTART_COUNT'] == '0':\n"
        "    saved.write_text('3')\n"
        "    signal.pause()\n",
    )
    job = customer.job(nodes=2, retries=1, retry_backoff_seconds=0, on_hang="retry")
    job = ended(backend, job)
    assert job.state == JobState.SUCCEEDED
    first, second = job.attempts.order_by("number")
    assert [first.reason, second.reason] == ["hung", "completed"]
    logs = [backend.logs(attempt.run_name, 0).text for attempt in (first, second)]
    assert logs == ["continues from 0\n", "continues from 3\n"]
    assert first.checkpoint_at is not None
    assert sorted(backend.stacks(first.run_name)) == [0, 1]
    hung = first.finished_at - first.progress_at
    assert hung >= timedelta(seconds=3)  # about HANG_SECONDS: launchers measure every few seconds
    lines = Receipt.objects.get().lines  # quantities are node-hours, here of two nodes
    assert [line["amount_minor"] for line in lines if line["rule"] == "hang"] == [0]
    paid = [float(line["quantity"]) * 3600 / 2 for line in lines if line["rule"] == "time_used"]
    expected = [first.progress_at - first.started_at, second.finished_at - second.started_at]
    assert paid == pytest.approx([each.total_seconds() for each in expected], abs=0.01)
