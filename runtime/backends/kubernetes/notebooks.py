"""Connect to the JupyterLab of a Pod, through the API server (`pods/portforward`).

JupyterLab listens on 127.0.0.1 of its Pod; `portforward` connects to it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import tempfile
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, suppress

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, WebSocketException

from runtime.backends.kubernetes import portforward
from runtime.backends.kubernetes.client import ApiClient, ApiError, WebsocketTarget, resource_path
from runtime.backends.kubernetes.objects import is_deleting, pod_phase
from runtime.backends.kubernetes.pod_plan import NOTEBOOK_PORT
from runtime.backends.kubernetes.runs import Runs
from runtime.errors import BackendUnavailable, RunNotFound

logger = logging.getLogger(__name__)

_START_SECONDS = 30.0
"""How long opening a tunnel may take, including the start of JupyterLab, which takes 3 to 15 s on a small node."""
_RETRY_SECONDS = 1.0
"""The interval of attempts to connect to a JupyterLab that starts."""
_LOOKUP_THREADS = 4
"""Threads that wait for the API server when tunnels are opened. If all of them wait, further tunnels fail after
_START_SECONDS, but nothing else in the process becomes slower."""
_MAX_REMEMBERED = 1000
"""Maximum number of notebooks whose Pod is remembered, 200 bytes each: more than are in use at a time."""
_HARMLESS_REQUEST = b"GET /api HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
"""A request to JupyterLab that changes nothing and does not count as the user's activity."""


class NotebookTunnels:
    """Tunnels to the notebooks of one cluster."""

    def __init__(self, api: ApiClient, runs: Runs) -> None:
        self._api = api
        self._runs = runs
        self._paths: dict[str, str] = {}
        """By run: the path of its Pod, for notebooks that have answered. The oldest first."""
        self._threads = ThreadPoolExecutor(_LOOKUP_THREADS, "notebook-lookup")

    @asynccontextmanager
    async def open(self, name: str) -> AsyncIterator[str]:
        """Connect to the notebook of a run. See `runtime.backends.base.Tunnel`."""
        async with await self._connect(name) as connection:
            # Only the console's user can enter the folder, so no other can connect.
            with tempfile.TemporaryDirectory(prefix="trainyard-") as folder, socket.socket(socket.AF_UNIX) as listener:
                path = f"{folder}/s"
                listener.setblocking(False)
                listener.bind(path)
                listener.listen(1)
                relay = asyncio.create_task(_relay(listener, connection))
                try:
                    yield path
                finally:
                    relay.cancel()
                    await asyncio.gather(relay, return_exceptions=True)

    async def _connect(self, name: str) -> ClientConnection:
        """Return a connection to JupyterLab; wait for one that starts. Raises RunNotFound, BackendUnavailable."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_START_SECONDS):
                while True:
                    path, target = await loop.run_in_executor(self._threads, self._find, name)
                    if name in self._paths:  # JupyterLab has answered before
                        return await portforward.connect_to(target)
                    if await _is_listening(target):
                        self._remember(name, path)  # so the next turn of the loop connects
                    else:
                        await asyncio.sleep(_RETRY_SECONDS)
        except (OSError, WebSocketException, BackendUnavailable) as error:  # OSError includes the timeout
            self._paths.pop(name, None)  # the Pod may have ended, so the next call looks it up again
            reason = str(error) or type(error).__name__
            logger.warning("The notebook of the run '%s' cannot be reached: %s", name, reason)
            raise BackendUnavailable(f"The notebook of the run '{name}' cannot be reached: {reason}") from error

    def _find(self, name: str) -> tuple[str, WebsocketTarget]:
        """Return the path of the run's Pod, and how to connect to it. Raises RunNotFound, BackendUnavailable."""
        path = self._paths.get(name) or self._find_pod(name)
        return path, self._api.websocket_target(f"{path}/portforward", ports=str(NOTEBOOK_PORT))

    def _find_pod(self, name: str) -> str:
        """Return the path of the run's Pod. Raises RunNotFound if it does not run, BackendUnavailable."""
        try:
            pods = self._runs.list_pods(self._runs.get_job(name))
        except ApiError as error:
            raise BackendUnavailable(str(error)) from error
        for pod in pods:
            if pod_phase(pod) == "Running" and not is_deleting(pod):
                return resource_path("v1", "pods", pod["metadata"]["namespace"], pod["metadata"]["name"])
        raise RunNotFound(f"The run '{name}' has no pod that runs.")

    def _remember(self, name: str, path: str) -> None:
        self._paths[name] = path
        while len(self._paths) > _MAX_REMEMBERED:
            del self._paths[next(iter(self._paths))]


async def _is_listening(target: WebsocketTarget) -> bool:
    """Return whether JupyterLab answers a request. Raises OSError, WebSocketException.

    An open websocket does not show that JupyterLab listens, since the kubelet connects to it only afterwards.
    """
    async with await portforward.connect_to(target) as connection:
        with suppress(ConnectionClosed):  # the kubelet may have failed to connect already
            await portforward.send(connection, _HARMLESS_REQUEST)
        async with aclosing(portforward.receive(connection)) as chunks:
            async for _chunk in chunks:
                return True
    return False


async def _relay(listener: socket.socket, connection: ClientConnection) -> None:
    """Pass on the bytes of one client of `listener`, until one side closes its connection."""
    client, _address = await asyncio.get_running_loop().sock_accept(listener)
    await portforward.relay(client, connection)
