"""Yards of all backends with one set of words, and the scripts that the contract suite runs on them.

The one rule: a test that takes `any_yard` asks nothing of a backend that is not in `runtime.backends.base.Backend`.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from runtime.specs import RunSpec
from tests.kubernetes.yard import ClusterYard
from tests.runtime.any_yard import AnyYard
from tests.runtime.conftest import Yard

BACKENDS = ("local", "kubernetes")
SHOW = """
    import argparse, json, os, sys
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    print("SEEN " + json.dumps({
        "environment": dict(os.environ), "argv": sys.argv, "cwd": os.getcwd(), "path": sys.path[0],
        "local_rank": parser.parse_args().local_rank,
        "dataset": open(os.path.join(os.environ["DATASETS_PATH"], "digits", "three.txt")).read(),
        "writable": [name for name in ("WORKSPACE", "RUN_DIR", "CHECKPOINT_DIR", "TENSORBOARD_LOGDIR", "DATASETS_PATH")
                     if os.access(os.environ[name], os.W_OK)],
    }))
"""
WAIT = """
    import signal
    print("ready", flush=True)
    while True:
        signal.pause()
"""
POLITE = """
    import signal, sys, time
    def leave(*_):
        print("saved", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGTERM, leave)
    print("ready", flush=True)
    while True:
        signal.pause()
"""
STUBBORN = """
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready", flush=True)
    while True:
        signal.pause()
"""
MEET = """
    import os, socket
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 0:
        server = socket.create_server(address)
        total, peers = 1, []
        for _ in range(size - 1):
            peer, _ = server.accept()
            total += int(peer.recv(16))
            peers.append(peer)
        for peer in peers:
            peer.sendall(b"%d" % total)
    else:
        import time
        while True:
            try:
                peer = socket.create_connection(address, timeout=20)
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        peer.sendall(b"%d" % (rank + 1))
        total = int(peer.recv(16))
    print("total", total, flush=True)
"""


class LocalYard(Yard):
    """The local yard, with what only a backend's own tests know: how to take a node away, what is left of runs."""

    keeps_output = True

    def spec(self, source: str = "print('hello')", /, **changes: Any) -> RunSpec:
        (self.dataset / "three.txt").write_text("3")
        return super().spec(source, **changes)

    def lose_node(self, node: int, name: str = "job-1-1") -> None:
        os.kill(self.records(name)[node]["pid"], signal.SIGKILL)

    def left_behind(self) -> list[str]:
        runs = self.folder / "runs"
        return [path.name for path in runs.iterdir() if not path.name.startswith(".")]


@pytest.fixture(params=BACKENDS)
def any_yard(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[AnyYard]:
    """A yard of each backend in turn, that has left nothing behind."""
    if request.param == "local":
        yard = request.getfixturevalue("yard")
        yard.__class__ = LocalYard  # the fixture's own, with its own cleaning
        yield yard
        return
    made = ClusterYard(request.getfixturevalue("site"))
    yield made
    made.close()


def seen(yard: AnyYard, rank: int) -> dict[str, Any]:
    line = next(line for line in yard.log(rank).splitlines() if line.startswith("SEEN "))
    found: dict[str, Any] = json.loads(line.removeprefix("SEEN "))
    return found
