"""Real launchers without a sandbox. The test is their supervisor and the network between them."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from runtime.backends.launch_plan import launcher_arguments
from tests.runtime.launcher.test_topology import PLAN

pytestmark = pytest.mark.late("it talks to real processes, with time limits of seconds")

LAUNCHER = Path(__file__).resolve().parents[3] / "runtime" / "launcher"
DETECTION_SECONDS = 15
"""How long the detection of a silent node may take."""
IGNORES_SIGTERM = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["RESTART_COUNT"], flush=True)
while True: signal.pause()
"""


class Relay:
    """Carries bytes between a node and the hub. If `drops`, it discards them and keeps connections open."""

    def __init__(self, port):
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.drops = False
        self._open = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _address = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._open += [client, server]
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not self.drops:
                    sink.sendall(data)

    def close(self):
        for connection in self._open:
            connection.close()


class Node:
    """One launcher, and its messages to its supervisor."""

    command = (sys.executable, *launcher_arguments(str(LAUNCHER)))

    def __init__(self, folder, plan, control_port, listener):
        ours, theirs = socket.socketpair()
        reading, writing = os.pipe()
        descriptors = [theirs.fileno(), writing, *([listener.fileno()] if listener else [])]
        command = [*self.command, "--socket", str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=descriptors, cwd=folder)
        theirs.close()
        os.close(writing)
        self._folder = folder
        self._link = ours
        self._output = reading
        self._received = b""
        self.printed = b""
        order = {
            "plan": plan,
            "token": "the-runs-token",
            "control_port": control_port,
            "listener": listener.fileno() if listener else None,
            "python": sys.executable,
            "environment": {"PATH": "/usr/bin:/bin"},
            "outputs": [writing],
        }
        self.send(order)

    def send(self, message):
        self._link.sendall(json.dumps(message).encode() + b"\n")

    @property
    def messages(self):
        return [json.loads(line) for line in self._received.split(b"\n")[:-1]]

    def of_type(self, kind):
        return [message for message in self.messages if message["type"] == kind]

    @property
    def causes(self):
        return [message["cause"] for message in self.of_type("cause")]

    def listen(self, until, seconds=60):
        """Read the messages of the launcher and the output of its rank until the condition holds."""
        give_up_at = time.monotonic() + seconds
        sources = [self._link, self._output]
        while not until(self):
            ready, _, _ = select.select(sources, [], [], max(0.0, give_up_at - time.monotonic()))
            assert ready, f"not in {seconds} s: {self.messages} {self.printed!r}"
            for source in ready:
                data = source.recv(65536) if source is self._link else os.read(source, 65536)
                if not data:
                    sources.remove(source)
                    assert sources, f"it ended: {self.messages} {self.printed!r}"
                elif source is self._link:
                    self._received += data
                else:
                    self.printed += data

    def wait(self, seconds=60):
        """Read everything until the launcher ends, and return its exit code."""
        self.listen(lambda node: bool(node.of_type("ended")), seconds)
        return self.process.wait(10)

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        # Here no pid namespace ends them with their launcher.
        for pid in {int(pid) for message in self.of_type("running") for pid in message["pids"]}:
            with contextlib.suppress(OSError):
                if str(self._folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        self._link.close()
        os.close(self._output)


class Cluster:
    """The nodes of one run. Each but the first is behind a relay."""

    def __init__(self, folder):
        self.folder = folder
        self.nodes = []
        self.relays = []

    def start(self, script, nodes, **changes):
        path = self.folder / "train.py"
        path.write_text(script)
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        with listener, socket.create_server(("127.0.0.1", 0)) as free:
            port = listener.getsockname()[1]
            fields = {
                **changes,
                "nodes": nodes,
                "addresses": ["127.0.0.1"] * nodes,
                "master_port": free.getsockname()[1],
            }
            plan = PLAN._replace(
                workers=1, script=str(path), arguments=[], run_dir=str(self.folder), **fields
            )._asdict()
            listener.listen(16)
            for node in range(1, nodes):
                self.relays.append(Relay(port))
                self.nodes.append(Node(self.folder, {**plan, "node": node}, self.relays[-1].port, None))
            self.nodes.insert(0, Node(self.folder, {**plan, "node": 0}, port, listener))
        return self.nodes


@pytest.fixture
def cluster(tmp_path):
    started = Cluster(tmp_path)
    yield started
    for relay in started.relays:
        relay.close()
    for node in started.nodes:
        node.close()


def ready(node):
    return b"ready" in node.printed


def has_no_ranks(node):
    """Whether no rank of this node is left."""
    return not any(Path(f"/proc/{pid}").exists() for pid in node.of_type("running")[-1]["pids"])


@pytest.mark.slow
def test_both_sides_detect_a_silent_node(cluster):
    nodes = cluster.start(IGNORES_SIGTERM, 2)
    for node in nodes:
        node.listen(ready)
    begun = time.monotonic()
    cluster.relays[0].drops = True
    for node, other in ((nodes[0], 1), (nodes[1], 0)):
        assert node.wait() == 1
        assert [(cause["kind"], cause["code"], cause["node"]) for cause in node.causes] == [
            ("node_lost", "node_silent", other)
        ]
        assert has_no_ranks(node)
    assert time.monotonic() - begun <= DETECTION_SECONDS


@pytest.mark.slow
def test_an_elastic_run_continues_without_a_silent_node(cluster):
    nodes = cluster.start(IGNORES_SIGTERM, 3, min_nodes=2)
    for node in nodes:
        node.listen(ready)
    cluster.relays[1].drops = True
    for rank, node in enumerate(nodes[:2]):
        node.listen(lambda node: len(node.of_type("running")) == 2)
        wanted = f"ready {rank} 2 2\n".encode()
        node.listen(lambda node, wanted=wanted: wanted in node.printed)
        assert node.causes == []
    assert [(one["nodes"], one["round"]) for one in nodes[0].of_type("members")] == [([0, 1], 1)]
    # The silent one ends by itself: no rank may run twice.
    assert nodes[2].wait() == 1
    assert nodes[2].causes[0]["code"] == "node_silent"
    assert has_no_ranks(nodes[2])


def test_a_node_over_its_limit_does_not_count_as_lost(cluster):
    nodes = cluster.start(IGNORES_SIGTERM, 3, min_nodes=1)
    for node in nodes:
        node.listen(ready)
    nodes[1].send({"type": "abort"})
    nodes[1].listen(lambda node: bool(node.of_type("ended")))
    nodes[1].process.kill()
    for node in (nodes[0], nodes[2]):
        assert node.wait() == 1
        assert node.causes == []
        assert len(node.of_type("running")) == 1, "no new round"


def test_two_ranks_that_die_at_once_are_both_reported(cluster, tmp_path):
    """The launcher of one learns of the other's death first; it still reports its own rank."""
    script = IGNORES_SIGTERM.replace("while True: signal.pause()", "")
    script += "import time\nif os.environ['RANK'] == '0':\n    while not os.path.exists('go'): time.sleep(0.01)\n"
    script += "    raise SystemExit(1)\nwhile True: signal.pause()\n"
    nodes = cluster.start(script, 2)
    for node in nodes:
        node.listen(ready)
    (rank,) = map(int, nodes[1].of_type("running")[-1]["pids"])
    nodes[1].process.send_signal(signal.SIGSTOP)
    os.kill(rank, signal.SIGKILL)
    (tmp_path / "go").touch()
    assert nodes[0].wait() == 1
    nodes[1].process.send_signal(signal.SIGCONT)
    assert nodes[1].wait() == 1
    assert [(cause["rank"], cause["exit_code"]) for cause in nodes[0].causes] == [(0, 1)]
    assert [(cause["rank"], cause["signal"]) for cause in nodes[1].causes] == [(1, "SIGKILL")]
