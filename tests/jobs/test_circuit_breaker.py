"""The circuit breaker: an unavailable cluster is not called for a while, by any process."""

from unittest.mock import Mock

import pytest
import redis
from django.core.cache import cache

from jobs import circuit_breaker
from jobs.circuit_breaker import circuit_is_open, with_circuit_breaker
from runtime.errors import BackendUnavailable, RunNotFound, RunUnreadable
from tests.caching import clear_cache
from tests.fakes import FakeBackend

pytestmark = pytest.mark.usefixtures("embedded")  # all processes share the circuit breaker's state in Redis


@pytest.fixture(autouse=True)
def _cleared_cache():
    yield
    clear_cache()


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A cluster that records the calls of `names` in `calls`."""
    backend = FakeBackend(root=tmp_path)
    backend.calls = []
    names = backend.names
    monkeypatch.setattr(backend, "names", lambda **options: (backend.calls.append(options), names(**options))[1])
    return backend


def test_answers_and_errors_pass_through(fake, tmp_path, monkeypatch):
    west = with_circuit_breaker("west", fake)
    assert west.names(live=True) == []
    assert west.run_folder("job-1-1") == tmp_path / "job-1-1"
    with pytest.raises(RunNotFound):
        west.describe("job-1-1")
    monkeypatch.setattr(fake, "describe", Mock(side_effect=RunUnreadable))
    with pytest.raises(RunUnreadable):
        west.describe("job-1-1")
    assert not circuit_is_open("west")
    monkeypatch.setattr("jobs.circuit_breaker.SLOW_SECONDS", -1)  # the storage hangs
    with pytest.raises(RunUnreadable):
        west.describe("job-1-1")
    assert circuit_is_open("west")


def test_an_unavailable_cluster_is_called_by_no_process(fake):
    fake.available = False
    with pytest.raises(BackendUnavailable, match="away"):
        with_circuit_breaker("west", fake).names()
    assert circuit_is_open("west")
    for _ in range(3):
        with pytest.raises(BackendUnavailable, match="The fake cluster is away"):
            with_circuit_breaker("west", fake).names()  # a new object, as another process has
    assert len(fake.calls) == 1
    assert not circuit_is_open("east")


def test_the_pause_grows_until_the_cluster_answers(fake, monkeypatch):
    west = with_circuit_breaker("west", fake)
    fake.available = False
    pauses = []
    # Note each pause, and let it last until the test ends it.
    monkeypatch.setattr(
        circuit_breaker.cache, "add", lambda key, value, pause: pauses.append(pause) or cache.set(key, value) or True
    )
    for _ in range(len(circuit_breaker.PAUSES) + 1):
        with pytest.raises(BackendUnavailable, match="away"):
            west.names()
        cache.delete("cluster-open:west")  # the pause is over
    assert pauses == [*circuit_breaker.PAUSES, circuit_breaker.PAUSES[-1]]
    fake.available = True
    assert west.names() == []
    fake.available = False
    with pytest.raises(BackendUnavailable, match="away"):
        west.names()
    assert cache.get("cluster-failures:west") == 1, "the answer in between ended the earlier row of failures"


def test_calls_that_fail_together_count_once(fake, monkeypatch):
    west = with_circuit_breaker("west", fake)

    def names():
        monkeypatch.setattr(fake, "available", False)
        monkeypatch.setattr(fake, "names", fake.capacity)
        with pytest.raises(BackendUnavailable):
            west.names()  # another call, which fails while this one is under way
        return fake.capacity()

    monkeypatch.setattr(fake, "names", names)
    with pytest.raises(BackendUnavailable):
        west.names()
    assert cache.get("cluster-failures:west") == 1


def test_a_pause_ends_only_when_the_cluster_answers(fake):
    west = with_circuit_breaker("west", fake)
    fake.available = False
    with pytest.raises(BackendUnavailable):
        west.names()
    circuit_breaker.close_if_reachable("west", west)
    assert circuit_is_open("west")
    fake.available = True
    circuit_breaker.close_if_reachable("west", west)
    assert west.names() == []


def test_a_slow_answer_is_returned_and_opens_the_circuit(fake, monkeypatch):
    monkeypatch.setattr(circuit_breaker, "SLOW_SECONDS", -1.0)  # every answer is slow
    west = with_circuit_breaker("west", fake)
    assert west.names() == []
    circuit_breaker.close_if_reachable("west", west)
    assert circuit_is_open("west"), "an answer that is too slow closes no circuit"


def test_without_a_cache_every_call_is_made(fake, monkeypatch):
    def away(*_arguments):
        raise redis.ConnectionError

    for name in ("get", "set", "add", "delete"):
        monkeypatch.setattr(circuit_breaker.cache, name, away)
    west = with_circuit_breaker("west", fake)
    fake.available = False
    for _ in range(2):
        with pytest.raises(BackendUnavailable, match="away"):
            west.names()
    fake.available = True
    assert west.names() == []
    assert len(fake.calls) == 3
