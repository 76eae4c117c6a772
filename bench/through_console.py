"""A console of the benchmark's own, as processes, and its customer: what a launch costs when it is bought.

Serves `manage.py demo` in a folder of its own on free ports, and stops it by its own pid.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from rich.console import Console as Screen

from jobs.demo import SETTINGS, Customer

HOUSE = Path(__file__).resolve().parent.parent
SERVING = "The console goes on"


class ThroughConsole:
    """Orders runs over the HTTP API; a context manager."""

    def __init__(self, folder: Path, images_root: Path, script: str) -> None:
        self._var = folder / "var"
        self._images_root = images_root
        self._script = script

    def __enter__(self) -> ThroughConsole:
        environment = {
            **os.environ,
            "TRAINYARD_VAR": str(self._var),
            "TRAINYARD_IMAGES_ROOT": str(self._images_root),
            "TRAINYARD_URL": f"http://127.0.0.1:{_free_ports()}",
        }
        self._process = subprocess.Popen(
            [sys.executable, str(HOUSE / "manage.py"), "demo"],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        lines = []
        for line in self._process.stdout or ():
            lines.append(line)
            if SERVING in line:
                break
        else:
            raise SystemExit("The console did not start:\n" + "".join(lines))
        accounts = json.loads((self._var / "demo.json").read_text())
        self._customer = Customer(accounts["url"], accounts["customer"]["token"], Screen(quiet=True))
        self._customer.call("PUT", "workspaces/main/files/reduce.py", content=self._script.encode())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()

    def measure(self, nodes: int, workers: int) -> float:
        """Order, wait for the end, and compare the order's time with what rank 0 noted. The quote is made before."""
        wanted = SETTINGS | {"code_path": "reduce.py", "datasets": [], "node_spec": "medium", "epochs": 1}
        quote = self._customer.call("POST", "quotes/", json=wanted | {"nodes": nodes, "workers_per_node": workers})
        begun = time.time()
        order = self._customer.call("POST", "orders/", json={"quote": quote["id"]})["job"]
        ended = self._customer.follow(order)
        if ended["state"] != "succeeded":
            raise SystemExit(f"The console's run did not complete: {ended}")
        return float((self._var / "runs" / f"job-{order}-1" / "run" / "first-all-reduce").read_text()) - begun


def _free_ports() -> int:
    """A port that is free, with the next one, where the payments sandbox listens."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
