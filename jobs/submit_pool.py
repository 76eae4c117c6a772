"""Submit claimed attempts to a cluster, several at once, so that one slow API call does not delay all others."""

from __future__ import annotations

import contextvars
import logging
import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from django.db import connections

from jobs.models import Attempt

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


def call_and_log_errors(step: Callable[..., Result], job_pk: int, *arguments: object) -> Result | None:
    """Return the result of `step(*arguments)`; log any error and return None, so that one job never stops the queue."""
    try:
        return step(*arguments)
    except Exception:
        logger.exception("Job %s could not be started; the next reconciliation tries again.", job_pk)
        return None


class SubmitPool:
    """Up to `max_concurrent` threads that call `submit`, which returns False if the submission failed.

    Attempts are submitted in the order in which they were added, each once. The end of the `with` block waits for all
    of them. If `max_concurrent` is 1 there are no threads: `add` submits the attempt itself.
    """

    def __init__(self, submit: Callable[[Attempt], bool], *, max_concurrent: int) -> None:
        self._submit = submit
        self._max_concurrent = max_concurrent
        self._queue: queue.SimpleQueue[Attempt | None] = queue.SimpleQueue()
        self._condition = threading.Condition()  # guards the two attributes below
        self._pending = 0
        self._has_failed = False
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> SubmitPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _thread in self._threads:
            self._queue.put(None)  # ends one thread
        for thread in self._threads:
            thread.join()

    def add(self, attempt: Attempt) -> bool:
        """Submit the attempt as soon as a thread is free. Return False if an attempt is known to have failed.

        With threads, True only means that no failure is known yet: this attempt may still be pending. After an earlier
        failure, also wait until nothing is pending, because the caller then reads the capacity again.
        """
        if self._max_concurrent == 1:
            return self._try_submit(attempt)
        with self._condition:
            self._condition.wait_for(lambda: self._pending < self._max_concurrent)
            self._pending += 1
            pending, has_failed = self._pending, self._has_failed
        if pending > len(self._threads):
            # A new thread has an empty context. Logs and spans of the submissions need the context of this thread.
            run = contextvars.copy_context().run
            self._threads.append(threading.Thread(target=run, args=(self._run_thread,), name="submit", daemon=True))
            self._threads[-1].start()
        self._queue.put(attempt)
        return self.drain() if has_failed else True

    def drain(self) -> bool:
        """Wait until nothing is pending. Return whether no submission has failed since the last drain."""
        with self._condition:
            self._condition.wait_for(lambda: not self._pending)
            has_failed, self._has_failed = self._has_failed, False
        return not has_failed

    def _try_submit(self, attempt: Attempt) -> bool:
        return bool(call_and_log_errors(self._submit, attempt.job_id, attempt))

    def _run_thread(self) -> None:
        """Submit attempts from the queue until it yields None."""
        try:
            while (attempt := self._queue.get()) is not None:
                is_submitted = self._try_submit(attempt)
                with self._condition:
                    self._has_failed |= not is_submitted
                    self._pending -= 1
                    self._condition.notify_all()
        finally:
            connections.close_all()  # those of this thread, which ends
