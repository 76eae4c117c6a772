"""The ASGI application: the same URLs and views as WSGI serves, for event streams. See `console.live`.

The one rule: streams share a few threads. Django gives every ASGI request a thread of its own as soon as it runs a line
of synchronous code (any middleware), and keeps it, with its database connection, until the request ends: a stream would
keep both for hours. Here requests take turns on a fixed number of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Mapping
from itertools import cycle
from typing import Any

import django
from asgiref.sync import SyncToAsync, ThreadSensitiveContext
from django.core.handlers.asgi import ASGIHandler

from console.operations import logs

THREADS = 8
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]


class StreamHandler(ASGIHandler):
    """Django's handler, with `THREADS` threads for the synchronous code of all requests together."""

    def __init__(self) -> None:
        super().__init__()
        self._lanes = cycle([ThreadSensitiveContext() for _ in range(THREADS)])

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Handle one request on the next lane: a context to which asgiref keeps one thread."""
        lane = SyncToAsync.thread_sensitive_context.set(next(self._lanes))
        status, size, started = 499, 0, time.perf_counter()  # 499: the client left before there was an answer

        async def noting(message: Mapping[str, Any]) -> None:
            nonlocal status, size
            status = message.get("status", status)
            size += len(message.get("body", b""))
            await send(message)

        try:
            await self.handle(scope, receive, noting)
        finally:
            SyncToAsync.thread_sensitive_context.reset(lane)
            logs.access(
                method=scope["method"], path=scope["path"], status=status, seconds=time.perf_counter() - started,
                size=size, fields=scope.get(logs.BOUND) or {}, logger="console.live.access",
            )  # fmt: skip


os.environ.setdefault("DJANGO_SETTINGS_MODULE", "console.settings")
django.setup(set_prefix=False)

application = StreamHandler()
