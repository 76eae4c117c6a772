"""Subrequests by which Django admits a request before the server forwards it, and access to Unix sockets of runs."""

from __future__ import annotations

import os
import stat
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from console.observability import logs
from console.serving import proxy
from console.serving.exchange import SCOPE_KEY, Exchange
from console.serving.refusals import Message, Refused

Scope = dict[str, Any]
RunDjango = Callable[[Scope], Awaitable[list[Message]]]
"""Sends a scope, without a body, to Django and returns the response."""
_FORWARDED_HEADERS = {b"x-forwarded-for", b"x-forwarded-proto", b"accept-language"}


async def send_subrequest(
    run_django: RunDjango, scope: Scope, exchange: Exchange, *, path: str, host: str, cookie: str, scheme: str
) -> list[Message]:
    """Return Django's response to a GET of `path` that the server sends for the request of `scope`."""
    subrequest: Scope = {
        "type": "http",
        "asgi": scope["asgi"],
        "http_version": "1.1",
        "method": "GET",
        "scheme": scheme,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"host", host.encode("latin-1")),
            (b"cookie", cookie.encode("latin-1")),
            *((name, value) for name, value in scope["headers"] if name in _FORWARDED_HEADERS),
        ],
        "client": scope.get("client"),
        "server": scope.get("server"),
        SCOPE_KEY: exchange,
    }
    messages = await run_django(subrequest)
    scope[logs.FIELDS_KEY] = subrequest.get(logs.FIELDS_KEY)  # for the access log
    return messages


@contextmanager
def pinned(path: Path) -> Iterator[str]:
    """Yield a path that stays that of this socket, even if the run's code replaces the file. Raises Refused.

    The code may write to the socket's folder: a link there could lead to a socket of the console. Links are not
    followed. The yielded path is short, as a socket's path must be.
    """
    descriptors: list[int] = []
    try:
        try:
            descriptors.append(os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
            descriptors.append(os.open(path.name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=descriptors[0]))
        except OSError as error:
            raise Refused(proxy.ENDED) from error
        if not stat.S_ISSOCK(os.fstat(descriptors[1]).st_mode):
            raise Refused(proxy.ENDED)
        yield f"/proc/self/fd/{descriptors[1]}"
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def header(scope: Mapping[str, Any], name: bytes) -> str:
    """Return the first value of a header; empty without one."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")
