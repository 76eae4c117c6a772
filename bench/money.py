"""How many webhooks one web process stores and how many transactions the ledger posts per second, beside baselines.

make bench NAME=money (QUICK=1 for fewer rounds)

The database is a durable PostgreSQL (embedded, with fsync), and there are 8 clients. The console's complete webhook
passes the middleware, checks the signature, stores the event, and sends a message to a worker. It is compared with a
bare Django view with the same check and one SQL insert. `ledger.post` is compared with one SQL statement that writes
the same rows and changes the same balances: on one pair of accounts that all clients share (hot), and on 100 pairs
(spread). The rows are counted after each measurement.
"""

from __future__ import annotations

import functools
import json
import os
import selectors
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import stripe

from bench import rounds
from bench.environment import ROOT, temporary_installation

if TYPE_CHECKING:
    from bench.ledger_clients import AccountPair, LedgerClients

CLIENTS = 8
"""Connections that send webhooks, and processes that post transactions, at the same time."""
ORGANIZATIONS = 100
WEBHOOKS, POSTINGS_PER_CLIENT = (400, 100) if rounds.is_quick() else (2000, 400)
"""How many webhooks, or transactions of each client, one measurement counts."""
ROUNDS = 3 if rounds.is_quick() else 9
LARGE_BALANCE_MINOR = 10**12
"""A balance that no measurement can spend."""
APPLICATIONS = {"webhook_ours": "console.asgi", "webhook_raw": "bench.bare_webhook"}
"""The module of the ASGI application, by the name of the measurement."""
GOAL = 0.5
"""Minimum ratio of each measurement to its baseline."""


