"""The threads that run views.

By default asgiref runs each request in a new thread with a new database connection. Here a fixed number of threads
serves all requests, and each thread keeps its connection. So many clients can exhaust neither threads nor connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import cycle

from asgiref.sync import ThreadSensitiveContext

from console.serving.refusals import BUSY, Refused

MAX_WAITING = 1000
"""Largest number of requests that wait for a thread. At 50 ms each and eight threads, the last waits six seconds."""
WAIT_SECONDS = 30.0
"""The longest wait for a thread; people do not wait longer for a page."""


class Threads:
    """A fixed number of threads. Each serves one request at a time."""

    def __init__(self, count: int, name: str) -> None:
        # Each executor has one thread: all synchronous calls of a view must use the same database connection.
        self._free = [ThreadPoolExecutor(1, thread_name_prefix=f"{name}-{number}") for number in range(count)]
        self._slots = asyncio.Semaphore(count)
        self._waiting = 0

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[None]:
        """Run the block's synchronous code on one thread, used by no other block. Raises Refused if none gets free."""
        if self._waiting >= MAX_WAITING:
            raise Refused(BUSY)
        self._waiting += 1
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._slots.acquire()
        except TimeoutError:
            raise Refused(BUSY) from None
        finally:
            self._waiting -= 1
        thread = self._free.pop()
        try:
            async with ThreadSensitiveContext(executor=thread):
                yield
        finally:
            self._free.append(thread)
            self._slots.release()


class SharedThreads:
    """A few threads for many streams. Each stream needs a thread only briefly, and always the same one."""

    def __init__(self, count: int, name: str) -> None:
        self._next = cycle([ThreadPoolExecutor(1, thread_name_prefix=f"{name}-{number}") for number in range(count)])

    def acquire(self) -> ThreadSensitiveContext:
        """Return a context whose synchronous code runs on one thread, which other streams also use."""
        return ThreadSensitiveContext(executor=next(self._next))
