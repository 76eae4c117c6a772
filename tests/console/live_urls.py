"""A console of three addresses, for `test_live`."""

import asyncio
import os
from pathlib import Path

from django.http import HttpResponse, JsonResponse
from django.urls import path

from console.accounts.sse import Event, event_stream
from console.asgi import THREADS

OPEN = set()


def page(request):
    return HttpResponse(f"page {os.getpid()}")


def stream(request):
    async def events():
        key = object()
        OPEN.add(key)
        try:
            yield Event("hello", {"pid": os.getpid(), "path": request.get_full_path()}, id="1")
            while True:
                await asyncio.sleep(0.2)
                yield "tick", "two\nlines"
        finally:
            OPEN.discard(key)

    return event_stream(events(), heartbeat_seconds=0.05)


def census(request):
    async def events():
        yield "census", {"open": len(OPEN), "threads": len(list(Path("/proc/self/task").iterdir())), "lanes": THREADS}

    return event_stream(events())


def api_error(request):
    return JsonResponse({"code": "nothing"}, status=404)


urlpatterns = [path("page", page), path("stream", stream), path("census", census), path("error", api_error)]
