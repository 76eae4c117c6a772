"""A fake clock for the tests of the launcher."""

import pytest


class Clock:
    """A fake of a monotonic clock. A test moves it by changing `now`."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()
