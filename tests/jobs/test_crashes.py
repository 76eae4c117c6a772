"""The process dies before any line of what starts and ends a run: the run is adopted, not doubled, and charged once."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from django.db import connection, connections

from billing.models import Receipt, Transaction
from jobs import dispatch
from jobs.models import Attempt, Job
from jobs.states import JobState
from runtime.specs import Outcome
from tests.factories.jobs import Customer

ROOT = Path(dispatch.__file__).parent.parent
WATCHED = {
    str(ROOT / name) for name in ("jobs/dispatch.py", "jobs/lifecycle.py", "jobs/usage.py", "billing/charges.py")
}


class Killed(BaseException):
    """The process is killed here."""


class Lines:
    """Follows a call through the files watched; with `stop_before` it is killed before that line, the first time."""

    def __init__(self, stop_before: tuple[str, int] | None = None) -> None:
        self.seen: list[tuple[str, int]] = []
        self.stop_before = stop_before

    def run(self, call: Callable[[], Any]) -> bool:
        """Whether the call came to its end."""
        sys.settrace(self._trace)
        try:
            call()
        except Killed:
            return False
        finally:
            sys.settrace(None)
        return True

    def _trace(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if frame.f_code.co_filename not in WATCHED:
            return None
        if event == "line":
            line = (frame.f_code.co_filename, frame.f_lineno)
            if line == self.stop_before:
                raise Killed
            if line not in self.seen:
                self.seen.append(line)
        return self._trace


@pytest.fixture(autouse=True)
def a_run_before(customer: Customer) -> None:
    """What a process does once in its life is done: the lines of a call are those of the next one too."""
    job = customer.job()
    dispatch.dispatch_queue()
    customer.backend.start(f"job-{job.pk}-1")
    dispatch.follow(run_name=f"job-{job.pk}-1")
    customer.backend.end(f"job-{job.pk}-1", Outcome.COMPLETED)
    dispatch.follow(run_name=f"job-{job.pk}-1")


def settle(customer: Customer, job: Job, *, began: float) -> None:
    """Whoever comes after the crash: sweeps, and the run goes its way."""
    for _sweep in range(2):
        dispatch.reconcile()
    name = f"job-{job.pk}-1"
    assert [run for run in customer.backend.names() if run.startswith(f"job-{job.pk}-")] == [name]
    customer.backend.start(name, at=began)
    dispatch.reconcile()
    customer.backend.end(name, Outcome.COMPLETED, at=began + 400)
    for _sweep in range(2):
        dispatch.reconcile()


def assert_charged_once(customer: Customer, job: Job, *, minor: int = 20) -> None:
    job.refresh_from_db()
    assert job.state == JobState.SUCCEEDED
    assert Attempt.objects.filter(job=job, reason="completed").count() == 1
    assert Receipt.objects.get(hold__order__job=job).total_minor == minor
    assert Transaction.objects.filter(reference__contains=str(job.order.quote_id), kind="charge").count() == 1
    kinds = list(job.events.values_list("kind", flat=True))
    assert kinds.count("settled") == kinds.count("succeeded") == 1
    assert customer.wallet.held_minor == 0


def test_killed_before_any_line_of_a_start(customer):
    first = Lines()
    customer.job()
    assert first.run(dispatch.dispatch_queue)
    assert len(first.seen) > 40
    customer.backend.end(f"job-{Job.objects.latest('queued_at').pk}-1", Outcome.COMPLETED)
    dispatch.reconcile()
    for line in first.seen:
        job, began = customer.job(), time.time() - 500
        assert not Lines(line).run(dispatch.dispatch_queue), line
        settle(customer, job, began=began)
        assert_charged_once(customer, job)


def test_killed_before_any_line_of_an_end(customer):
    def ended() -> Attempt:
        began = time.time() - 500
        attempt = customer.started(at=began)
        customer.backend.end(attempt.run_name, Outcome.COMPLETED, at=began + 400)
        return attempt

    first, attempt = Lines(), ended()
    assert first.run(lambda: dispatch.follow(run_name=attempt.run_name))
    assert len(first.seen) > 80
    for line in first.seen:
        attempt = ended()
        assert not Lines(line).run(lambda name=attempt.run_name: dispatch.follow(run_name=name)), line
        receipts = Receipt.objects.filter(hold__order__job=attempt.job)
        assert (Job.objects.get(pk=attempt.job_id).state == JobState.SUCCEEDED) == receipts.exists()
        for _sweep in range(2):
            dispatch.reconcile()
        assert_charged_once(customer, attempt.job)


def test_killed_before_any_line_of_a_retry(customer):
    """Of an attempt that is tried again: it is one retry, however often the process died on the way to it."""

    def failed() -> Attempt:
        began = time.time() - 1000
        attempt = customer.started(at=began, retries=1, retry_backoff_seconds=0)
        customer.backend.end(attempt.run_name, Outcome.CODE_FAILED, at=began + 400)
        return attempt

    first, attempt = Lines(), failed()
    assert first.run(lambda: dispatch.follow(run_name=attempt.run_name))
    dispatch.reconcile()
    customer.backend.end(f"job-{attempt.job_id}-2", Outcome.COMPLETED)
    dispatch.reconcile()
    for line in first.seen:
        attempt = failed()
        assert not Lines(line).run(lambda name=attempt.run_name: dispatch.follow(run_name=name)), line
        for _sweep in range(2):
            dispatch.reconcile()
        job, again = attempt.job, f"job-{attempt.job_id}-2"
        assert job.attempts.count() == 2
        began = time.time() - 500
        customer.backend.start(again, at=began)
        dispatch.reconcile()
        customer.backend.end(again, Outcome.COMPLETED, at=began + 400)
        dispatch.reconcile()
        assert_charged_once(customer, job, minor=40)


@pytest.fixture
def lived(transactional_db: None, backend: Any, hints: Any) -> Customer:
    """A customer whose rows another process sees."""
    return Customer(backend)


STEPS = [
    ("jobs.lifecycle", "transition"), ("jobs.lifecycle", "note"), ("jobs.lifecycle", "_finish"),
    ("billing.charges", "settle"), ("billing.ledger", "post"), ("jobs.telemetry", "ingest_all"),
]  # fmt: skip


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step[1])
def test_a_process_that_is_gone_at_once_leaves_a_whole_or_nothing(lived, monkeypatch, step, after):
    """With no chance to roll back, close or clean up: the database hears of it from the broken connection alone."""
    began = time.time() - 500
    attempt = lived.started(at=began)
    lived.backend.end(attempt.run_name, Outcome.COMPLETED, at=began + 400)
    connections.close_all()
    child = os.fork()
    if not child:
        try:
            module, name = sys.modules[step[0]], step[1]
            real = getattr(module, name)
            monkeypatch.setattr(module, name, lambda *given, **named: (after and real(*given, **named), os._exit(9)))
            dispatch.follow(run_name=attempt.run_name)
        finally:
            os._exit(1)  # it was to be gone by now
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    connection.ensure_connection()
    receipts = Receipt.objects.filter(hold__order__job=attempt.job)
    assert (Job.objects.get(pk=attempt.job_id).state == JobState.SUCCEEDED) == receipts.exists()
    for _sweep in range(2):
        dispatch.reconcile()
    assert_charged_once(lived, attempt.job)
