"""A gate that holds threads, so that tests see several at work without waiting for time to pass."""

import threading

PATIENCE = 20.0
"""Seconds until a test that waits for an event gives up."""


class Gate:
    """Holds each thread that enters until the test releases it; `most` is how many it held at once."""

    def __init__(self):
        self.changed = threading.Condition()
        self.entered = []
        self.inside = self.most = 0
        self._passes = 0

    def hold(self, name):
        """Note the name, and wait until the test lets this thread go."""
        with self.changed:
            self.entered.append(name)
            self.inside += 1
            self.most = max(self.most, self.inside)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self._passes > 0, PATIENCE)
            self._passes -= 1
            self.inside -= 1
            self.changed.notify_all()

    def until(self, condition):
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE), self.entered

    def until_entered(self, count):
        """Wait until this many threads have entered; those that were released count too."""
        self.until(lambda: len(self.entered) == count)

    def release(self, count=1):
        """Let this many threads go, including those that enter later."""
        with self.changed:
            self._passes += count
            self.changed.notify_all()


def join(*threads):
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
