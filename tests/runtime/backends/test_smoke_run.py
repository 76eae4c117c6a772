"""The run of two nodes that a check starts: how its end is told, and that nothing of it is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime.backends import smoke_run
from runtime.backends.base import Check
from runtime.errors import BackendUnavailable
from runtime.specs import Outcome
from tests.fakes import FakeBackend


class Cluster(FakeBackend):
    """What `then` says happens to its run while somebody waits for a change."""

    then: Callable[[str], None]

    def changes(self, stop_after: float | None = None) -> Iterator[set[str]]:
        """A heartbeat before anything has happened, then the change."""
        del stop_after
        yield set()
        (name,) = self.names()
        self.then(name)
        yield {name}
        raise AssertionError("It has ended, and is waited for.")


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(root=tmp_path)


def look(cluster: Cluster) -> Check:
    return smoke_run.check(
        cluster, smoke_run.new_name(), "pytorch", workspace=Path("/w"), memory_mib=256, seconds=600.0
    )


def test_an_end_is_told_as_soon_as_it_changes(cluster: Cluster) -> None:
    def complete(name: str) -> None:
        cluster.start(name)
        cluster.end(name, Outcome.COMPLETED)

    cluster.then = complete
    line = look(cluster)
    assert line.ok
    assert "Two nodes met and finished" in line.detail
    assert cluster.names() == []


def test_a_failure_comes_with_the_last_words_of_rank_0(cluster: Cluster) -> None:
    def fail(name: str) -> None:
        cluster.start(name)
        cluster.write(name, "one\ntwo\nthree\nno route to node 1\n")
        cluster.end(name, Outcome.CODE_FAILED)

    cluster.then = fail
    line = look(cluster)
    assert not line.ok
    assert line.detail.startswith("It ended as code_failed: ")
    assert line.detail.endswith("two three no route to node 1")
    assert "rank 0" in line.remedy
    assert cluster.names() == []


def test_what_is_wrong_with_a_cluster_that_went_away_is_told_and_no_failure_to_clear_up(cluster: Cluster) -> None:
    def vanish(_name: str) -> None:
        cluster.available = False

    cluster.then = vanish
    with pytest.raises(BackendUnavailable) as told:
        look(cluster)
    assert told.value.__context__ is None


def test_a_run_that_does_not_end_is_taken_away(tmp_path: Path) -> None:
    fake = FakeBackend(root=tmp_path)
    line = smoke_run.check(fake, "check-1", "pytorch", workspace=Path("/w"), memory_mib=256, seconds=0.0)
    assert line.detail == "It did not end in 0 s. The nodes start."
    assert line.remedy
    assert fake.names() == []
