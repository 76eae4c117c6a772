"""Limits on concurrent uses by each client. Each process counts its own requests, in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from console.serving.refusals import Refusal, Refused


class Limit:
    """At most `maximum` concurrent uses under each key, such as an address or an organization. Not thread-safe."""

    def __init__(self, maximum: int, refusal: Refusal) -> None:
        self._maximum, self._refusal = maximum, refusal
        self._uses: Counter[Hashable] = Counter()

    @property
    def total(self) -> int:
        """Return the uses under all keys."""
        return self._uses.total()

    def acquire(self, key: Hashable) -> bool:
        """Add a use. Return False, and add none, at the limit."""
        if self._uses[key] >= self._maximum:
            return False
        self._uses[key] += 1
        return True

    def release(self, key: Hashable) -> None:
        """End a use."""
        self._uses[key] -= 1
        if not self._uses[key]:  # a key per past client would fill memory
            del self._uses[key]

    @contextmanager
    def held(self, key: Hashable) -> Iterator[None]:
        """Add a use for the block. Raises Refused at the limit."""
        if not self.acquire(key):
            raise Refused(self._refusal)
        try:
            yield
        finally:
            self.release(key)
