"""How many webhooks one web process takes, and how many postings the ledger makes, beside the smallest honest baseline.

make bench NAME=money (QUICK=1 for fewer rounds)

Against a durable PostgreSQL (the embedded one, fsync on), 8 clients. The console's webhook, with all it does (every
middleware, the check, the stored event, the bell for the workers), beside a bare Django view with the same check and
one raw insert; `ledger.post` beside one bare SQL statement that writes the same rows and moves the same balances, on
one hot account and on 100. Every variant runs in each round, in random order; what came of it is counted each time.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import django
import psycopg
import stripe

from bench import rounds

HOUSE = Path(__file__).resolve().parent.parent
CLIENTS = 8
WALLETS = 100
WEBHOOKS, POSTINGS = (400, 100) if rounds.is_quick() else (2000, 400)
ROUNDS = 3 if rounds.is_quick() else 9
RICH = 10**12
APPLICATIONS = {"webhook_ours": "console.wsgi", "webhook_raw": "bench.bare_webhook"}


class WebServer:
    """One gunicorn process as `manage.py up` starts it, on a unix socket. A context manager."""

    def __init__(self, application: str, folder: Path) -> None:
        self._socket = folder / f"{application}.sock"
        self._application = application
        self._log = folder / f"{application}.log"

    def __enter__(self) -> WebServer:
        command = [
            sys.executable, "-m", "gunicorn", self._application, "--worker-class", "console.live.StreamPassingWorker",
            "--workers", "1", "--threads", str(CLIENTS), "--keep-alive", "60", "--bind", f"unix:{self._socket}",
            "--no-control-socket", "--log-file", str(self._log),
        ]  # fmt: skip
        self._process = subprocess.Popen(command, cwd=HOUSE, start_new_session=True)
        while not self._answers():
            if self._process.poll() is not None:
                raise SystemExit(f"{self._application} did not start:\n{self._log.read_text()}")
            time.sleep(0.05)  # its readiness comes with no event
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.terminate()
        self._process.wait()

    def drive(self, requests: Sequence[bytes]) -> float:
        """Send every request, over 8 connections that each wait for the answer. Gives requests per second."""
        waiting = iter(requests)
        with selectors.DefaultSelector() as poll, ExitStack() as connections:
            begun = time.perf_counter()
            for _ in range(CLIENTS):
                client = connections.enter_context(socket.socket(socket.AF_UNIX))
                client.connect(str(self._socket))
                client.sendall(next(waiting))
                poll.register(client, selectors.EVENT_READ)
            answered = 0
            while answered < len(requests):
                for key, _mask in poll.select():
                    client = key.fileobj  # type: ignore[assignment]  # it is the socket that was registered
                    answer = client.recv(65536)
                    if not answer.startswith(b"HTTP/1.1 200"):
                        raise SystemExit(
                            f"{self._application} answered {answer[:200]!r}\n{self._log.read_text()[-3000:]}"
                        )
                    answered += 1
                    if following := next(waiting, b""):
                        client.sendall(following)
            return len(requests) / (time.perf_counter() - begun)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self._socket))
                probe.sendall(b"GET /webhooks/stripe/ HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
                return probe.recv(12).startswith(b"HTTP/1.1")
            except OSError:
                return False


def webhooks(count: int) -> list[bytes]:
    """Signed requests for new events, as Stripe sends them."""
    from billing import gateway  # noqa: PLC0415 - Django must be set up first

    made = []
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
        made.append(
            b"POST /webhooks/stripe/ HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: Stripe/1.0\r\nAccept: */*\r\n"
            b"Content-Type: application/json; charset=utf-8\r\nStripe-Signature: %b\r\nContent-Length: %d\r\n\r\n%b"
            % (signature.encode(), len(body), body.encode())
        )
    return made


def accounts() -> list[tuple[int, int]]:
    """(wallet, counter account) of 100 organizations; wallets that can pay."""
    from billing.models import Account  # noqa: PLC0415 - Django must be set up first
    from console.accounts.models import Organization  # noqa: PLC0415 - as above

    pairs = []
    for number in range(WALLETS):
        owner = Organization.objects.create(name=f"Bench {number}", slug=f"bench-{number}")
        wallet = Account.objects.create(
            organization=owner, kind=Account.Kinds.WALLET, currency="USD", posted_minor=RICH
        )
        counter = Account.objects.create(organization=owner, kind=Account.Kinds.RECEIVABLE, currency="USD")
        pairs.append((wallet.pk, counter.pk))
    return pairs


class Bench:
    """What is measured, and what is counted after it."""

    def __init__(
        self, database: psycopg.Connection[Any], servers: dict[str, WebServer], clients: Any, pairs: list[Any]
    ) -> None:
        self._database, self._servers, self._clients, self._pairs = database, servers, clients, pairs

    def variants(self) -> list[rounds.Variant]:
        """Every one."""
        hot, spread = self._pairs[:1], self._pairs
        return [
            *(rounds.Variant(name, lambda name=name: self.webhook(name)) for name in self._servers),
            rounds.Variant("posting_hot_ours", lambda: self.posting("ours", hot)),
            rounds.Variant("posting_hot_sql", lambda: self.posting("sql", hot)),
            rounds.Variant("posting_spread_ours", lambda: self.posting("ours", spread)),
            rounds.Variant("posting_spread_sql", lambda: self.posting("sql", spread)),
        ]

    def webhook(self, name: str) -> float:
        """Webhooks per second; each is on record afterwards."""
        rate = self._servers[name].drive(webhooks(WEBHOOKS))
        self._expect("SELECT count(*) FROM billing_stripeevent WHERE state = 'received'", WEBHOOKS)
        self._database.execute("TRUNCATE billing_stripeevent")
        return rate

    def posting(self, way: str, pairs: Sequence[tuple[int, int]]) -> float:
        """Postings per second; afterwards each is there, and the balances have moved by as much."""
        before = self._moved(pairs)
        rate, label = self._clients.post(way, pairs, POSTINGS)
        made = POSTINGS * CLIENTS
        self._expect(f"SELECT count(*) FROM billing_transaction WHERE reference LIKE '{label}:%'", made)  # noqa: S608 - ours
        if self._moved(pairs) - before != made:
            raise SystemExit(f"{label}: the balances did not move by {made}")
        return rate

    def _moved(self, pairs: Sequence[tuple[int, int]]) -> int:
        query = "SELECT sum(posted_minor) FROM billing_account WHERE id = ANY(%s)"
        return int(self._database.execute(query, ([counter for _wallet, counter in pairs],)).fetchone()[0])

    def _expect(self, query: str, count: int) -> None:
        found = self._database.execute(query).fetchone()[0]
        if found != count:
            raise SystemExit(f"{query}: {found}, not {count}")


def main() -> None:
    """Measure, print the table, and the JSON object last."""
    with tempfile.TemporaryDirectory(prefix="ty-bench-") as name, ExitStack() as open_things:
        os.environ |= {"TRAINYARD_VAR": name, "DJANGO_SETTINGS_MODULE": "console.settings", "LOG_LEVEL": "WARNING"}
        for variable in ("DATABASE_URL", "REDIS_URL", "STRIPE_SECRET_KEY"):
            os.environ.pop(variable, None)
        django.setup()
        from django.conf import settings  # noqa: PLC0415 - Django must be set up first
        from django.core.management import call_command  # noqa: PLC0415 - as above

        from bench.posting import Clients  # noqa: PLC0415 - as above

        settings.STATIC_ROOT.mkdir()
        settings.EMBEDDED.start()
        open_things.callback(settings.EMBEDDED.stop)
        call_command("migrate", interactive=False, verbosity=0)
        address = {"host": str(settings.EMBEDDED.socket_dir), "user": "postgres", "dbname": "trainyard"}
        database = open_things.enter_context(psycopg.connect(**address, autocommit=True))
        for guard in ("fsync", "synchronous_commit", "full_page_writes"):
            if database.execute(f"SHOW {guard}").fetchone() != ("on",):
                raise SystemExit(f"{guard} is off: this PostgreSQL is not durable")
        servers = {
            variant: open_things.enter_context(WebServer(application, Path(name)))
            for variant, application in APPLICATIONS.items()
        }
        pairs = accounts()
        clients = open_things.enter_context(Clients(address, CLIENTS))
        figures = rounds.measure(Bench(database, servers, clients, pairs).variants(), ROUNDS, "/s")
    report({name: rounds.summary(rates) for name, rates in figures.items()})


def report(figures: dict[str, rounds.Figure]) -> None:
    """The table and the JSON object."""
    rounds.table("per second, 8 clients", figures)
    ratios = {
        "webhook_vs_raw": rounds.ratio(figures, "webhook_ours", "webhook_raw"),
        "posting_hot_vs_sql": rounds.ratio(figures, "posting_hot_ours", "posting_hot_sql"),
        "posting_spread_vs_sql": rounds.ratio(figures, "posting_spread_ours", "posting_spread_sql"),
    }
    for name, found in ratios.items():
        print(f"{name} {found:.2f} (goal: at least 0.70)")
    rounds.conclude("money", figures, ratios)


if __name__ == "__main__":
    main()
