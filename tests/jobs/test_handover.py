"""Attempts handed to a cluster a few at once: who is on the way is counted, nothing is timed."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connection

from jobs import dispatch
from jobs.handover import Handover
from jobs.models import Attempt, Job
from jobs.states import JobState
from runtime.errors import BackendUnavailable, NoCapacity
from tests.factories.jobs import Customer
from tests.fakes import FakeBackend

PATIENCE = 20.0
"""Seconds until a test that waits for an event gives up."""


class Server:
    """Takes attempts as they come, and lets them go when it is told to; `most` is how many were in it at once."""

    def __init__(self, *, refuses: Any = ()) -> None:
        self.refuses = set(refuses)
        self.changed = threading.Condition()
        self.begun: list[Any] = []
        self.inside = self.most = 0
        self.passes = 0

    def hand(self, attempt: Any) -> bool:
        with self.changed:
            self.begun.append(attempt.job_id)
            self.inside += 1
            self.most = max(self.most, self.inside)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.passes > 0, PATIENCE)
            self.passes -= 1
            self.inside -= 1
            self.changed.notify_all()
        if attempt.job_id in self.refuses:
            raise ZeroDivisionError
        return True

    def until(self, begun: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.begun) == begun, PATIENCE), self.begun

    def let_go(self, count: int = 1) -> None:
        with self.changed:
            self.passes += count
            self.changed.notify_all()


def attempt(number: int) -> Any:
    return SimpleNamespace(job_id=number)


def taking(server: Server, count: int, *, at_once: int) -> tuple[threading.Thread, list[bool]]:
    """Take so many on a thread; gives what each gave."""
    told: list[bool] = []

    def work() -> None:
        with Handover(server.hand, at_once=at_once) as handover:
            told.extend(handover.take(attempt(number)) for number in range(count))
            told.append(handover.settle())

    thread = threading.Thread(target=work)
    thread.start()
    return thread, told


def test_so_many_go_on_at_once_and_no_more_in_their_order() -> None:
    server = Server()
    thread, told = taking(server, 10, at_once=3)
    server.until(3)
    for begun in range(4, 11):
        server.let_go()
        server.until(begun)
    server.let_go(3)
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert server.most == 3
    assert sorted(server.begun) == list(range(10)), "each once"
    # Those that wait for a place begin in the order in which they were taken.
    assert server.begun[3:] == list(range(3, 10))
    assert told == [True] * 11


def test_a_slow_one_holds_up_itself_alone() -> None:
    first = threading.Event()
    done = []

    def hand(one: Any) -> bool:
        if one.job_id == 0:
            assert first.wait(PATIENCE)
        done.append(one.job_id)
        if len(done) == 9:
            first.set()
        return True

    with Handover(hand, at_once=2) as handover:
        assert all(handover.take(attempt(number)) for number in range(10))
    assert done == [*range(1, 10), 0]


def test_who_fails_is_told_before_more_are_taken_once_all_are_through() -> None:
    server = Server(refuses={1})
    thread, told = taking(server, 4, at_once=2)
    server.until(2)
    server.let_go(2)
    server.until(3)
    server.let_go(2)
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert told.count(False) == 1
    assert told[:2] == [True, True]
    assert server.inside == 0


def test_one_at_a_time_has_no_threads() -> None:
    threads = []

    def hand(one: Any) -> bool:
        threads.append(threading.current_thread())
        return one.job_id != 1

    with Handover(hand, at_once=1) as handover:
        assert [handover.take(attempt(number)) for number in range(3)] == [True, False, True]
    assert set(threads) == {threading.current_thread()}


@pytest.mark.django_db(transaction=True)
class TestOnACluster:
    """Real rows, each thread with a connection of its own."""

    def slow(self, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
        submit = backend.submit

        def slowly(spec: Any) -> None:
            server.hand(SimpleNamespace(job_id=spec.name))
            submit(spec)

        monkeypatch.setattr(backend, "submit", slowly)
        monkeypatch.setattr(backend, "submits_at_once", 4)

    def test_a_slow_server_is_handed_several_runs_at_once_each_of_them_once(
        self, customer: Customer, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        customer.quota(max_running_nodes=100)
        jobs = [customer.job(nodes=1) for _ in range(6)]
        server = Server()
        self.slow(backend, monkeypatch, server)
        thread = threading.Thread(target=lambda: (dispatch.dispatch_queue(), connection.close()))
        thread.start()
        server.until(4)
        assert Job.objects.filter(state=JobState.STARTING).count() <= 5, "who is next in the queue, and no more"
        server.let_go(6)
        thread.join(PATIENCE)
        assert not thread.is_alive()
        assert server.most == 4
        assert sorted(server.begun) == sorted(f"job-{job.pk}-1" for job in jobs)
        assert Attempt.objects.exclude(submitted_at=None).count() == 6

    def test_a_server_that_goes_away_is_asked_for_no_more(
        self, customer: Customer, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        customer.quota(max_running_nodes=100)
        for _ in range(8):
            customer.job(nodes=1)
        asked = []

        def away(spec: Any) -> None:
            asked.append(spec.name)
            backend.available = False
            raise BackendUnavailable("It did not answer.")

        monkeypatch.setattr(backend, "submit", away)
        monkeypatch.setattr(backend, "submits_at_once", 2)
        dispatch.dispatch_queue()
        assert len(asked) < 8
        assert Job.objects.filter(state=JobState.QUEUED).count() == 8 - len(asked)

    def test_what_found_no_room_waits_again(
        self, customer: Customer, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        customer.quota(max_running_nodes=100)
        jobs = [customer.job(nodes=1) for _ in range(3)]
        backend.refuses[f"job-{jobs[1].pk}-1"] = NoCapacity("somebody was first")
        monkeypatch.setattr(backend, "submits_at_once", 4)
        dispatch.dispatch_queue()
        states = [Job.objects.get(pk=job.pk).state for job in jobs]
        assert states == [JobState.STARTING, JobState.QUEUED, JobState.STARTING]
