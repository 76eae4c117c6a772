"""The demo's customer: buys a training run through the public HTTP API and follows it, as anybody would.

The one rule: everything a customer does goes through the API with a token; only the accounts themselves are made
beforehand (signing up is a page's work), in `manage.py demo`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from billing.wording import money

DATASET = "digits"
WORKSPACE = "main"
SCRIPT = "mnist_ddp.py"
TOP_UP_MINOR = 2000
TEST_CARD = "4242 4242 4242 4242"
PATIENCE_SECONDS = 120
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


class DemoFailed(Exception):
    """The demo did not get where it should; the text says where and why."""


@dataclass
class Customer:
    """A client of the API with a token."""

    url: str
    token: str
    console: Console

    def __post_init__(self) -> None:
        self.http = httpx.Client(
            base_url=f"{self.url}/api/v1/", headers={"Authorization": f"Token {self.token}"}, timeout=60
        )

    def call(self, method: str, path: str, **options: Any) -> Any:
        """One call. Raises DemoFailed with the API's own sentence for an error."""
        answer = self.http.request(method, path, **options)
        if answer.is_error:
            raise DemoFailed(f"{method} {path} answered {answer.status_code}: {answer.text}")
        return answer.json() if answer.content else None

    def activate(self) -> None:
        """Take up the service."""
        self.call("POST", "services/distributed-training/activate/", json={"accept_terms": True})
        self._say("The distributed training service is active.")

    def top_up(self) -> None:
        """Pay in through the sandbox's page, and wait until the webhook has credited the wallet."""
        before = self.call("GET", "wallet/")["posted_minor"]
        top_up = self.call("POST", "wallet/top-ups/", json={"amount_minor": TOP_UP_MINOR})
        paid = httpx.post(top_up["checkout_url"], data={"card": TEST_CARD}, timeout=30)
        if paid.status_code != httpx.codes.SEE_OTHER:
            raise DemoFailed(f"The payment page answered {paid.status_code}: {paid.text[:200]}")
        for wallet in self._until("wallet/", "the wallet to be credited"):
            if wallet["posted_minor"] >= before + TOP_UP_MINOR:
                self._say(f"The wallet has {_money(wallet['available_minor'], wallet['currency'])}.")
                return

    def bring_data(self, archive: Path) -> None:
        """Create the dataset and publish its files, unless an earlier demo did."""
        known = {dataset["name"]: dataset["latest"] for dataset in self.call("GET", "datasets/")["results"]}
        if DATASET not in known:
            self.call("POST", "datasets/", json={"name": DATASET, "description": "Handwritten digits, MNIST layout."})
        if known.get(DATASET) is None:
            with archive.open("rb") as body:
                version = self.call("PUT", f"datasets/{DATASET}/archive/", content=body)
            self._say(f"Dataset {DATASET}: {version['file_count']} files, {version['size_bytes']:,} bytes, published.")

    def bring_code(self, script: Path) -> None:
        """Put the script into the workspace."""
        self.call("PUT", f"workspaces/{WORKSPACE}/files/{SCRIPT}", content=script.read_bytes())
        self._say(f"Workspace {WORKSPACE}: {SCRIPT} is there.")

    def buy(self) -> int:
        """Ask for a quote, show it, buy it. Gives the job's id."""
        quote = self.call("POST", "quotes/", json=SETTINGS)
        currency, estimate = quote["currency"], quote["estimate"]
        self._say(
            f"Quote: probably {_money(estimate['p50_minor'], currency)}, at most "
            f"[bold]{_money(quote['ceiling_minor'], currency)}[/bold]. {estimate['basis']['sentence']}"
        )
        order = self.call(
            "POST", "orders/", json={"quote": quote["id"]}, headers={"Idempotency-Key": f"demo-{quote['id']}"}
        )
        self._say(f"Bought: job {order['job']}, {SETTINGS['nodes']} nodes of {SETTINGS['node_spec']}.")
        return int(order["job"])

    def follow(self, job: int) -> dict[str, Any]:
        """Show the run live until it ends. Gives the job as it ended."""
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console) as bar:
            task = bar.add_task("queued", total=1.0)
            for name, data in self.events(job):
                if name == "metrics":
                    continue
                progress = data["progress"]
                words = data["waiting_for"] or f"{data['state']}, epoch {progress['epoch']}/{progress['epochs']}"
                bar.update(task, description=words, completed=progress["fraction"])
                if data["finished_at"]:
                    return dict(data)
        raise DemoFailed("The live stream of the job ended before the job did.")

    def events(self, job: int) -> Iterator[tuple[str, Any]]:
        """What happens to a job as it does, as (name, data), to its end."""
        return self._stream(f"jobs/{job}/stream/")

    def result(self, job: int) -> tuple[float, float, float]:
        """First loss, last loss and test accuracy of a run that learnt. Raises DemoFailed for one that didn't."""
        curves = self.call("GET", f"jobs/{job}/metrics/")["metrics"]
        try:
            loss, accuracy = curves["loss"], curves["accuracy"]
            first, last, reached = loss[0][1], loss[-1][1], accuracy[-1][1]
        except (KeyError, IndexError):
            raise DemoFailed(f"The run reported no loss and accuracy, but {sorted(curves)}.") from None
        if last >= first or reached < 0.8:
            raise DemoFailed(f"The run did not learn: loss {first:.3f} -> {last:.3f}, accuracy {reached:.3f}.")
        return first, last, reached

    def receipt(self, job: int) -> Table:
        """The itemised receipt as a table."""
        receipt = self.call("GET", f"jobs/{job}/receipt/")
        currency = receipt["currency"]
        table = Table(title=f"Receipt {receipt['title']}", title_justify="left", show_footer=True)
        table.add_column("Item", footer="Total")
        table.add_column("Quantity", justify="right")
        ceiling = _money(receipt["ceiling_minor"], currency)
        table.add_column("Amount", justify="right", footer=f"{_money(receipt['total_minor'], currency)} (≤ {ceiling})")
        for line in receipt["lines"]:
            table.add_row(
                line["title"],
                f"{line['quantity']} {line['unit'].replace('_', ' ')}",
                _money(line["amount_minor"], currency),
            )
        return table

    def last_lines(self, job: int, count: int = 15) -> str:
        """The end of rank 0's output."""
        text, offset, eof = "", 0, False
        while not eof:
            piece = self.call("GET", f"jobs/{job}/logs/", params={"rank": 0, "offset": offset})
            text, eof = text + piece["text"], piece["eof"] or piece["next_offset"] == offset
            offset = piece["next_offset"]
        return "\n".join(text.splitlines()[-count:])

    def _say(self, words: str) -> None:
        self.console.print(f"[green]✓[/green] {words}", highlight=False)

    def _until(self, path: str, what: str) -> Iterator[Any]:
        """Ask again until the caller is content. Raises DemoFailed when patience is over."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            yield self.call("GET", path)
            time.sleep(0.2)  # a client of the API has no event to wait for here
        raise DemoFailed(f"Waited {PATIENCE_SECONDS} s for {what}.")

    def _stream(self, path: str) -> Iterator[tuple[str, Any]]:
        """Events of a stream, as (name, data)."""
        url = urljoin(str(self.http.base_url), path)
        timeout = httpx.Timeout(60, read=PATIENCE_SECONDS)
        with self.http.stream("GET", url, headers={"Accept": "text/event-stream"}, timeout=timeout) as answer:
            if answer.is_error:
                raise DemoFailed(f"GET {path} answered {answer.status_code}: {answer.read().decode()}")
            name = ""
            for line in answer.iter_lines():
                field, _, value = line.partition(": ")
                if field == "event":
                    name = value
                elif field == "data":
                    yield name, json.loads(value)


def _money(amount_minor: int, currency: str) -> str:
    return money(amount_minor, currency)
