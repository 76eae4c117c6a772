"""The launcher as a process: what it does with its supervisor's messages."""

import json
import socket
import subprocess
import sys

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
