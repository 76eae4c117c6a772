"""Launchers that lose each other, or die at the same moment, in Pods."""

import contextlib
import json
import os
import random
import signal
import socket
import threading
import time

import pytest

from tests.runtime.launcher.pods import RUN, children, free_port

pytestmark = pytest.mark.late("its pods are real processes, with time limits of seconds")

DETECTION_SECONDS = 15
"""How long the detection of a silent node may take."""
IGNORES_SIGTERM = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["RESTART_COUNT"], flush=True)
while True: signal.pause()
"""
DIES_WITH_THE_OTHER = """
import os, pathlib, signal, time
print("ready", flush=True)
while os.environ["RANK"] == "1": signal.pause()
while not pathlib.Path("go").exists(): time.sleep(0.01)
raise SystemExit(1)
"""


class Relay:
    """Carries bytes between the nodes and the hub. It discards those of `cut_off` nodes and keeps connections open."""

    def __init__(self):
        self.address = f"127.251.{random.randrange(250)}.{random.randrange(1, 250)}"
        self.port = free_port()
        self.cut_off = set()
        self._open = [socket.create_server((self.address, self.port))]

    def start(self, hub):
        threading.Thread(target=self._accept, args=(hub,), daemon=True).start()

    def _accept(self, hub):
        with contextlib.suppress(OSError):
            while True:
                client, _address = self._open[0].accept()
                server = socket.create_connection((hub, self.port))
                self._open += [client, server]
                hello = client.recv(65536)
                server.sendall(hello)
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=self._carry, args=(json.loads(hello)["node"], *ends), daemon=True).start()

    def _carry(self, node, source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if node not in self.cut_off:
                    sink.sendall(data)

    def close(self):
        for connection in self._open:
            connection.close()


@pytest.fixture
def relay():
    created = Relay()
    yield created
    created.close()


def start(cluster, relay, nodes, **plan):
    """Start Pods that find the relay at the name of node 0; return them once all ranks run."""
    pods = cluster.start(IGNORES_SIGTERM, nodes, late_names=True, control_port=relay.port, plan=plan)
    relay.start(cluster.addresses[0])
    cluster.hosts.write_text(f"127.0.0.1 localhost\n{relay.address} {RUN}-0.{RUN}\n")
    for rank in range(nodes):
        cluster.wait_for_text("ready", rank)
    return pods


@pytest.mark.slow
def test_both_sides_detect_a_silent_node(cluster, relay):
    pods = start(cluster, relay, 2)
    cut_at = time.time()
    relay.cut_off.add(1)
    assert cluster.wait() == [1, 1]
    for pod, other in zip(pods, (1, 0), strict=True):
        (cause,) = pod.record["causes"]
        assert (cause["kind"], cause["code"], cause["node"]) == ("node_lost", "node_silent", other)
        assert pod.record["finished_at"] - cut_at <= DETECTION_SECONDS


@pytest.mark.slow
def test_an_elastic_run_continues_without_a_silent_node(cluster, relay):
    pods = start(cluster, relay, 3, min_nodes=2)
    relay.cut_off.add(2)
    for rank in range(2):
        cluster.wait_for_text(f"ready {rank} 2 1\n", rank)
    # The silent one ends by itself: no rank may run twice.
    assert pods[2].wait() == 1
    assert pods[2].causes == [("node_lost", "node_silent")]
    records = [json.loads((cluster.root / "nodes" / f"{node}.json").read_bytes()) for node in range(2)]
    assert [(record["phase"], record["causes"]) for record in records] == [("running", [])] * 2
    assert [(entry["nodes"], entry["round"]) for entry in records[0]["members"]] == [([0, 1], 1)]


def test_two_ranks_that_die_at_once_are_both_reported(cluster):
    """The launcher of one learns of the other's death first; it still reports its own rank."""
    pods = cluster.start(DIES_WITH_THE_OTHER, 2)
    for rank in range(2):
        cluster.wait_for_text("ready", rank)
    (rank,) = children(pods[1].launcher)
    os.kill(pods[1].launcher, signal.SIGSTOP)
    os.kill(rank, signal.SIGKILL)
    (cluster.workspace / "go").touch()
    assert pods[0].wait() == 1
    os.kill(pods[1].launcher, signal.SIGCONT)
    assert pods[1].wait() == 1
    assert [(cause["rank"], cause["exit_code"]) for cause in pods[0].record["causes"]] == [(0, 1)]
    assert [(cause["rank"], cause["signal"]) for cause in pods[1].record["causes"]] == [(1, "SIGKILL")]
