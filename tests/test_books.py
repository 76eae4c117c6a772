"""The rules of `tests.books` allow what only looks like a fault."""

import time

import pytest

from jobs.lifecycle import MAX_PLATFORM_FAULTS
from jobs.models import Job
from runtime.specs import Outcome
from tests.books import BROKEN_BOOKS, BROKEN_ORDERS, broken
from tests.factories.jobs import start


@pytest.mark.django_db
def test_a_job_that_ends_by_a_platform_fault_is_charged_for_an_earlier_attempt(customer):
    began = time.time() - 1000
    attempt = customer.started(at=began, retries=1, retry_backoff_seconds=0)
    customer.end(attempt, Outcome.CODE_FAILED, at=began + 100)
    for _fault in range(MAX_PLATFORM_FAULTS):
        job = Job.objects.get(pk=attempt.job_id)
        start(job)
        attempt = job.attempts.latest("number")
        customer.backend.start(attempt.run_name, at=began + 200)
        job = customer.end(attempt, Outcome.NODE_LOST, at=began + 300)
    assert job.reason == "node_lost"
    assert job.order.hold.metered_minor > 0
    assert broken(BROKEN_BOOKS | BROKEN_ORDERS) == {}
