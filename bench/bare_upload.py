"""The baseline of `bench.upload`: the smallest server that stores and sends a file, on the console's HTTP protocol.

It writes each part of a body as it arrives, and hashes and checks nothing. Like the console, it forces files to disk.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

CHUNK_BYTES = 1024**2


async def application(
    scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
) -> None:
    """Store the body of a PUT as the file that the path names, or send that file."""
    if scope["type"] != "http":
        await _handle_lifespan(receive, send)
        return
    path = Path(os.environ["BENCH_FOLDER"]) / scope["path"].rpartition("/")[2]
    if scope["method"] == "PUT":
        with path.open("wb") as file:
            is_complete = False
            while not is_complete:
                message = await receive()
                file.write(message.get("body", b""))
                is_complete = not message.get("more_body", False)
            file.flush()
            os.fsync(file.fileno())
        await send({"type": "http.response.start", "status": 201, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})
        return
    size = str(path.stat().st_size).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", size)]})
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body"})


async def _handle_lifespan(receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]) -> None:
    """Answer ASGI's messages about the start and the end of the server."""
    await receive()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await send({"type": "lifespan.shutdown.complete"})
