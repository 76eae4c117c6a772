"""Limit how many requests, connections or streams of one client are in progress at once.

Each process counts its own, in memory, so an installation allows WEB_PROCESSES times a limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from console.serving.refusals import Refusal, Refused


class Limit:
    """At most `maximum` uses at once under each key, such as an address or an organization.

    It is not thread-safe: use it on the event loop only.
    """

    def __init__(self, maximum: int, refusal: Refusal) -> None:
        self._maximum, self._refusal = maximum, refusal
        self._uses: Counter[Hashable] = Counter()

    @property
    def total(self) -> int:
        """Return how many uses are counted under all keys together."""
        return self._uses.total()

    def acquire(self, key: Hashable) -> bool:
        """Count one more use under `key` and return True. At the limit, count nothing and return False."""
        if self._uses[key] >= self._maximum:
            return False
        self._uses[key] += 1
        return True

    def release(self, key: Hashable) -> None:
        """Count one use less under `key`."""
        self._uses[key] -= 1
        if not self._uses[key]:  # zeros of all past clients would fill the memory
            del self._uses[key]

    @contextmanager
    def slot(self, key: Hashable) -> Iterator[None]:
        """Count one use under `key` during the block. Raises Refused at the limit."""
        if not self.acquire(key):
            raise Refused(self._refusal)
        try:
            yield
        finally:
            self.release(key)
