"""Following clusters. The fake ones do nothing by themselves: each test says what changes."""

import threading

import redis

from jobs import bell, dispatch, watching
from jobs.models import Job, MetricPoint
from jobs.states import JobState
from jobs.watching import Follower, Starter
from runtime.errors import BackendUnavailable
from runtime.specs import Outcome

PATIENCE = 20.0
"""Seconds until a test that waits for an event gives up."""


class TestOneCluster:
    def watch(self, backend, monkeypatch, *changes):
        """Let a follower see these changes, then a few heartbeats."""
        monkeypatch.setattr(watching, "READ_EVERY_SECONDS", 0.0)
        monkeypatch.setattr(watching, "close_old_connections", lambda: None)  # it is the test's own, in a transaction
        monkeypatch.setattr(backend, "changes", lambda: iter([*changes, set(), set()]))
        Follower("default", threading.Event()).follow_once()

    def test_what_a_run_wrote_and_how_it_ended_reach_its_job(self, customer, backend, monkeypatch):
        attempt = customer.started()
        backend.write(attempt.run_name, "epoch 1/10 loss 0.5\n")
        self.watch(backend, monkeypatch, {attempt.run_name})
        assert MetricPoint.objects.get().value == 0.5
        backend.end(attempt.run_name, Outcome.COMPLETED)
        self.watch(backend, monkeypatch, {attempt.run_name})
        assert Job.objects.get().state == JobState.SUCCEEDED

    def test_names_that_are_no_attempts_are_nothing(self, customer, backend, monkeypatch, caplog):
        attempt = customer.started()
        names = {"", "x", ".hidden", "job-1", "job-1-2-3", "job-x-1", "job-1-x", f"job-{attempt.job_id}-9", "bench-1-1"}
        self.watch(backend, monkeypatch, names)
        assert not caplog.records
        assert Job.objects.get().state == JobState.RUNNING

    def test_a_fault_of_one_run_is_logged_and_the_others_go_on(self, customer, backend, monkeypatch, caplog):
        broken, fine = customer.started(nodes=1), customer.started(nodes=1)
        for attempt in (broken, fine):
            backend.end(attempt.run_name, Outcome.COMPLETED)
        describe = backend.describe

        def fail(name):
            if name == broken.run_name:
                raise ZeroDivisionError
            return describe(name)

        monkeypatch.setattr(backend, "describe", fail)
        self.watch(backend, monkeypatch, {broken.run_name}, {fine.run_name})
        assert "could not be taken in" in caplog.text
        assert Job.objects.get(pk=fine.job_id).state == JobState.SUCCEEDED

    def test_a_run_that_writes_without_pause_is_not_read_at_each_write(self, customer, backend, monkeypatch):
        attempt = customer.started()
        looks = []
        monkeypatch.setattr(Follower, "_look", lambda _self, name: looks.append(name))
        monkeypatch.setattr(watching, "READ_EVERY_SECONDS", 60.0)
        monkeypatch.setattr(backend, "changes", lambda: iter([{attempt.run_name}] * 50))
        Follower("default", threading.Event()).follow_once()
        assert looks == [attempt.run_name]

    def test_its_end_is_taken_in_at_once(self, customer, backend, monkeypatch):
        attempt = customer.started()
        looks = []

        def changes():
            yield {attempt.run_name}
            backend.end(attempt.run_name, Outcome.COMPLETED)
            yield {attempt.run_name}

        monkeypatch.setattr(Follower, "_look", lambda _self, name: looks.append(name))
        monkeypatch.setattr(watching, "READ_EVERY_SECONDS", 60.0)
        monkeypatch.setattr(backend, "changes", changes)
        Follower("default", threading.Event()).follow_once()
        assert looks == [attempt.run_name] * 2


