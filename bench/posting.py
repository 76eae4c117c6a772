"""Clients of the ledger for `bench.money`: processes with a connection each, that post when they are told.

The one rule: both ways write the same rows of the same tables, under the same constraints and triggers.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from typing import Any

import django
import psycopg

BARE = """
WITH fresh AS (
    INSERT INTO billing_transaction (reference, kind, description, created_at)
    VALUES (%s, 'bench', 'A posting', now()) RETURNING id
), written AS (
    INSERT INTO billing_entry (transaction_id, account_id, amount_minor)
    SELECT fresh.id, part.account, part.amount
    FROM fresh, (VALUES (%s::bigint, %s::bigint), (%s::bigint, %s::bigint)) AS part(account, amount)
    RETURNING account_id, amount_minor
)
UPDATE billing_account SET posted_minor = posted_minor + written.amount_minor
FROM written WHERE billing_account.id = written.account_id
"""
Pair = tuple[int, int]


def client(number: int, address: dict[str, Any], orders: Any, begin: Any, done: Any) -> None:
    """A process: takes (way, pairs of accounts, count, label), waits for the others, posts, and says so."""
    django.setup()
    from django.db import connection  # noqa: PLC0415 - Django must be set up first

    from billing import ledger  # noqa: PLC0415 - as above
    from billing.models import Account  # noqa: PLC0415 - as above

    accounts: dict[int, Any] = {account.pk: account for account in Account.objects.all()}
    connection.ensure_connection()
    bare = psycopg.connect(**address, autocommit=True)
    while (order := orders.get()) is not None:
        way, pairs, count, label = order
        begin.wait()
        for turn in range(count):
            source, target = pairs[(number + turn * 8) % len(pairs)]
            reference = f"{label}:{number}:{turn}"
            if way == "ours":
                ledger.post(
                    reference=reference,
                    kind="bench",
                    description="A posting",
                    entries=[(accounts[source], -1), (accounts[target], 1)],
                )
            else:
                bare.execute(BARE, (reference, source, -1, target, 1))
        done.put(number)


class Clients:
    """The processes; a context manager."""

    def __init__(self, address: dict[str, Any], count: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._begin, self._done = spawn.Barrier(count + 1), spawn.Queue()
        self._orders = [spawn.Queue() for _ in range(count)]
        self._processes = [
            spawn.Process(target=client, args=(number, address, orders, self._begin, self._done), daemon=True)
            for number, orders in enumerate(self._orders)
        ]
        self._rounds = 0

    def __enter__(self) -> Clients:
        for process in self._processes:
            process.start()
        return self

    def __exit__(self, *_error: object) -> None:
        for orders in self._orders:
            orders.put(None)
        for process in self._processes:
            process.join()

    def post(self, way: str, pairs: Sequence[Pair], each: int) -> tuple[float, str]:
        """Every client posts `each` times, all at once. Gives postings per second, and how their references begin."""
        self._rounds += 1
        label = f"bench:{way}:{self._rounds}"
        for orders in self._orders:
            orders.put((way, list(pairs), each, label))
        self._begin.wait()
        begun = time.perf_counter()
        for _ in self._orders:
            self._done.get()
        return each * len(self._orders) / (time.perf_counter() - begun), label
