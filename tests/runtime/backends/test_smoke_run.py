"""The run of two nodes that a check starts: how its end is reported, and that nothing is left of it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.backends import smoke_run
from runtime.errors import BackendUnavailable
from runtime.specs import Outcome
from tests.fakes import FakeBackend


class Cluster(FakeBackend):
    """Calls `then` with its run while the check waits for a change."""

    then: Callable[[str], None]

    def changes(self, stop_after_seconds=None):
        """A heartbeat before anything has happened, then the change."""
        del stop_after_seconds
        yield set()
        (name,) = self.names()
        self.then(name)
        yield {name}
        raise AssertionError("The run has ended, and the check still waits.")


@pytest.fixture
def cluster(tmp_path):
    return Cluster(root=tmp_path)


def report_line(cluster):
    """Return the line of the report about the smoke run."""
    return smoke_run.check(
        cluster, smoke_run.new_name(), "pytorch", workspace=Path("/w"), memory_mib=256, seconds=600.0
    )


def test_a_failure_comes_with_the_last_lines_of_rank_0(cluster):
    def fail(name):
        cluster.start(name)
        cluster.write(name, "one\ntwo\nthree\nno route to node 1\n")
        cluster.end(name, Outcome.CODE_FAILED)

    cluster.then = fail
    line = report_line(cluster)
    assert not line.ok
    assert line.detail.startswith("It ended as code_failed: ")
    assert line.detail.endswith("two three no route to node 1")
    assert "rank 0" in line.remedy
    assert cluster.names() == []


def test_an_unavailable_cluster_is_reported_without_an_error_of_the_cleanup(cluster):
    def vanish(_name):
        cluster.available = False

    cluster.then = vanish
    with pytest.raises(BackendUnavailable) as caught:
        report_line(cluster)
    assert caught.value.__context__ is None


def test_a_run_that_does_not_end_is_deleted(tmp_path):
    fake = FakeBackend(root=tmp_path)
    line = smoke_run.check(fake, "check-1", "pytorch", workspace=Path("/w"), memory_mib=256, seconds=0.0)
    assert line.detail == "It did not end in 0 s. The nodes start."
    assert line.remedy
    assert fake.names() == []
