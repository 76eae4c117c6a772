import pytest
import redis
from django.core.cache import cache

from jobs import circuit
from jobs.circuit import circuit_is_open, guarded
from runtime.errors import BackendUnavailable, RunNotFound
from tests.fakes import FakeBackend

pytestmark = pytest.mark.usefixtures("embedded")


@pytest.fixture(autouse=True)
def _own_cache():
    yield
    cache.clear()


@pytest.fixture
def fake(tmp_path):
    made = FakeBackend(root=tmp_path)
    made.asked = 0
    names = made.names

    def counted(**options):
        made.asked += 1
        return names(**options)

    made.names = counted
    return made


def test_what_is_answered_passes_through(fake, tmp_path):
    west = guarded("west", fake)
    assert west.names(live=True) == []
    assert west.run_folder("job-1-1") == tmp_path / "job-1-1"
    with pytest.raises(RunNotFound):
        west.describe("job-1-1")
    assert not circuit_is_open("west")


def test_one_that_does_not_answer_is_left_alone_by_everybody(fake):
    fake.available = False
    with pytest.raises(BackendUnavailable, match="away"):
        guarded("west", fake).names()
    assert circuit_is_open("west")
    for _ in range(3):
        with pytest.raises(BackendUnavailable, match="The fake cluster is away"):
            guarded("west", fake).names()  # another process would have another object
    assert fake.asked == 1
    assert not circuit_is_open("east")


def test_it_is_asked_again_after_a_pause_that_grows_and_then_all_is_well(fake, monkeypatch):
    west = guarded("west", fake)
    fake.available = False
    paused = []
    monkeypatch.setattr(circuit.cache, "add", lambda key, value, pause: paused.append(pause) or cache.set(key, value))
    for _ in range(len(circuit.PAUSES) + 1):
        with pytest.raises(BackendUnavailable, match="away"):
            west.names()
        assert circuit_is_open("west")
        cache.delete("cluster-open:west")  # the pause is over
    assert paused == [*circuit.PAUSES, circuit.PAUSES[-1]]
    fake.available = True
    assert west.names() == []
    fake.available = False
    with pytest.raises(BackendUnavailable, match="away"):
        west.names()
    assert cache.get("cluster-failures:west") == 1


def test_a_slow_answer_is_an_answer_and_opens_it(fake, monkeypatch):
    monkeypatch.setattr(circuit, "SLOW_SECONDS", -1.0)
    assert guarded("west", fake).names() == []
    assert circuit_is_open("west")


def test_without_a_cache_every_call_is_made(fake, monkeypatch):
    def away(*_arguments):
        raise redis.ConnectionError

    for name in ("get", "set", "add", "delete"):
        monkeypatch.setattr(circuit.cache, name, away)
    west = guarded("west", fake)
    fake.available = False
    for _ in range(2):
        with pytest.raises(BackendUnavailable, match="away"):
            west.names()
    fake.available = True
    assert west.names() == []
    assert fake.asked == 3
