"""The launcher as a process: what it does with its supervisor's messages."""

import json
import socket
import subprocess
import sys

import pytest

from runtime.launcher.rendezvous.peers import _proof

START = "from runtime.launcher.__main__ import start; start()"


def plan_fields(folder):
    """Return the fields of a plan of two nodes, for the second of them."""
    return {
        "run_id": "r", "node": 1, "nodes": 2, "workers": 1, "framework": "pytorch", "backend": "gloo",
        "addresses": ["127.0.0.1", "127.0.0.1"], "master_port": 1, "script": str(folder / "train.py"), "arguments": [],
        "epochs": 1, "lr": "0.1", "batch_size": 1, "datasets": [], "datasets_path": "/datasets",
        "workspace": str(folder), "run_dir": str(folder), "checkpoint_dir": str(folder), "restart_count": 0,
        "omp_threads": 1, "interface": "", "worker_ports": [],
    }  # fmt: skip


def test_a_new_address_of_the_hub_that_arrives_with_the_launch_plan_is_used(tmp_path):
    """The lookup of the hub's name may first find an old address. The supervisor sends the new one once it is known."""
    # The plan has 127.0.0.1 for node 0, where nothing listens.
    with socket.create_server(("127.0.0.2", 0)) as hub, (tmp_path / "output").open("wb") as output:
        hub.settimeout(60)
        launch_plan = {
            "plan": plan_fields(tmp_path), "token": "t", "control_port": hub.getsockname()[1], "listener": None,
            "outputs": [output.fileno()], "warm": None, "python": sys.executable, "environment": {}, "secrets": {},
        }  # fmt: skip
        messages = [launch_plan, {"type": "hub_address", "address": "127.0.0.2"}]
        supervisor, launcher = socket.socketpair()
        with supervisor, launcher:
            supervisor.sendall(b"".join(json.dumps(message).encode() + b"\n" for message in messages))
            passed = [launcher.fileno(), output.fileno()]
            command = [sys.executable, "-c", START, "--socket", str(launcher.fileno())]
            with subprocess.Popen(command, pass_fds=passed) as process:
                connection, _address = hub.accept()
                connection.close()
                supervisor.close()  # without its supervisor a launcher ends
                assert process.wait(60) == 1


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_node_whose_ranks_end_as_they_reconnect_waits_for_the_hubs_answer(tmp_path, *, is_refused):
    """It has asked the hub for a round with new ranks. If it ended before that, the other nodes would wait for it."""
    (tmp_path / "train.py").touch()
    with socket.create_server(("127.0.0.1", 0)) as listener, (tmp_path / "output").open("wb") as output:
        listener.settimeout(60)
        elastic = {"framework": "horovod", "nodes": 3, "min_nodes": 2, "addresses": ["127.0.0.1"] * 3}
        elastic |= {"spare_ports": [2], "rendezvous_port": 1}
        launch_plan = {
            "plan": plan_fields(tmp_path) | elastic, "token": "t", "control_port": listener.getsockname()[1],
            "listener": None, "outputs": [output.fileno()], "warm": None, "python": sys.executable, "environment": {},
            "secrets": {},
        }  # fmt: skip
        supervisor, launcher = socket.socketpair()
        with supervisor, launcher:
            supervisor.sendall(json.dumps(launch_plan).encode() + b"\n")
            passed = [launcher.fileno(), output.fileno()]
            command = [sys.executable, "-c", START, "--socket", str(launcher.fileno())]
            with subprocess.Popen(command, pass_fds=passed) as process:
                connection, _address = listener.accept()
                connection.settimeout(60)
                with connection, connection.makefile("rwb") as stream:

                    def send(*messages):
                        stream.write(b"".join(json.dumps(message).encode() + b"\n" for message in messages))
                        stream.flush()

                    received = (json.loads(line) for line in stream)
                    messages = (message for message in received if message["type"] != "heartbeat")
                    send({"type": "challenge", "nonce": "n"})
                    proof = _proof("t", "welcome", "n", next(messages)["nonce"], 1)
                    # Sent together, so that the soft round begins before the end of the rank is known.
                    start = {"type": "start", "round": 0, "rendezvous_port": 1, "addresses": elastic["addresses"]}
                    soft_round = {"type": "round", "round": 1, "members": [0, 1], "soft": True}
                    send({"type": "welcome", "proof": proof}, start, soft_round)
                    assert next(messages) == {"type": "restart_round", "round": 1}
                    # The answer counts, not what the hub sent before it knew of the rank's end.
                    hard_round = {"type": "round", "round": 2, "members": [0, 1], "soft": False}
                    answer = {"type": "restart_refused", "round": 1} if is_refused else hard_round
                    send({"type": "reconnected", "round": 1}, answer)
                    assert next(messages) == ({"type": "done"} if is_refused else {"type": "ranks_ended", "round": 2})
                supervisor.close()
                process.wait(60)
