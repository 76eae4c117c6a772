"""Run uvicorn with GuardedProtocol in WEB_PROCESSES processes: `python -m console.serving.server`."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import threading
from logging.config import dictConfig
from multiprocessing.connection import wait

import uvicorn
from django.conf import settings

from console.serving import notebooks
from console.serving.protocol import GuardedProtocol
from console.serving.websocket_protocol import GuardedWebSocket

KEEP_ALIVE_SECONDS = 15
"""How long an idle connection stays open. It saves a new connection at the person's next click, but counts against
MAX_CONNECTIONS meanwhile."""
STOP_SECONDS = 10
"""How long open requests may continue after SIGTERM. `make up` kills the server 15 seconds after SIGTERM."""
HUNG_SECONDS = 120
"""uvicorn replaces a process that does not answer its parent for this long. Starts take up to a minute when busy."""


def serve() -> None:
    """Serve until SIGTERM or SIGINT."""
    dictConfig(settings.LOGGING)
    # Each connection takes a file descriptor, and the default soft limit is often 1,024.
    _soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    host, _, port = settings.WEB_BIND.rpartition(":")
    uvicorn.run(
        "console.asgi:application", host=host.strip("[]"), port=int(port), workers=settings.WEB_PROCESSES,
        http=GuardedProtocol, ws=GuardedWebSocket,
        ws_max_size=notebooks.MAX_MESSAGE_BYTES, lifespan="on", log_config=None, access_log=False, server_header=False,
        # `console.observability.addresses` decides whom to trust; uvicorn would change the scope's address itself.
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS, timeout_graceful_shutdown=STOP_SECONDS,
        timeout_worker_healthcheck=HUNG_SECONDS,
    )  # fmt: skip


def end_with_parent() -> None:
    """Stop this process when its parent is killed, so that a new server can use the port."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_wait_and_stop, args=(parent.sentinel,), name="parent", daemon=True).start()


def _wait_and_stop(sentinel: int) -> None:
    """Wait until the parent has ended, then stop this process as the parent would: with SIGTERM."""
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "console.settings")
    serve()