class TestSeveralClusters:
    """On threads: no database is touched, what is looked at is noted."""

    def follow(self, monkeypatch, looks, wanted, **backends):
        """Follow clusters that are each a list of streams; gives what was looked at until `wanted` was."""
        stop, seen = threading.Event(), threading.Condition()
        monkeypatch.setattr(watching, "cluster_names", lambda: list(backends))
        monkeypatch.setattr(watching, "cluster", backends.__getitem__)
        monkeypatch.setattr(watching, "PAUSES", (0,))

        def look(self, name):
            with seen:
                looks.append((self.name, name))
                seen.notify_all()

        monkeypatch.setattr(Follower, "_look", look)
        monkeypatch.setattr(Starter, "work", lambda _self: None)
        thread = threading.Thread(target=watching.follow_all, args=(stop,))
        thread.start()
        try:
            with seen:
                assert seen.wait_for(lambda: wanted <= set(looks), PATIENCE), looks
        finally:
            stop.set()
            thread.join(PATIENCE)
        assert not thread.is_alive()

    def test_one_that_hangs_or_is_away_holds_up_no_other(self, monkeypatch, caplog):
        release = threading.Event()

        def hangs():
            release.wait(PATIENCE)
            yield set()

        looks = []
        try:
            self.follow(
                monkeypatch,
                looks,
                {("east", "job-1-1")},
                hung=Changing(hangs),
                away=Changing(BackendUnavailable("no route")),
                east=Changing(lambda: iter([{"job-1-1"}])),
            )
        finally:
            release.set()
        assert {name for name, _run in looks} == {"east"}
        assert "cluster away can't be followed: no route" in caplog.text

    def test_one_that_breaks_off_is_followed_again(self, monkeypatch, caplog):
        streams = iter([ZeroDivisionError("odd"), BackendUnavailable("gone"), lambda: iter([{"job-2-1"}])])
        looks = []
        self.follow(monkeypatch, looks, {("west", "job-2-1")}, west=Changing(lambda: following(next(streams, None))))
        assert ("west", "job-2-1") in looks
        assert "gone" in caplog.text
        assert "ZeroDivisionError" in caplog.text

    def test_the_pause_grows_with_each_failure_in_a_row(self, monkeypatch):
        pauses = []

        class Stop(threading.Event):
            def wait(self, timeout=None):
                pauses.append(timeout)
                if len(pauses) == 7:
                    self.set()
                return self.is_set()

        monkeypatch.setattr(watching, "cluster", lambda _name: Changing(BackendUnavailable("away")))
        Follower("west", Stop()).follow()
        assert pauses == [1, 2, 5, 10, 30, 30, 30]


def following(stream):
    """What a cluster's `changes` gives: the next of some streams, then heartbeats."""
    if isinstance(stream, Exception):
        raise stream
    return stream() if stream else iter([set()])


class Changing:
    """A cluster of which only the changes matter."""

    def __init__(self, stream):
        self._stream = stream

    def isolation_gaps(self):
        return []

    def changes(self):
        return following(self._stream)


class TestWhatWaits:
    """On a thread, with the real Redis: passes over the queue are counted, and no database is touched."""

    def starter(self, monkeypatch, passes):
        """A starter of this test's own queue, whose passes do what `passes` says, at work on a thread."""
        stop, begun = threading.Event(), threading.Semaphore(0)
        coming = iter(passes)

        def one_pass(name):
            begun.release()
            next(coming)(name)

        monkeypatch.setattr(dispatch, "dispatch_queue", one_pass)
        monkeypatch.setattr(watching, "HEARTBEAT_SECONDS", 0.05)
        monkeypatch.setattr(watching, "PAUSES", (0.05,))
        thread = threading.Thread(target=Starter("default", stop).work)
        thread.start()

        def end():
            stop.set()
            thread.join(PATIENCE)
            assert not thread.is_alive()
            assert not begun.acquire(blocking=False), "a pass that nobody rang for"

        return lambda: begun.acquire(timeout=PATIENCE), end

    def test_what_rang_before_it_listened_is_not_missed_and_each_ring_is_a_pass(self, embedded, monkeypatch):
        a_pass, end = self.starter(monkeypatch, [lambda _name: None] * 3)
        assert a_pass()
        for _ in range(2):
            assert bell.ring_queue("default")
            assert a_pass()
        assert not bell.ring_queue("another")
        end()

    def test_all_that_ring_during_a_pass_are_one_more(self, embedded, monkeypatch):
        def many_ring(name):
            assert all(bell.ring_queue(name) for _ in range(20))

        a_pass, end = self.starter(monkeypatch, [many_ring, lambda _name: None])
        assert a_pass()
        assert a_pass()
        end()

    def test_a_pass_that_fails_is_logged_and_the_next_ring_is_heard(self, embedded, monkeypatch, caplog):
        a_pass, end = self.starter(monkeypatch, [lambda _name: 1 / 0, lambda _name: None])
        assert a_pass()
        assert bell.ring_queue("default")
        assert a_pass()
        end()
        assert "could not be started; the sweep tries again" in caplog.text

    def test_redis_away_and_what_nobody_foresaw_are_waited_for(self, embedded, monkeypatch, caplog):
        times = iter([redis.ConnectionError("gone"), OSError("away"), ZeroDivisionError("odd")])
        work_once = Starter.work_once

        def away_first(self):
            if fault := next(times, None):
                raise fault
            work_once(self)

        monkeypatch.setattr(Starter, "work_once", away_first)
        a_pass, end = self.starter(monkeypatch, [lambda _name: None])
        assert a_pass()
        end()
        assert "Nobody hears of the queue of default: gone" in caplog.text
        assert "ZeroDivisionError" in caplog.text
