"""Client processes for `bench.money`, each with a database connection, that post to the ledger on command.

`ledger.post`, and the plain SQL statement that it is compared with, write the same rows of the same tables, under the
same constraints and triggers.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import django
import psycopg

ONE_STATEMENT = """
WITH posting AS (
    INSERT INTO billing_transaction (reference, kind, description, created_at)
    VALUES (%s, 'bench', 'A posting', now()) RETURNING id
), posted AS (
    INSERT INTO billing_entry (transaction_id, account_id, amount_minor)
    SELECT posting.id, entry.account, entry.amount
    FROM posting, (VALUES (%s::bigint, %s::bigint), (%s::bigint, %s::bigint)) AS entry(account, amount)
    RETURNING account_id, amount_minor
)
UPDATE billing_account SET posted_minor = posted_minor + posted.amount_minor
FROM posted WHERE billing_account.id = posted.account_id
"""
"""The plain SQL statement: it writes a transaction with two entries, and both balances."""
AccountPair = tuple[int, int]
"""The accounts that an amount is posted from and to, by primary key."""


class Command(NamedTuple):
    """Post `count` transactions as one client, with references that begin with `label`.

    `method`: "ours" for `ledger.post`, "sql" for ONE_STATEMENT.
    """

    method: str
    pairs: list[AccountPair]
    count: int
    label: str


def run_client(*, number: int, clients: int, address: dict[str, Any], commands: Any, start: Any, done: Any) -> None:
    """Run one process: for each Command from the queue `commands`, post its transactions, then put `number` in `done`.

    `start` is a barrier at which all clients and `LedgerClients.post` wait, so that all begin at once. The
    command None ends the process.
    """
    django.setup()
    from django.db import connection  # noqa: PLC0415 - Django must be set up first

    from billing import ledger  # noqa: PLC0415 - as above
    from billing.models import Account  # noqa: PLC0415 - as above

    accounts: dict[int, Any] = {account.pk: account for account in Account.objects.all()}
    connection.ensure_connection()
    database = psycopg.connect(**address, autocommit=True)
    while (command := commands.get()) is not None:
        start.wait()
        for posting in range(command.count):
            # All clients together use the pairs in turn, so that they meet on one pair as seldom as possible.
            source, target = command.pairs[(number + posting * clients) % len(command.pairs)]
            reference = f"{command.label}:{number}:{posting}"
            if command.method == "ours":
                ledger.post(
                    reference=reference,
                    kind="bench",
                    description="A posting",
                    entries=[(accounts[source], -1), (accounts[target], 1)],
                )
            else:
                database.execute(ONE_STATEMENT, (reference, source, -1, target, 1))
        done.put(number)


class LedgerClients:
    """The client processes; a context manager."""

    def __init__(self, address: dict[str, Any], count: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._start, self._done = spawn.Barrier(count + 1), spawn.Queue()
        self._commands = [spawn.Queue() for _ in range(count)]
        shared = {"clients": count, "address": address, "start": self._start, "done": self._done}
        self._processes = [
            spawn.Process(target=run_client, kwargs=shared | {"number": number, "commands": commands}, daemon=True)
            for number, commands in enumerate(self._commands)
        ]
        self._rounds = 0

    def __enter__(self) -> LedgerClients:
        for process in self._processes:
            process.start()
        return self

    def __exit__(self, *_error: object) -> None:
        for commands in self._commands:
            commands.put(None)
        for process in self._processes:
            process.join()

    def post(self, method: str, pairs: Sequence[AccountPair], count: int) -> tuple[float, str]:
        """Let every client post `count` times, all at the same time; return postings per second and their label."""
        self._rounds += 1
        label = f"bench:{method}:{self._rounds}"
        for commands in self._commands:
            commands.put(Command(method, list(pairs), count, label))
        self._start.wait()
        started_at = time.perf_counter()
        for _client in self._commands:
            self._done.get()
        return count * len(self._commands) / (time.perf_counter() - started_at), label
