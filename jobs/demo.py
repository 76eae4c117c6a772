"""The customer of `make demo`: buys a training run through the public HTTP API with a token, and follows it.

`manage.py demo` creates the accounts beforehand, because signing up is not part of the API.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urljoin

import httpx
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from billing.amounts import money

DATASET = "digits"
WORKSPACE = "main"
SCRIPT = "mnist_ddp.py"
TOP_UP_MINOR = 2000
"""Amount of the top-up: many times the price of the run."""
TEST_CARD = "4242 4242 4242 4242"
"""Stripe's test card that always succeeds; the payments sandbox accepts it too."""
STEP_TIMEOUT_SECONDS = 120
"""How long the demo waits for one step, such as the payment's webhook or the next event of the run."""
SETTINGS = {
    "product": "metered",
    "framework": "pytorch",
    "image": "pytorch",
    "workspace": WORKSPACE,
    "code_path": SCRIPT,
    "datasets": [DATASET],
    "epochs": 20,
    "lr": "0.02",
    "batch_size": 32,
    "node_spec": "nano",
    "nodes": 2,
    "workers_per_node": 1,
    "max_seconds": 600,
}
"""The purchase, in the API's fields."""
MIN_ACCURACY = 0.8
"""Test accuracy that shows that the model has learned. Guessing one of ten digits reaches 0.1."""


class DemoFailed(Exception):
    """A step of the demo failed. The message says which step, and why."""


class TrainingResult(NamedTuple):
    """The first and the last loss of a run, and its last test accuracy."""

    first_loss: float
    last_loss: float
    accuracy: float


