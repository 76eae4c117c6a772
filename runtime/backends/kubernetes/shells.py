"""Connect to the shells of a node, whose launcher listens in its Pod (`runtime.launcher.shell_access`).

The console does not execute programs in Pods (`pods/exec`), for two reasons. Its role would have to permit that in
every container. And such a program would have the container's environment, which holds the key of the run's records.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from websockets.exceptions import WebSocketException

from runtime.backends.kubernetes import portforward
from runtime.backends.kubernetes.client import ApiClient, ApiError, WebsocketTarget, resource_path
from runtime.backends.kubernetes.runs import Runs
from runtime.backends.kubernetes.state import newest_pods, read_job, read_pod
from runtime.errors import BackendUnavailable, RunNotFound
from runtime.launcher import shell_access
from runtime.launcher.shell import READY

_START_SECONDS = 30.0
"""How long the API server, the kubelet and the node may take to open a shell. They usually take less than a second; 30
s leave room for a busy API server."""
_LOOKUP_THREADS = 4
"""Threads that wait for the API server when shells are opened. If all of them wait, further shells fail after
_START_SECONDS, but nothing else in the process becomes slower."""


class ShellTunnels:
    """Opens connections to shells on one cluster."""

    def __init__(self, api: ApiClient, runs: Runs) -> None:
        self._api = api
        self._runs = runs
        self._threads = ThreadPoolExecutor(_LOOKUP_THREADS, "shell-lookup")

    @asynccontextmanager
    async def open(self, name: str, node: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Connect to a new shell in a node. See `runtime.backends.base.ShellTunnel`."""
        try:
            async with asyncio.timeout(_START_SECONDS):
                target, token = await asyncio.get_running_loop().run_in_executor(self._threads, self._find, name, node)
                connection = await portforward.connect_to(target)
        except (OSError, WebSocketException, BackendUnavailable) as error:
            raise _unavailable(error) from error
        async with connection:
            # The caller gets `ours` as streams. `relay` passes bytes between `theirs` and the websocket.
            ours, theirs = socket.socketpair()
            try:
                reader, writer = await asyncio.open_unix_connection(sock=ours)
            except BaseException:
                ours.close()
                theirs.close()
                raise
            relay = asyncio.create_task(portforward.relay(theirs, connection))
            try:
                try:
                    async with asyncio.timeout(_START_SECONDS):
                        writer.write(token.encode())
                        if await reader.readexactly(len(READY)) != READY:
                            raise ConnectionRefusedError("its launcher opens no shell")
                except (OSError, asyncio.IncompleteReadError) as error:  # OSError includes TimeoutError
                    raise _unavailable(error) from error
                yield reader, writer
            finally:
                writer.close()
                relay.cancel()
                await asyncio.gather(relay, return_exceptions=True)

    def _find(self, name: str, node: int) -> tuple[WebsocketTarget, str]:
        """Return how to connect to a node, and the token of its shells. Raises RunNotFound, BackendUnavailable."""
        try:
            job = self._runs.get_job(name)
            state = read_job(job)
            pods = newest_pods(state, [pod for pod in map(read_pod, self._runs.list_pods(job)) if pod is not None])
            pod = pods.get(node)
            record_key = self._runs.record_key(state)
        except ApiError as error:
            raise BackendUnavailable(str(error)) from error
        # The key is empty if the Secret is deleted, which shows that the run is being deleted.
        if pod is None or pod.started_at is None or pod.ended or not record_key:
            raise RunNotFound(f"The run '{name}' has no node {node} that runs.")
        path = resource_path("v1", "pods", state.namespace, pod.name)
        target = self._api.websocket_target(f"{path}/portforward", ports=str(shell_access.port_of(node)))
        return target, shell_access.token_of(record_key, run_name=name, node=node)


def _unavailable(error: Exception) -> BackendUnavailable:
    return BackendUnavailable(f"No shell can be opened in the node: {str(error) or type(error).__name__}")
