"""Handing claimed attempts to a cluster, a few at once: an API server that is slow holds up a run, not all behind it.

Hides the threads. The one rule: they are handed over in the order in which they are taken, each once, and none is still
on its way when the block is left; who fails says so before more are taken.
"""

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
Had = TypeVar("Had")


def guarded(step: Callable[..., Had], job_pk: int, *arguments: object) -> Had | None:
    """What the step gives. One job's fault, whatever it is, must not keep the queue from the others."""
    try:
        return step(*arguments)
    except Exception:
        logger.exception("Job %s could not be started; the sweep goes on with it.", job_pk)
        return None


class Handover:
    """`hand` gives whether the cluster has the attempt. `at_once`: how many calls of it may go on."""

    def __init__(self, hand: Callable[[Attempt], bool], *, at_once: int) -> None:
        self._hand = hand
        self._at_once = at_once
        self._taken: queue.SimpleQueue[Attempt | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._open = 0
        self._failed = False
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Handover:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for _thread in self._threads:
            self._taken.put(None)
        for thread in self._threads:
            thread.join()

    def take(self, attempt: Attempt) -> bool:
        """Hand it over, as soon as one more may be. Gives False where one taken so far failed, once all are through."""
        if self._at_once == 1:
            return self._handed(attempt)
        with self._changed:
            self._changed.wait_for(lambda: self._open < self._at_once)
            self._open += 1
            busy = self._open
            failed = self._failed
        if busy > len(self._threads):
            # A new thread knows nothing of what its logs and spans are about, unless it is told.
            run = contextvars.copy_context().run
            self._threads.append(threading.Thread(target=run, args=(self._work,), name="handover", daemon=True))
            self._threads[-1].start()
        self._taken.put(attempt)
        return self.settle() if failed else True

    def settle(self) -> bool:
        """Wait until all are through. Gives whether all were taken well since it was asked last."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open)
            failed, self._failed = self._failed, False
        return not failed

    def _handed(self, attempt: Attempt) -> bool:
        return bool(guarded(self._hand, attempt.job_id, attempt))

    def _work(self) -> None:
        try:
            while (attempt := self._taken.get()) is not None:
                had = self._handed(attempt)
                with self._changed:
                    self._failed |= not had
                    self._open -= 1
                    self._changed.notify_all()
        finally:
            connections.close_all()