@dataclass
class Customer:
    """A client of the API with a token. `url` is the installation's address; `console` prints to the terminal."""

    url: str
    token: str
    console: Console

    def __post_init__(self) -> None:
        self.http = httpx.Client(
            base_url=f"{self.url}/api/v1/", headers={"Authorization": f"Token {self.token}"}, timeout=60
        )

    def call(self, method: str, path: str, **options: Any) -> Any:
        """Make one API call. Raises DemoFailed with the API's error message."""
        response = self.http.request(method, path, **options)
        if response.is_error:
            raise DemoFailed(f"{method} {path} answered {response.status_code}: {response.text}")
        return response.json() if response.content else None

    def activate(self) -> None:
        """Activate the service."""
        self.call("POST", "services/distributed-training/activate/", json={"accept_terms": True})
        self._report("The distributed training service is active.")

    def top_up(self) -> None:
        """Pay on the sandbox's page, and wait until the webhook has credited the wallet."""
        before = self.call("GET", "wallet/")["posted_minor"]
        top_up = self.call("POST", "wallet/top-ups/", json={"amount_minor": TOP_UP_MINOR})
        response = httpx.post(top_up["checkout_url"], data={"card": TEST_CARD}, timeout=30)
        if response.status_code != httpx.codes.SEE_OTHER:
            raise DemoFailed(f"The payment page answered {response.status_code}: {response.text[:200]}")
        for wallet in self._poll("wallet/", "the wallet to be credited"):
            if wallet["posted_minor"] >= before + TOP_UP_MINOR:
                self._report(f"The wallet has {money(wallet['available_minor'], wallet['currency'])}.")
                return

    def upload_data(self, archive: Path) -> None:
        """Create the dataset and publish its files, unless an earlier demo has done so."""
        versions = {dataset["name"]: dataset["latest"] for dataset in self.call("GET", "datasets/")["results"]}
        if DATASET not in versions:
            self.call("POST", "datasets/", json={"name": DATASET, "description": "Handwritten digits, MNIST layout."})
        if versions.get(DATASET) is None:
            with archive.open("rb") as body:
                version = self.call("PUT", f"datasets/{DATASET}/archive/", content=body)
            self._report(
                f"Dataset {DATASET}: {version['file_count']} files, {version['size_bytes']:,} bytes, published."
            )

    def upload_script(self, script: Path) -> None:
        """Upload the script to the workspace."""
        self.call("PUT", f"workspaces/{WORKSPACE}/files/{SCRIPT}", content=script.read_bytes())
        self._report(f"Workspace {WORKSPACE}: {SCRIPT} uploaded.")

    def buy(self) -> int:
        """Request a quote, show it and buy it. Return the job's id."""
        quote = self.call("POST", "quotes/", json=SETTINGS)
        currency, estimate = quote["currency"], quote["estimate"]
        self._report(
            f"Quote: probably {money(estimate['p50_minor'], currency)}, at most "
            f"[bold]{money(quote['ceiling_minor'], currency)}[/bold]. {estimate['basis']['sentence']}"
        )
        order = self.call(
            "POST", "orders/", json={"quote": quote["id"]}, headers={"Idempotency-Key": f"demo-{quote['id']}"}
        )
        self._report(f"Bought: job {order['job']}, {SETTINGS['nodes']} nodes of {SETTINGS['node_spec']}.")
        return int(order["job"])

    def follow(self, job_id: int) -> dict[str, Any]:
        """Show the run's progress until it ends. Return the ended job."""
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console) as bar:
            task = bar.add_task("queued", total=1.0)
            for name, data in self.events(job_id):
                if name == "metrics":
                    continue
                progress = data["progress"]
                description = data["waiting_for"] or f"{data['state']}, epoch {progress['epoch']}/{progress['epochs']}"
                bar.update(task, description=description, completed=progress["fraction"])
                if data["finished_at"]:
                    return dict(data)
        raise DemoFailed("The live stream of the job ended before the job did.")

    def events(self, job_id: int) -> Iterator[tuple[str, Any]]:
        """Yield the job's events as (name, data) until it ends."""
        return self._stream(f"jobs/{job_id}/stream/")

    def result(self, job_id: int) -> TrainingResult:
        """Return loss and accuracy of a run. Raises DemoFailed if the model did not improve."""
        curves = self.call("GET", f"jobs/{job_id}/metrics/")["metrics"]
        try:
            loss, accuracy = curves["loss"], curves["accuracy"]
            result = TrainingResult(loss[0][1], loss[-1][1], accuracy[-1][1])
        except (KeyError, IndexError):
            raise DemoFailed(f"The run reported no loss and accuracy, but {sorted(curves)}.") from None
        if result.last_loss >= result.first_loss or result.accuracy < MIN_ACCURACY:
            raise DemoFailed(
                f"The run did not learn: loss {result.first_loss:.3f} -> {result.last_loss:.3f}, "
                f"accuracy {result.accuracy:.3f}."
            )
        return result

    def receipt(self, job_id: int) -> Table:
        """Return the itemized receipt as a table."""
        receipt = self.call("GET", f"jobs/{job_id}/receipt/")
        currency = receipt["currency"]
        table = Table(title=f"Receipt {receipt['title']}", title_justify="left", show_footer=True)
        table.add_column("Item", footer="Total")
        table.add_column("Quantity", justify="right")
        ceiling = money(receipt["ceiling_minor"], currency)
        table.add_column("Amount", justify="right", footer=f"{money(receipt['total_minor'], currency)} (≤ {ceiling})")
        for line in receipt["lines"]:
            table.add_row(
                line["title"],
                f"{line['quantity']} {line['unit'].replace('_', ' ')}",
                money(line["amount_minor"], currency),
            )
        return table

    def last_lines(self, job_id: int, count: int = 15) -> str:
        """Return the last lines of rank 0's output."""
        text, offset, eof = "", 0, False
        while not eof:  # also ends if no more output comes, even if the log is not complete
            chunk = self.call("GET", f"jobs/{job_id}/logs/", params={"rank": 0, "offset": offset})
            text, eof = text + chunk["text"], chunk["eof"] or chunk["next_offset"] == offset
            offset = chunk["next_offset"]
        return "\n".join(text.splitlines()[-count:])

    def _report(self, message: str) -> None:
        self.console.print(f"[green]✓[/green] {message}", highlight=False)

    def _poll(self, path: str, purpose: str) -> Iterator[Any]:
        """Yield responses until the caller stops. Raises DemoFailed with `purpose` after STEP_TIMEOUT_SECONDS."""
        deadline = time.monotonic() + STEP_TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            yield self.call("GET", path)
            time.sleep(0.2)  # the API has no event stream for wallets
        raise DemoFailed(f"Waited {STEP_TIMEOUT_SECONDS} s for {purpose}.")

    def _stream(self, path: str) -> Iterator[tuple[str, Any]]:
        """Yield the events of a stream as (name, data)."""
        url = urljoin(str(self.http.base_url), path)
        timeout = httpx.Timeout(60, read=STEP_TIMEOUT_SECONDS)
        with self.http.stream("GET", url, headers={"Accept": "text/event-stream"}, timeout=timeout) as response:
            if response.is_error:
                raise DemoFailed(f"GET {path} answered {response.status_code}: {response.read().decode()}")
            name = ""
            for line in response.iter_lines():
                field, _, value = line.partition(": ")
                if field == "event":
                    name = value
                elif field == "data":
                    yield name, json.loads(value)
