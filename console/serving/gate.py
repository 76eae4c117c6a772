"""Ask Django whether a request may be forwarded, and open the Unix sockets of runs safely.

The server forwards requests to notebooks and shells itself, without a Django view. Before that it sends Django a
*subrequest*: a GET of a view that checks access, with the cookie of the original request.
"""

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
"""The scope that ASGI gives an application for each request or websocket."""
RunDjango = Callable[[Scope], Awaitable[list[Message]]]
"""Lets Django respond to a request without a body; returns the ASGI messages of the response. Raises Refused."""
_FORWARDED_HEADERS = {b"x-forwarded-for", b"x-forwarded-proto", b"accept-language"}
"""Headers of the request that the subrequest repeats. They tell the client's address, whether the client uses HTTPS,
and the language for an error page."""


async def send_subrequest(
    run_django: RunDjango, scope: Scope, exchange: Exchange, *, path: str, host: str, cookie: str, scheme: str
) -> list[Message]:
    """Return Django's response to a GET of `path`, sent on behalf of the request of `scope`. Raises Refused.

    Host, cookie and scheme are parameters, because Django needs others than the request has: a notebook has its own
    host, and a websocket its own scheme.
    """
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
    # The middleware stored the user in the subrequest's scope; the access log reads the original request's.
    scope[logs.FIELDS_KEY] = subrequest.get(logs.FIELDS_KEY)
    return messages


@contextmanager
def verified_socket(path: Path) -> Iterator[str]:
    """Check that `path` is a Unix socket and no link, and yield another path of this same socket. Raises Refused.

    A run's code can write to the folder of its socket. It could replace the socket by a link to a socket of the
    console, also between the check and the connection. The yielded path names an open file descriptor, so it keeps
    leading to the checked socket. It is also short: Linux limits a socket's path to 107 bytes.
    """
    descriptors: list[int] = []
    try:
        try:
            descriptors.append(os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
            descriptors.append(os.open(path.name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=descriptors[0]))
        except OSError as error:
            raise Refused(proxy.TOOL_ENDED) from error
        if not stat.S_ISSOCK(os.fstat(descriptors[1]).st_mode):
            raise Refused(proxy.TOOL_ENDED)
        yield f"/proc/self/fd/{descriptors[1]}"
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def header(scope: Mapping[str, Any], name: bytes) -> str:
    """Return the first value of a header; empty if the request lacks it. `name` is in lower case, as in the scope."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")
