"""TensorBoard in tests: its owner in a thread, event files, and the console's ASGI application on a port."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import contextmanager

import uvicorn
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from console.serving.application import Application
from console.serving.handler import Handler
from console.serving.protocol import GuardedProtocol
from console.serving.websocket_protocol import GuardedWebSocket
from runtime.tools.control import CONTROL_SOCKET
from runtime.tools.owner import Limits, Owner
from tests.console.processes import free_port, wait_for

LIMITS = Limits(per_organization=3, total=4, idle_seconds=600, memory_mib=1024)


def write_scalars(folder, tag="loss", points=20):
    """Write an event file as a training does."""
    writer = EventFileWriter(str(folder))
    for step in range(points):
        value = Summary.Value(tag=tag, simple_value=1 / (step + 1))
        writer.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=[value])))
    writer.close()


@contextmanager
def owner_of_tools(root, limits=LIMITS):
    """Run the owner in a thread until the block ends."""
    owner = Owner(root, limits, lambda key: f"/tools/{key}")
    thread = threading.Thread(target=owner.serve)
    thread.start()
    try:
        # The socket's file is no sign that the owner listens: one that was killed leaves it.
        wait_for(lambda: _answers(root / CONTROL_SOCKET))
        yield owner
    finally:
        owner.stop()
        thread.join()


def _answers(path):
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


@contextmanager
def asgi_console():
    """Serve the console's own ASGI application from a thread; yields its URL."""
    port = free_port()
    config = uvicorn.Config(
        Application(Handler()), http=GuardedProtocol, ws=GuardedWebSocket, host="127.0.0.1",
        port=port, lifespan="off", log_config=None,
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_for(lambda: server.started)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
