"""The threads that run views.

By default asgiref runs each request in a new thread with a new database connection. Here a fixed number of threads
serves all requests, and each thread keeps its connection. Therefore no number of clients can use up the connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from itertools import cycle
from typing import ParamSpec, TypeVar

from asgiref.sync import ThreadSensitiveContext

from console.serving.refusals import BUSY, Refused

P = ParamSpec("P")
T = TypeVar("T")

MAX_WAITING = 1000
"""How many requests may wait for a thread. A request takes about 20 ms of CPU time, so the last waits twenty seconds,
which is within WAIT_SECONDS."""
WAIT_SECONDS = 30.0
"""How long a request waits for a thread before it is refused. People do not wait longer for a page."""


class Threads:
    """A fixed number of threads, each of which serves one request at a time. Use it on the event loop only."""

    def __init__(self, count: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(count, thread_name_prefix=name)
        self._free = asyncio.Semaphore(count)
        self._waiting = 0

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of a function that runs in one of the threads. Raises Refused if no thread gets free."""
        if self._waiting >= MAX_WAITING:
            raise Refused(BUSY)
        self._waiting += 1
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._free.acquire()
        except TimeoutError:
            raise Refused(BUSY) from None
        finally:
            self._waiting -= 1
        try:
            # A copy of the context, so that one request's language, time zone or log fields never reach the next.
            run = copy_context().run
            return await asyncio.get_running_loop().run_in_executor(
                self._threads, lambda: run(function, *args, **kwargs)
            )
        finally:
            self._free.release()


class SharedThreads:
    """A few threads for many streams. A stream stays on one thread, because each thread has its own connection."""

    def __init__(self, count: int, name: str) -> None:
        self._next = cycle([ThreadPoolExecutor(1, thread_name_prefix=f"{name}-{number}") for number in range(count)])

    def assign(self) -> ThreadSensitiveContext:
        """Return a context in which synchronous code runs on one of the threads, which are assigned in turn."""
        return ThreadSensitiveContext(executor=next(self._next))
