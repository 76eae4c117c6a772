"""What pages and the API read about jobs: place in the queue, time left, and output."""

import time
from datetime import UTC, datetime, timedelta

import pytest
from django.utils import timezone

from console.core.errors import NotFound
from jobs import rows, selectors
from jobs.models import Job
from runtime.specs import Outcome


def test_the_place_in_the_queue_counts_everybody_who_waits_before(customer, other):
    jobs = [other.job(), customer.job(), other.job(), customer.job()]
    now = timezone.now()
    for number, job in enumerate(jobs):  # pairs with equal times, of which the older job is first
        Job.objects.filter(pk=job.pk).update(queued_at=now - timedelta(seconds=number // 2))
    queued = [*selectors.jobs_for(customer.organization), *selectors.jobs_for(other.organization)]
    ahead = {job.pk: job.ahead for job in queued}
    assert [ahead[job.pk] for job in jobs] == [2, 3, 0, 1]
    customer.end(customer.started(nodes=1), Outcome.COMPLETED)
    assert selectors.jobs_for(customer.organization).first().ahead == 0  # the newest job, which has ended


def test_the_time_left_is_estimated_and_never_past_the_deadline(customer, monkeypatch):
    began = time.time() - 100
    attempt = customer.started(at=began, max_seconds=600)
    now = datetime.fromtimestamp(began + 100, UTC)
    monkeypatch.setattr(timezone, "now", lambda: now)

    def eta(**fields):
        Job.objects.filter(pk=attempt.job_id).update(**fields)
        job = selectors.job_for(customer.organization, attempt.job_id)
        left = selectors.summary(job)["progress"]["eta_seconds"]
        assert rows.row(rows.queryset(customer.organization).get()).progress["eta_seconds"] == left
        return left

    assert eta() is None, "the quote's 100 s at p50 are over"
    assert eta(progress=0.5) == pytest.approx(100, abs=1)
    assert eta(progress=0.01) == pytest.approx(500, abs=1), "100 of the 600 s have passed"
    customer.end(attempt, Outcome.COMPLETED)
    assert eta() is None


def test_output_is_read_before_during_and_after_a_run(customer, backend):
    job = customer.job()
    assert selectors.log(job, rank=0, offset=0) == selectors.LogChunk("", 0, eof=False)
    assert selectors.capacity_now() is not None
    backend.available = False
    assert selectors.log(job, 0, 0).text == ""
    assert selectors.capacity_now() is None
    backend.available = True
    attempt = customer.started()
    backend.write(attempt.run_name, "one\n")
    assert selectors.log(attempt.job, 0, 0) == selectors.LogChunk("one\n", 4, eof=False, size=4)
    assert selectors.log(attempt.job, 0, 0, attempt_number=7).text == ""
    ended = customer.end(attempt, Outcome.COMPLETED)
    assert selectors.log(ended, 0, 2) == selectors.LogChunk("e\n", 4, eof=True, offset=2, size=4)
    backend.lose(attempt.run_name)
    assert selectors.log(ended, 0, 4) == selectors.LogChunk("", 4, eof=True, offset=4)
    with pytest.raises(NotFound):
        selectors.log(ended, 2, 0)  # its ranks are 0 and 1
