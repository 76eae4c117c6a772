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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from rich.console import Console as Screen

from jobs.demo import SETTINGS, Customer

HOUSE = Path(__file__).resolve().parent.parent
SERVING = "The console goes on"
WANTED = SETTINGS | {"datasets": [], "epochs": 1, "max_seconds": 60}


class ThroughConsole:
    """Orders runs over the HTTP API; a context manager."""

    def __init__(self, folder: Path, images_root: Path) -> None:
        self._var = folder / "var"
        self._images_root = images_root

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
        self._url, self._token = accounts["url"], accounts["customer"]["token"]
        self._customer = self._client()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()

    def write(self, path: str, text: str) -> None:
        """Put a script into the workspace."""
        self._customer.call("PUT", f"workspaces/main/files/{path}", content=text.encode())

    def first_all_reduce(self, nodes: int, workers: int) -> float:
        """Order, wait for the end, and compare the order's time with what rank 0 noted. The quote is made before."""
        wanted = WANTED | {"code_path": "reduce.py", "node_spec": "medium", "nodes": nodes, "workers_per_node": workers}
        quote = self._customer.call("POST", "quotes/", json=wanted)
        begun = time.time()
        job = self._customer.call("POST", "orders/", json={"quote": quote["id"]})["job"]
        self._see_to_its_end(self._customer, job)
        return float((self._var / "runs" / f"job-{job}-1" / "run" / "first-all-reduce").read_text()) - begun

    def trivial_runs(self, runs: int, clients: int) -> float:
        """Seconds that so many trivial runs took from the first quote to the last receipt, by so many clients at once.

        Each client asks for a quote, orders, follows the run to its end, and takes the next.
        """
        customers = [self._client() for _client in range(clients)]
        begun = time.monotonic()
        with ThreadPoolExecutor(clients) as pool:
            for done in [pool.submit(self._trivial, customer, runs // clients) for customer in customers]:
                done.result()
        return time.monotonic() - begun

    def _trivial(self, customer: Customer, runs: int) -> None:
        wanted = WANTED | {"code_path": "trivial.py", "node_spec": "nano", "nodes": 1, "workers_per_node": 1}
        for _run in range(runs):
            quote = customer.call("POST", "quotes/", json=wanted)
            job = customer.call("POST", "orders/", json={"quote": quote["id"]})["job"]
            self._see_to_its_end(customer, job)

    def _see_to_its_end(self, customer: Customer, job: int) -> None:
        told = [data for name, data in customer.events(job) if name == "state"]
        if told[-1]["state"] != "succeeded":
            raise SystemExit(f"The console's run did not complete: {told[-1]}")

    def _client(self) -> Customer:
        return Customer(self._url, self._token, Screen(quiet=True))


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
