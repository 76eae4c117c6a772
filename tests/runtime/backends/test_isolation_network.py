"""Hostile scripts: the network of a run is its own."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from runtime.specs import Outcome
from tests.runtime.backends import hostile
from tests.runtime.conftest import Yard


@pytest.fixture(params=["cold", "warm"])
def yard(yard: Yard, request: pytest.FixtureRequest) -> Yard:
    """Both ways in which ranks are started."""
    return hostile.started(yard, request.param)


def test_the_hosts_loopback_and_other_runs_are_out_of_reach(yard: Yard) -> None:
    with socket.create_server(("127.0.0.1", 0)) as ours, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("\0trainyard-test-" + yard.folder.name)
        abstract.listen()
        serve = """
        import os, signal, socket
        server = socket.create_server(("0.0.0.0", 45671))
        print("ready", flush=True)
        signal.pause()
        """
        yard.backend.submit(yard.spec(serve, name="job-2-1"))
        yard.wait_for_text("ready", "job-2-1")
        script = f"""{hostile.TRY}
    import socket
    def dial(*address):
        with socket.create_connection(address, timeout=2): return "reached"
    def knock(name):
        with socket.socket(socket.AF_UNIX) as one: return one.connect(name) or "reached"
    print(json.dumps([
        attempt(dial, "127.0.0.1", {ours.getsockname()[1]}),
        attempt(dial, "127.0.0.1", 45671),
        attempt(dial, "192.0.2.1", 80),
        attempt(knock, "\\0trainyard-test-{yard.folder.name}"),
        [line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line],
    ]))
        """
        yard.run(script)
    assert json.loads(yard.log()) == [
        "ConnectionRefusedError",
        "ConnectionRefusedError",
        "OSError",
        "ConnectionRefusedError",
        ["lo"],
    ]


def test_nodes_of_one_run_reach_each_other(yard: Yard) -> None:
    script = """
    import os, socket, time
    port = int(os.environ["MASTER_PORT"])
    if os.environ["RANK"] == "0":
        with socket.create_server(("0.0.0.0", port), reuse_port=False) as server:
            server.accept()[0].sendall(b"met")
    else:
        while True:
            try:
                print(socket.create_connection((os.environ["MASTER_ADDR"], port)).recv(3).decode())
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
    """
    assert yard.run(script, nodes=2).outcome is Outcome.COMPLETED, yard.all_logs("job-1-1")
    assert yard.log(1) == "met\n"


def test_the_setting_gives_runs_the_hosts_network(tmp_path: Path, bare_images: Path) -> None:
    made = Yard(tmp_path, bare_images)
    made.backend = made.another(network="host")
    with socket.create_server(("127.0.0.1", 0)) as ours:
        port = ours.getsockname()[1]
        made.run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=5).close()\nprint('reached')")
    assert made.log() == "reached\n"
    assert "shares the network" in (made.backend.run_folder("job-1-1") / "logs" / "supervisor-0.log").read_text()
    made.backend.delete("job-1-1")
