import pytest

from tests.runtime.launcher.pods import Cluster


class Clock:
    """A fake of a monotonic clock."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def cluster(tmp_path):
    """The pods of one run."""
    created = Cluster(tmp_path)
    yield created
    created.close()
