"""Views that `test_serving` requests, and their URLs."""

import asyncio
import os
import resource
import threading

from django.db import connection
from django.http import HttpResponse, JsonResponse, StreamingHttpResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from rest_framework.request import Request

from console.api import server_error
from console.core.sse import Event, event_stream, query_in_thread
from console.monitoring import health
from console.observability import context
from console.serving import protocol
from storage.errors import TooManyUploads, UploadBroken
from storage.upload_stream import body_of

protocol.STALLED_SECONDS = 2.0

OPEN = set()
"""The open streams of this process."""
BROKEN = threading.Semaphore(0)
"""Counts the uploads that broke off."""


def page(request):
    return HttpResponse(f"page {os.getpid()}")


def stream(request):
    if "organization" in request.GET:
        # As authentication does. The server counts streams and uploads by it.
        context.add(organization=int(request.GET["organization"]))

    async def events():
        key = object()
        OPEN.add(key)
        try:
            yield Event("hello", {"pid": os.getpid(), "path": request.get_full_path()}, id="1")
            while True:
                thread = await query_in_thread(threading.current_thread)
                yield "tick", f"{thread.name}\nlines"  # an event without an id, whose data has two lines
                await asyncio.sleep(0.2)
        finally:
            OPEN.discard(key)

    return event_stream(events(), is_allowed=lambda: True, heartbeat_seconds=0.05)


def census(request):
    """Answer with the number of open streams, and the names of all threads."""
    return JsonResponse({"open": len(OPEN), "threads": sorted(thread.name for thread in threading.enumerate())})


def download(request):
    return StreamingHttpResponse((b"x" * 65536 for _ in range(64)), content_type="application/octet-stream")


def large(request):
    return HttpResponse(b"x" * 32 * 1024 * 1024)  # more than the kernel buffers for a client that does not read


def api_error(request):
    return JsonResponse({"code": "nothing"}, status=404)


@csrf_exempt
def form(request):
    return JsonResponse({"size": len(request.body)})


@csrf_exempt
def upload(request, name):
    """Refuse or read a body, as the name says; answer with its size and the process's peak memory."""
    if name == "refused":
        return JsonResponse({"code": "not_authenticated"}, status=401)
    if "organization" in request.GET:
        context.add(organization=int(request.GET["organization"]))
    try:
        body, size = body_of(Request(request), limit_bytes=10**9), 0
    except TooManyUploads as refused:
        return JsonResponse({"code": refused.code}, status=429)
    try:
        while piece := body.read(1024 * 1024):
            size += len(piece)
    except UploadBroken:
        BROKEN.release()
        raise
    return JsonResponse({"size": size, "peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss})


def broken(request):
    """Answer once an upload has broken off, and say whether one has."""
    return JsonResponse({"broken": BROKEN.acquire(timeout=20)})


def database(request):
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    return HttpResponse("connected")


urlpatterns = [
    path("healthz", health.live),
    path("page", page),
    path("stream", stream),
    path("census", census),
    path("download", download),
    path("large", large),
    path("error", api_error),
    path("form", form),
    path("broken", broken),
    path("database", database),
    path("api/v1/database", database),
    path("api/v1/workspaces/code/files/<str:name>", upload),
]
handler500 = server_error  # Django looks it up here
