"""Several attempts submitted at once. The tests count those in progress, and measure no time."""

import threading
from types import SimpleNamespace

import pytest
from django.db import connection

from jobs import dispatch
from jobs.models import Attempt, Job
from jobs.states import JobState
from jobs.submit_pool import SubmitPool
from tests.jobs.gates import PATIENCE, Gate, join


def attempt(number):
    return SimpleNamespace(job_id=number)


def submitting(gate, count, *, max_concurrent, fails=()):
    """Submit attempts on a thread, each held by the gate. Return the thread, and what `add` and `drain` return."""
    results = []

    def submit(one):
        gate.hold(one.job_id)
        return one.job_id not in fails or 1 / 0  # a ZeroDivisionError, which counts as a failed submission too

    def work():
        with SubmitPool(submit, max_concurrent=max_concurrent) as pool:
            results.extend(pool.add(attempt(number)) for number in range(count))
            results.append(pool.drain())

    thread = threading.Thread(target=work)
    thread.start()
    return thread, results


def test_a_slow_submission_delays_no_other():
    others_done = threading.Event()
    done = []

    def submit(one):
        if one.job_id == 0:
            assert others_done.wait(PATIENCE)
        done.append(one.job_id)
        if len(done) == 9:
            others_done.set()
        return True

    with SubmitPool(submit, max_concurrent=2) as pool:
        assert all(pool.add(attempt(number)) for number in range(10))
    assert done == [*range(1, 10), 0]


def test_a_failed_submission_stops_the_pool_until_it_is_drained():
    gate = Gate()
    thread, results = submitting(gate, 4, max_concurrent=2, fails={0, 1})
    gate.until_entered(2)
    gate.release(2)  # these fail
    gate.until_entered(3)
    gate.release(2)  # the two others do not
    join(thread)
    assert results.count(False) == 1, "both failures are reported once, together"
    assert results[:2] == [True, True]


@pytest.mark.django_db(transaction=True)
def test_a_slow_server_gets_several_runs_at_once_and_each_only_once(customer, backend, monkeypatch):
    customer.quota(max_running_nodes=100)
    jobs = [customer.job(nodes=1) for _ in range(6)]
    gate, submit = Gate(), backend.submit
    monkeypatch.setattr(backend, "submit", lambda spec: (gate.hold(spec.name), submit(spec)))
    monkeypatch.setattr(backend, "parallel_submissions", 4)
    thread = threading.Thread(target=lambda: (dispatch.dispatch_queue(), connection.close()))
    thread.start()
    gate.until_entered(4)
    assert Job.objects.filter(state=JobState.STARTING).count() <= 5, "at most one job waits for a free thread"
    gate.release(6)
    join(thread)
    assert gate.most == 4
    assert sorted(gate.entered) == sorted(f"job-{job.pk}-1" for job in jobs)
    assert Attempt.objects.exclude(submitted_at=None).count() == 6
