"""Real launchers, without a sandbox: this test is their supervisor, and the network between them."""

from __future__ import annotations

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.backends.orders import launcher_call
from tests.runtime.launcher.test_topology import PLAN

LAUNCHER = Path(__file__).resolve().parents[3] / "runtime" / "launcher"
FOUND_SECONDS = 15
"""Within which a node that is cut off must be found; nothing here waits for a collective."""
DEAF = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["RESTART_COUNT"], flush=True)
while True: signal.pause()
"""


class Relay:
    """Carries bytes between a node and the hub, until it is told to swallow them; connections stay open."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.swallows = False
        self._open: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _address = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._open += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not self.swallows:
                    sink.sendall(data)

    def close(self) -> None:
        for connection in self._open:
            connection.close()


class Node:
    """One launcher, and what it tells its supervisor."""

    command = (sys.executable, *launcher_call(str(LAUNCHER)))

    def __init__(self, folder: Path, plan: dict[str, Any], control_port: int, listener: socket.socket | None) -> None:
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
        self._said = b""
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
        self.say(order)

    def say(self, message: dict[str, Any]) -> None:
        self._link.sendall(json.dumps(message).encode() + b"\n")

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._said.split(b"\n")[:-1]]

    def of_type(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.messages if message["type"] == kind]

    @property
    def causes(self) -> list[dict[str, Any]]:
        return [message["cause"] for message in self.of_type("cause")]

    def listen(self, until: Callable[[Node], bool], seconds: float = 30) -> None:
        """Take in what the launcher and its rank say until the condition holds."""
        give_up_at = time.monotonic() + seconds
        sources: list[Any] = [self._link, self._output]
        while not until(self):
            ready, _, _ = select.select(sources, [], [], give_up_at - time.monotonic())
            assert ready, f"not in {seconds} s: {self.messages} {self.printed!r}"
            for source in ready:
                data = source.recv(65536) if source is self._link else os.read(source, 65536)
                if not data:
                    sources.remove(source)
                    assert sources, f"it ended: {self.messages} {self.printed!r}"
                elif source is self._link:
                    self._said += data
                else:
                    self.printed += data

    def wait(self, seconds: float) -> int:
        """Its exit code, once it has ended and everything it said is taken in."""
        self.listen(lambda node: bool(node.of_type("ended")), seconds)
        return self.process.wait(10)

    def close(self) -> None:
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
    """Nodes of one run, each but the first behind a relay of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: list[Node] = []
        self.relays: list[Relay] = []

    def start(
        self, script: str, nodes: int, *, late_hub: bool = False, absent: bool = False, **changes: Any
    ) -> list[Node]:
        path = self.folder / "train.py"
        path.write_text(script)
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        with listener, socket.create_server(("127.0.0.1", 0)) as free:
            port: int = listener.getsockname()[1]
            told = {**changes, "nodes": nodes, "addresses": ["127.0.0.1"] * nodes, "master_port": free.getsockname()[1]}
            plan = PLAN._replace(workers=1, script=str(path), arguments=[], run_dir=str(self.folder), **told)._asdict()
            if not late_hub:
                listener.listen(16)
            for node in range(1, 1 if absent else nodes):
                self.relays.append(Relay(port))
                control_port = port if late_hub else self.relays[-1].port
                self.nodes.append(Node(self.folder, {**plan, "node": node}, control_port, None))
            if late_hub:
                for other in self.nodes:
                    other.listen(lambda node: len(node.of_type("beat")) > 1)
                listener.listen(16)
            self.nodes.insert(0, Node(self.folder, {**plan, "node": 0}, port, listener))
        return self.nodes


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    for relay in made.relays:
        relay.close()
    for node in made.nodes:
        node.close()


def ready(node: Node) -> bool:
    return b"ready" in node.printed


def gone(node: Node) -> bool:
    """Whether no rank of this node is left."""
    return not any(Path(f"/proc/{pid}").exists() for pid in node.of_type("running")[-1]["pids"])


def test_a_node_that_is_cut_off_is_found_by_its_silence_on_both_sides(cluster: Cluster) -> None:
    nodes = cluster.start(DEAF, 2)
    for node in nodes:
        node.listen(ready)
    begun = time.monotonic()
    cluster.relays[0].swallows = True
    for node, other in ((nodes[0], 1), (nodes[1], 0)):
        assert node.wait(FOUND_SECONDS) == 1
        assert [(cause["kind"], cause["code"], cause["node"]) for cause in node.causes] == [
            ("node_lost", "node_silent", other)
        ]
        assert gone(node)
    assert time.monotonic() - begun <= FOUND_SECONDS


def test_an_elastic_run_goes_on_without_a_node_that_is_cut_off(cluster: Cluster) -> None:
    nodes = cluster.start(DEAF, 3, min_nodes=2)
    for node in nodes:
        node.listen(ready)
    cluster.relays[1].swallows = True
    for rank, node in enumerate(nodes[:2]):
        node.listen(lambda node: len(node.of_type("running")) == 2, FOUND_SECONDS)
        wanted = f"ready {rank} 2 2\n".encode()
        node.listen(lambda node, wanted=wanted: wanted in node.printed)
        assert node.causes == []
    assert [(one["nodes"], one["round"]) for one in nodes[0].of_type("members")] == [([0, 1], 1)]
    # The one that is cut off ends by itself: nobody may train twice.
    assert nodes[2].wait(FOUND_SECONDS) == 1
    assert nodes[2].causes[0]["code"] == "node_silent"
    assert gone(nodes[2])


def test_a_node_whose_code_went_over_a_limit_is_no_lost_one(cluster: Cluster) -> None:
    nodes = cluster.start(DEAF, 3, min_nodes=1)
    for node in nodes:
        node.listen(ready)
    nodes[1].say({"type": "abort"})
    nodes[1].listen(lambda node: bool(node.of_type("ended")))
    nodes[1].process.kill()
    for node in (nodes[0], nodes[2]):
        assert node.wait(FOUND_SECONDS) == 1
        assert node.causes == []
        assert len(node.of_type("running")) == 1, "no new round"


def test_nodes_wait_for_a_hub_that_comes_up_late(cluster: Cluster) -> None:
    nodes = cluster.start("print('ready')", 2, late_hub=True)
    for node in nodes:
        assert node.wait(30) == 0
        assert node.causes == []


def test_nodes_that_do_not_come_are_named(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(LAUNCHER.parents[1])!r}); import runtime.launcher.agent as agent; "
        "from runtime.launcher.__main__ import main; agent.START_SECONDS = 1; sys.exit(main(sys.argv))"
    )
    monkeypatch.setattr(Node, "command", (sys.executable, "-c", code))
    hub, *others = cluster.start(DEAF, 3, absent=True)
    assert others == []
    assert hub.wait(30) == 1
    assert [(cause["kind"], cause["code"]) for cause in hub.causes] == [("platform_error", "nodes_not_met")]
    assert hub.causes[0]["message"] == "Nodes 1, 2 did not come in time."
    assert hub.of_type("running") == []


def test_a_rank_that_died_before_the_word_to_fall_came_is_named(cluster: Cluster, tmp_path: Path) -> None:
    """Two ranks die at once, and the launcher of one hears of the other's first: both are told, as they were."""
    script = DEAF.replace("while True: signal.pause()", "")
    script += "import time\nif os.environ['RANK'] == '0':\n    while not os.path.exists('go'): time.sleep(0.01)\n"
    script += "    raise SystemExit(1)\nwhile True: signal.pause()\n"
    nodes = cluster.start(script, 2)
    for node in nodes:
        node.listen(ready)
    (rank,) = map(int, nodes[1].of_type("running")[-1]["pids"])
    nodes[1].process.send_signal(signal.SIGSTOP)
    os.kill(rank, signal.SIGKILL)
    (tmp_path / "go").touch()
    assert nodes[0].wait(FOUND_SECONDS) == 1
    nodes[1].process.send_signal(signal.SIGCONT)
    assert nodes[1].wait(FOUND_SECONDS) == 1
    assert [(cause["rank"], cause["exit_code"]) for cause in nodes[0].causes] == [(0, 1)]
    assert [(cause["rank"], cause["signal"]) for cause in nodes[1].causes] == [(1, "SIGKILL")]