class WebServer:
    """One web process as `manage.py up` starts it, on a Unix socket; a context manager."""

    def __init__(self, application: str, folder: Path) -> None:
        self._socket = folder / f"{application}.sock"
        self._application = application
        self._log = folder / f"{application}.log"

    def __enter__(self) -> WebServer:
        command = [
            sys.executable, "-m", "uvicorn", f"{self._application}:application", "--http", "h11", "--ws", "none",
            "--timeout-keep-alive", "60", "--uds", str(self._socket), "--no-access-log",
        ]  # fmt: skip
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, start_new_session=True, stdout=log, stderr=subprocess.STDOUT
            )
        while not self._is_ready():
            if self._process.poll() is not None:
                raise SystemExit(f"{self._application} did not start:\n{self._log.read_text()}")
            time.sleep(0.05)  # there is no event for another process's readiness
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.terminate()
        self._process.wait()

    def send(self, requests: Sequence[bytes]) -> float:
        """Send all requests over `CLIENTS` connections that each wait for a response; return requests per second."""
        remaining = iter(requests)
        with selectors.DefaultSelector() as selector, ExitStack() as connections:
            started_at = time.perf_counter()
            for _ in range(CLIENTS):
                client = connections.enter_context(socket.socket(socket.AF_UNIX))
                client.connect(str(self._socket))
                client.sendall(next(remaining))
                selector.register(client, selectors.EVENT_READ)
            answered = 0
            while answered < len(requests):
                for key, _mask in selector.select():
                    client = key.fileobj  # type: ignore[assignment]  # it is the socket that was registered
                    response = client.recv(65536)
                    if not response.startswith(b"HTTP/1.1 200"):
                        raise SystemExit(
                            f"{self._application} answered {response[:200]!r}\n{self._log.read_text()[-3000:]}"
                        )
                    answered += 1
                    if request := next(remaining, b""):
                        client.sendall(request)
            return len(requests) / (time.perf_counter() - started_at)

    def _is_ready(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self._socket))
                probe.sendall(b"GET /webhooks/stripe/ HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
                return probe.recv(12).startswith(b"HTTP/1.1")
            except OSError:
                return False


def webhook_requests(count: int) -> list[bytes]:
    """Return signed requests for new events, as Stripe sends them."""
    from billing import gateway  # noqa: PLC0415 - Django must be set up first

    requests = []
    for _ in range(count):
        session = {
            "id": f"cs_test_{uuid.uuid4().hex}", "object": "checkout.session", "amount_total": 5000, "currency": "usd",
            "client_reference_id": str(uuid.uuid4()), "customer": f"cus_{uuid.uuid4().hex[:14]}", "mode": "payment",
            "payment_intent": f"pi_{uuid.uuid4().hex}", "payment_status": "paid", "status": "complete",
            "success_url": "https://trainyard.example.com/wallet/?paid=1", "metadata": {}, "custom_fields": [],
            "customer_details": {"email": "ada@example.com", "name": "Ada", "address": {"country": "GB"}},
            "payment_method_options": {"card": {"request_three_d_secure": "automatic"}}, "total_details": {},
        }  # fmt: skip
        event = {
            "id": f"evt_{uuid.uuid4().hex}", "object": "event", "api_version": gateway.API_VERSION, "livemode": False,
            "created": int(time.time()), "type": "checkout.session.completed", "data": {"object": session},
            "pending_webhooks": 1, "request": {"id": None, "idempotency_key": None},
        }  # fmt: skip
        body = json.dumps(event, indent=2)
        signature = stripe.WebhookSignature.generate_signature_header(
            body, gateway.webhook_secrets()[0], int(time.time())
        )
        requests.append(
            b"POST /webhooks/stripe/ HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: Stripe/1.0\r\nAccept: */*\r\n"
            b"Content-Type: application/json; charset=utf-8\r\nStripe-Signature: %b\r\nContent-Length: %d\r\n\r\n%b"
            % (signature.encode(), len(body), body.encode())
        )
    return requests


def create_accounts() -> list[AccountPair]:
    """Create a wallet with money and a receivable account for each organization; return the pairs."""
    from billing.models import Account  # noqa: PLC0415 - Django must be set up first
    from console.accounts.models import Organization  # noqa: PLC0415 - as above

    pairs = []
    for number in range(ORGANIZATIONS):
        organization = Organization.objects.create(name=f"Bench {number}", slug=f"bench-{number}")
        wallet = Account.objects.create(
            organization=organization, kind=Account.Kinds.WALLET, currency="USD", posted_minor=LARGE_BALANCE_MINOR
        )
        receivable = Account.objects.create(organization=organization, kind=Account.Kinds.RECEIVABLE, currency="USD")
        pairs.append((wallet.pk, receivable.pk))
    return pairs


class Measurements:
    """The measurements, each with a check of its result."""

    def __init__(
        self,
        database: psycopg.Connection[Any],
        servers: dict[str, WebServer],
        clients: LedgerClients,
        pairs: list[AccountPair],
    ) -> None:
        self._database = database
        self._servers = servers
        self._clients = clients
        self._pairs = pairs

    def variants(self) -> list[rounds.Variant]:
        """Return all variants."""
        variants = [rounds.Variant(name, functools.partial(self.webhooks, name)) for name in self._servers]
        for name, pairs in (("hot", self._pairs[:1]), ("spread", self._pairs)):
            for method in ("ours", "sql"):
                measure = functools.partial(self.postings, method, pairs)
                variants.append(rounds.Variant(f"posting_{name}_{method}", measure))
        return variants

    def webhooks(self, server: str) -> float:
        """Return webhooks per second. Checks that each event was stored."""
        rate = self._servers[server].send(webhook_requests(WEBHOOKS))
        self._require_count("SELECT count(*) FROM billing_stripeevent WHERE state = 'received'", WEBHOOKS)
        self._database.execute("TRUNCATE billing_stripeevent")
        return rate

    def postings(self, method: str, pairs: Sequence[AccountPair]) -> float:
        """Return postings per second. Checks that each was stored, and that the balances changed by their sum."""
        balance = self._receivable_balance(pairs)
        rate, label = self._clients.post(method, pairs, POSTINGS_PER_CLIENT)
        count = POSTINGS_PER_CLIENT * CLIENTS
        self._require_count(f"SELECT count(*) FROM billing_transaction WHERE reference LIKE '{label}:%'", count)  # noqa: S608 - our own label
        if self._receivable_balance(pairs) - balance != count:
            raise SystemExit(f"{label}: the balances did not change by {count}")
        return rate

    def _receivable_balance(self, pairs: Sequence[AccountPair]) -> int:
        query = "SELECT sum(posted_minor) FROM billing_account WHERE id = ANY(%s)"
        return int(self._database.execute(query, ([receivable for _wallet, receivable in pairs],)).fetchone()[0])

    def _require_count(self, query: str, expected: int) -> None:
        count = self._database.execute(query).fetchone()[0]
        if count != expected:
            raise SystemExit(f"{query}: {count}, not {expected}")


def main() -> None:
    """Measure, then print the table and the JSON object."""
    with ExitStack() as resources:
        settings = resources.enter_context(temporary_installation())
        from bench.ledger_clients import LedgerClients  # noqa: PLC0415 - Django must be set up first

        settings.STATIC_ROOT.mkdir()  # WhiteNoise warns if the folder is missing; `manage.py up` would create it
        address = {"host": str(settings.EMBEDDED.socket_dir), "user": "postgres", "dbname": "trainyard"}
        database = resources.enter_context(psycopg.connect(**address, autocommit=True))
        for setting in ("fsync", "synchronous_commit", "full_page_writes"):
            if database.execute(f"SHOW {setting}").fetchone() != ("on",):
                raise SystemExit(f"{setting} is off: this PostgreSQL is not durable")
        folder = Path(os.environ["TRAINYARD_VAR"])
        servers = {
            name: resources.enter_context(WebServer(application, folder)) for name, application in APPLICATIONS.items()
        }
        pairs = create_accounts()
        clients = resources.enter_context(LedgerClients(address, CLIENTS))
        rates = rounds.measure(Measurements(database, servers, clients, pairs).variants(), ROUNDS, "/s")
    figures = rounds.summaries(rates)
    rounds.print_table(f"per second, {CLIENTS} clients", figures)
    ratios = {
        "webhook_vs_raw": rounds.ratio(figures, "webhook_ours", "webhook_raw"),
        "posting_hot_vs_sql": rounds.ratio(figures, "posting_hot_ours", "posting_hot_sql"),
        "posting_spread_vs_sql": rounds.ratio(figures, "posting_spread_ours", "posting_spread_sql"),
    }
    for name, ratio in ratios.items():
        print(f"{name} {ratio:.2f} (goal: at least {GOAL:.2f})")
    rounds.print_result("money", figures, ratios)


if __name__ == "__main__":
    main()
