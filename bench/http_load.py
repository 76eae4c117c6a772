"""Many clients of one HTTP server. They must use little CPU time, since they share the cores with the measured server.

Each client has one connection. It sends a request after it has read the response to the previous one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle

RESPONSE_SECONDS = 60.0
"""A response that takes longer counts as failed."""


@dataclass
class Responses:
    """The responses to all clients. `seconds` has the response time of each response with status 200.

    `failed` counts clients: each ends at its first failure, without another request.
    """

    seconds: list[float] = field(default_factory=list)
    body_bytes: int = 0
    failed: int = 0


def run(
    *, port: int, paths: Sequence[str], cookie: str, clients: int, seconds: float, interval_seconds: float
) -> Responses:
    """Request `paths` in turn from the server on this machine, for `seconds` seconds.

    `interval_seconds` is the time between two requests of a client; 0: the next follows the response at once.
    """
    headers = f"Host: 127.0.0.1:{port}\r\nCookie: {cookie}\r\nAccept: text/html\r\n\r\n"
    requests = [f"GET {path} HTTP/1.1\r\n{headers}".encode() for path in paths]
    return asyncio.run(_run_clients(port, requests, clients, seconds, interval_seconds))


async def _run_clients(
    port: int, requests: list[bytes], clients: int, seconds: float, interval_seconds: float
) -> Responses:
    responses = Responses()
    ends_at = time.monotonic() + seconds

    async def client(number: int) -> None:
        # Clients begin one after another, so that their requests spread over the interval. Without an interval, they
        # begin within the first second, so that they do not all connect at once.
        await asyncio.sleep(number / clients * (interval_seconds or 1.0))
        writer = None
        try:
            async with asyncio.timeout(RESPONSE_SECONDS):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for request in cycle(requests):
                sent_at = time.monotonic()
                if sent_at > ends_at:
                    return
                async with asyncio.timeout(RESPONSE_SECONDS):
                    writer.write(request)
                    body_bytes = await _read_response(reader)
                response_seconds = time.monotonic() - sent_at
                responses.seconds.append(response_seconds)
                responses.body_bytes += body_bytes
                if interval_seconds:
                    await asyncio.sleep(max(0.0, interval_seconds - response_seconds))
        except (TimeoutError, OSError, EOFError, ValueError):
            responses.failed += 1
        finally:
            if writer:
                writer.close()

    await asyncio.gather(*(client(number) for number in range(clients)))
    return responses


async def _read_response(reader: asyncio.StreamReader) -> int:
    """Read a response; return the size of its body. Raises ValueError unless it has status 200 and Content-Length."""
    head = await reader.readuntil(b"\r\n\r\n")
    status, *headers = head.lower().split(b"\r\n")
    length = next((int(line.partition(b":")[2]) for line in headers if line.startswith(b"content-length:")), None)
    if b" 200 " not in status or length is None:
        raise ValueError(f"The response began with {status!r}")
    await reader.readexactly(length)
    return length
