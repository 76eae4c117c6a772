"""The followers of clusters. A fake cluster changes only when its test says so."""

import threading
from types import SimpleNamespace

import pytest

from jobs import watcher
from jobs.models import Job, MetricPoint
from jobs.states import JobState
from jobs.watcher import ClusterFollower
from runtime.errors import BackendUnavailable
from runtime.specs import Outcome
from tests.jobs.gates import PATIENCE


@pytest.fixture
def watch(backend, monkeypatch):
    """`watch(*changes)` lets a follower see these changes, then two empty ones, as a quiet cluster sends."""
    monkeypatch.setattr(watcher, "READ_INTERVAL_SECONDS", 0.0)
    # The test needs its connection, which is in a transaction.
    monkeypatch.setattr(watcher, "close_old_connections", lambda: None)

    def follow(*changes):
        monkeypatch.setattr(backend, "changes", lambda: iter([*changes, set(), set()]))
        ClusterFollower("default", threading.Event()).follow_once()

    return follow


def test_output_and_end_of_a_run_reach_its_job(customer, backend, watch):
    attempt = customer.started()
    backend.write(attempt.run_name, "epoch 1/10 loss 0.5\n")
    watch({attempt.run_name})
    assert MetricPoint.objects.get().value == 0.5
    backend.end(attempt.run_name, Outcome.COMPLETED)
    watch({attempt.run_name})
    assert Job.objects.get().state == JobState.SUCCEEDED


def test_unknown_run_names_and_an_error_with_one_run_stop_no_other(customer, backend, watch, caplog, monkeypatch):
    attempt = customer.started(nodes=1)
    watch({"", "x", ".hidden", "job-1", "job-1-2-3", "job-x-1", "job-1-x", f"job-{attempt.job_id}-9", "bench-1-1"})
    assert not caplog.records
    assert Job.objects.get().state == JobState.RUNNING
    fine = customer.started(nodes=1)
    for each in (attempt, fine):
        backend.end(each.run_name, Outcome.COMPLETED)
    describe = backend.describe
    monkeypatch.setattr(backend, "describe", lambda name: 1 / 0 if name == attempt.run_name else describe(name))
    monkeypatch.setattr(watcher, "READ_INTERVAL_SECONDS", 60.0)  # so that the second change asks whether it has ended
    watch({attempt.run_name}, {attempt.run_name, fine.run_name})
    assert "could not be processed" in caplog.text
    assert Job.objects.get(pk=fine.job_id).state == JobState.SUCCEEDED


@pytest.mark.parametrize(("read_seconds", "interval_seconds"), [(2.0, 0.25), (0.0, 20.0)])
def test_a_run_that_writes_constantly_leaves_time_for_others_and_its_end_is_read_at_once(
    customer, backend, monkeypatch, read_seconds, interval_seconds
):
    attempt, describe, now, reads, looks = customer.started(), backend.describe, [1.0], [], []

    def spend(seconds, calls, name):
        now[0] += seconds
        calls.append(name)
        return describe(name)

    def changes():
        yield {attempt.run_name}  # a pause of 20 s follows
        for _tick in range(50):
            now[0] += 0.25
            yield {attempt.run_name}
        assert (len(reads), len(looks)) == (1, 3)  # after each half second of `describe` it is left alone for 5 s
        now[0] = 23.0
        yield {attempt.run_name}
        assert len(reads) == 2
        backend.end(attempt.run_name, Outcome.COMPLETED)
        yield {attempt.run_name}
        assert len(reads) == 3

    monkeypatch.setattr(ClusterFollower, "_read", lambda _self, name: spend(read_seconds, reads, name))
    monkeypatch.setattr(watcher, "READ_INTERVAL_SECONDS", interval_seconds)
    monkeypatch.setattr(backend, "describe", lambda name: spend(0.5, looks, name))
    monkeypatch.setattr(watcher, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(backend, "changes", changes)
    ClusterFollower("default", threading.Event()).follow_once()


class Changing:
    """A cluster whose `changes` is an error, or the result of a call."""

    def __init__(self, stream):
        self._stream = stream

    def isolation_gaps(self):
        return []

    def changes(self):
        if isinstance(self._stream, Exception):
            raise self._stream
        return self._stream()


def test_a_hung_or_unavailable_cluster_delays_no_other(monkeypatch, caplog):
    """Each is followed on its own thread, and a connection that broke is opened again."""
    release, stop, changed, reads = threading.Event(), threading.Event(), threading.Condition(), []

    def hang():
        release.wait(PATIENCE)
        yield set()

    # Each connection to west gets the next of these; the first two fail.
    west = iter([ZeroDivisionError("odd"), BackendUnavailable("closed"), lambda: iter([{"job-2-1"}])])
    backends = {
        "hung": Changing(hang),
        "away": Changing(BackendUnavailable("no route")),
        "east": Changing(lambda: iter([{"job-1-1"}])),
        "west": Changing(lambda: Changing(next(west, lambda: iter([set()]))).changes()),
    }
    monkeypatch.setattr(watcher, "cluster_names", lambda: list(backends))
    monkeypatch.setattr(watcher, "cluster", backends.__getitem__)
    monkeypatch.setattr(watcher, "RECONNECT_PAUSES", (0,))

    def read(self, name):
        with changed:
            reads.append((self.name, name))
            changed.notify_all()

    monkeypatch.setattr(ClusterFollower, "_read", read)
    thread = threading.Thread(target=watcher.follow_all, args=(stop,))
    thread.start()
    try:
        with changed:
            assert changed.wait_for(lambda: {("east", "job-1-1"), ("west", "job-2-1")} <= set(reads), PATIENCE), reads
    finally:
        stop.set()
        release.set()
        thread.join(PATIENCE)
    assert not thread.is_alive()
    assert {name for name, _run in reads} == {"east", "west"}
    for words in ("cluster away can't be followed: no route", "closed", "ZeroDivisionError"):
        assert words in caplog.text
