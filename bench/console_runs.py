"""Order runs from a console as a customer does, and measure them: the time of a launch, and of many trivial runs.

Starts `manage.py demo` in its own folder, on free ports, and stops it by its pid.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console as Screen

from bench.baselines import FIRST_ALL_REDUCE_FILE
from bench.environment import ROOT, free_console_port

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "console.settings")

from jobs.demo import SETTINGS, Customer  # its texts are translatable, which needs Django's settings

_READY_LINE = "The console goes on"
"""The line that the demo prints once it serves."""
_CHOICES = SETTINGS | {"datasets": [], "epochs": 1, "max_seconds": 60}
"""The choices of every quote: those of the demo, but without a dataset and for a short run."""


class ConsoleRuns:
    """Orders runs over the HTTP API; a context manager."""

    def __init__(self, folder: Path, images_root: Path) -> None:
        self._var = folder / "var"
        self._images_root = images_root

    def __enter__(self) -> ConsoleRuns:
        environment = {
            **os.environ,
            "TRAINYARD_VAR": str(self._var),
            "TRAINYARD_IMAGES_ROOT": str(self._images_root),
            "TRAINYARD_URL": f"http://127.0.0.1:{free_console_port()}",
        }
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "manage.py"), "demo"],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C then reaches only the benchmark, and `__exit__` stops the console
        )
        try:
            self._wait_until_ready()
        except BaseException:  # Ctrl-C too: `__exit__` is not called after an error in here
            self._stop()
            raise
        accounts = json.loads((self._var / "demo.json").read_text())
        self._url, self._token = accounts["url"], accounts["customer"]["token"]
        self._customer = self._create_client()
        return self

    def _wait_until_ready(self) -> None:
        lines = []
        for line in self._process.stdout or ():
            lines.append(line)
            if _READY_LINE in line:
                return
        raise SystemExit("The console did not start:\n" + "".join(lines))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()

    def write(self, path: str, text: str) -> None:
        """Write a file to the workspace."""
        self._customer.call("PUT", f"workspaces/main/files/{path}", content=text.encode())

    def first_all_reduce(self, script: str, nodes: int, workers: int) -> float:
        """Return the seconds from sending the order to the end of rank 0's first all-reduce."""
        quote = self._create_quote(self._customer, script, "medium", nodes, workers)
        ordered_at = time.time()
        job = self._order(self._customer, quote)
        run_dir = self._var / "runs" / f"job-{job}-1" / "run"
        return float((run_dir / FIRST_ALL_REDUCE_FILE).read_text()) - ordered_at

    def trivial_runs(self, script: str, runs: int, clients: int) -> float:
        """Return the seconds that this number of runs took, from the first quote to the last receipt.

        Each client creates a quote, orders, follows the run to its end, and then begins the next.
        """
        customers = [self._create_client() for _client in range(clients)]
        started_at = time.monotonic()
        with ThreadPoolExecutor(clients) as pool:
            futures = [pool.submit(self._run_repeatedly, customer, script, runs // clients) for customer in customers]
            for future in futures:
                future.result()  # raises the thread's error
        return time.monotonic() - started_at

    def _run_repeatedly(self, customer: Customer, script: str, runs: int) -> None:
        for _run in range(runs):
            self._order(customer, self._create_quote(customer, script, "nano", nodes=1, workers=1))

    @staticmethod
    def _create_quote(customer: Customer, script: str, node_spec: str, nodes: int, workers: int) -> Any:
        choices = {"code_path": script, "node_spec": node_spec, "nodes": nodes, "workers_per_node": workers}
        return customer.call("POST", "quotes/", json=_CHOICES | choices)["id"]

    @staticmethod
    def _order(customer: Customer, quote: Any) -> int:
        """Order a run, wait for its end, and return its job."""
        job: int = customer.call("POST", "orders/", json={"quote": quote})["job"]
        states = [data for name, data in customer.events(job) if name == "state"]
        if states[-1]["state"] != "succeeded":
            raise SystemExit(f"The console's run did not complete: {states[-1]}")
        return job

    def _create_client(self) -> Customer:
        return Customer(self._url, self._token, Screen(quiet=True))
