"""Harnesses of all backends, and the scripts that the contract suite runs on them.

A test that takes `any_harness` calls only methods of `runtime.backends.base.Backend`, so every backend must pass it.
"""

import json

import pytest

BACKENDS = (
    pytest.param("local", marks=pytest.mark.local_backend),
    pytest.param("kubernetes", marks=pytest.mark.slow),
    pytest.param("slurm", marks=[pytest.mark.local_backend, pytest.mark.slow]),
)
"""Every backend. On a real Kubernetes cluster, `make test-kubernetes` leaves out the tests marked `local_backend`."""
SHOW = """
    import argparse, json, os, sys
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    print("SEEN " + json.dumps({
        "environment": dict(os.environ), "argv": sys.argv, "cwd": os.getcwd(), "path": sys.path[0],
        "local_rank": parser.parse_args().local_rank,
        "dataset": open(os.path.join(os.environ["DATASETS_PATH"], "digits", "three")).read(),
        "models": os.listdir(os.environ["MODELS_PATH"]),
        "writable": [name for name in ("WORKSPACE", "RUN_DIR", "CHECKPOINT_DIR", "OUTPUT_DIR", "TENSORBOARD_LOGDIR",
                                 "DATASETS_PATH", "MODELS_PATH") if os.access(os.environ[name], os.W_OK)],
    }))
"""
"""Prints the environment of the rank, its arguments and what it may read and write, as one line for `seen`."""
WAIT = """
    import signal
    print("ready", flush=True)
    while True: signal.pause()
"""
"""Waits for ever. SIGTERM ends it."""
POLITE = """
    import signal, sys
    def leave(*_):
        print("saved", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGTERM, leave)
    print("ready", flush=True)
    while True: signal.pause()
"""
"""Waits for SIGTERM, and then saves and exits with 0 within its grace period."""
STUBBORN = """
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready", flush=True)
    while True: signal.pause()
"""
"""Ignores SIGTERM, so it runs until the end of its grace period."""
MEET = """
    import os, socket, time
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 0:
        with socket.create_server(address) as server:
            peers = [server.accept()[0] for _ in range(size - 1)]
        total = 1 + sum(int(peer.recv(16)) for peer in peers)
        for peer in peers: peer.sendall(b"%d" % total)
    else:
        while True:
            try:
                peer = socket.create_connection(address, timeout=20)
                break
            except ConnectionRefusedError: time.sleep(0.05)
        peer.sendall(b"%d" % (rank + 1))
        total = int(peer.recv(16))
    print("total", total, flush=True)
"""
"""Every rank sends its rank plus 1 to rank 0 and prints the sum that rank 0 sends back: 10 for four ranks."""


@pytest.fixture(params=BACKENDS)
def any_harness(request):
    """A harness of each backend in turn. After the test it checks that deleted runs left nothing behind."""
    fixtures = {"local": "harness", "kubernetes": "cluster_harness", "slurm": "slurm_harness"}
    return request.getfixturevalue(fixtures[request.param])


def seen(harness, rank):
    """Return the JSON that a rank of `SHOW` printed."""
    line = next(line for line in harness.log(rank).splitlines() if line.startswith("SEEN "))
    return json.loads(line.removeprefix("SEEN "))
