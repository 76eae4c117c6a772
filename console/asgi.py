"""The ASGI application: the same URLs and views as WSGI serves, for event streams. See `console.live`.

The one rule: streams share a few threads. Django gives every ASGI request a thread of its own as soon as it runs a line
of synchronous code (any middleware), and keeps it, with its database connection, until the request ends: a stream would
keep both for hours. Here requests take turns on a fixed number of them.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from itertools import cycle
from typing import Any

import django
from asgiref.sync import SyncToAsync, ThreadSensitiveContext
from django.core.handlers.asgi import ASGIHandler

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
        try:
            await self.handle(scope, receive, send)
        finally:
            SyncToAsync.thread_sensitive_context.reset(lane)


os.environ.setdefault("DJANGO_SETTINGS_MODULE", "console.settings")
django.setup(set_prefix=False)

application = StreamHandler()
