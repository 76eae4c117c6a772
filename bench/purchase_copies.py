"""Create thousands of purchases in seconds: buy a few through the product, and copy their rows by SQL.

A copy differs from its original only in its keys and times, so queries work on it as on a real purchase.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db import connection, models

from billing.models import Account, Hold, Quote
from jobs.models import Attempt, Job, JobEvent, Order
from jobs.states import JobState
from tests.factories.jobs import Customer

LARGE_BALANCE_MINOR = 10**12
"""A balance that no benchmark can spend."""


class PurchaseCopies:
    """One purchase of each shape (node spec, nodes) by each of several organizations, and copies of them.

    The simulated cluster has cores only while the originals are bought, so that the copies stay in the queue.
    """

    def __init__(self, cluster: Any, organizations: int, shapes: Sequence[tuple[str, int]]) -> None:
        cluster.cores = 4096.0  # more than all originals together need
        customers = [Customer(cluster) for _ in range(organizations)]
        for customer in customers:
            customer.quota(max_running_nodes=10_000, max_open_jobs=1_000_000)
        self._originals = [
            customer.job(node_spec=spec, nodes=nodes).pk for customer in customers for spec, nodes in shapes
        ]
        cluster.cores = 0.0
        Account.objects.filter(kind=Account.Kinds.WALLET).update(posted_minor=LARGE_BALANCE_MINOR)

    def queue_up_to(self, count: int) -> None:
        """Add queued jobs until there are `count`."""
        self._copy(count - Job.objects.filter(state=JobState.QUEUED).count())
        self._update_balances()

    def add_finished(self, count: int) -> None:
        """Add `count` jobs that have succeeded."""
        last_job_pk = Job.objects.latest("pk").pk
        self._copy(count)
        self._execute(
            "INSERT INTO jobs_attempt (job_id, number, backend, granted_nodes, claimed_at, submitted_at, started_at, "
            "finished_at, reason, detail, nodes, spans, restarts, cursor) SELECT id, 1, 'default', nodes, queued_at, "
            "queued_at, queued_at, now(), 'completed', '', '[]', '[]', 0, '{}' FROM jobs_job WHERE id > %s",
            [last_job_pk],
        )
        for kind in ("ordered", "starting", "running", "succeeded"):
            self._execute(
                "INSERT INTO jobs_jobevent (job_id, attempt, kind, data, created_at) "
                "SELECT id, 1, %s, '{}', queued_at FROM jobs_job WHERE id > %s",
                [kind, last_job_pk],
            )
        # A constraint requires a charge in a settled hold; its amount does not matter here.
        self._execute(
            "UPDATE billing_hold SET state = 'settled', charged_minor = 1, ended_at = now() WHERE id IN (SELECT "
            "jobs_order.hold_id FROM jobs_order JOIN jobs_job ON order_id = jobs_order.id WHERE jobs_job.id > %s)",
            [last_job_pk],
        )
        Job.objects.filter(pk__gt=last_job_pk).update(
            state=JobState.SUCCEEDED, reason="completed", finished_at=models.F("queued_at")
        )
        self._update_balances()

    def _copy(self, count: int) -> None:
        """Add `count` queued copies of the originals."""
        if count <= 0:
            return
        # One row per copy: its original, in turn, and the keys of its own quote, order and hold.
        self._execute(
            "CREATE TEMP TABLE copies AS SELECT original, number, gen_random_uuid() AS quote, gen_random_uuid() AS "
            "\"order\", nextval(pg_get_serial_sequence('billing_hold', 'id')) AS hold FROM "
            "(SELECT number, (%s::bigint[])[1 + number %% %s] AS original FROM generate_series(0, %s) AS number) AS o",
            [self._originals, len(self._originals), count - 1],
        )
        self._insert(Quote, {"id": "copies.quote"}, "source.id = original_order.quote_id")
        hold = {"id": "copies.hold", "quote_id": "copies.quote", "reference": "copies.quote::text", "state": "'held'"}
        hold |= {"charged_minor": "NULL", "ended_at": "NULL", "metered_minor": "0"}
        self._insert(Hold, hold, "source.id = original_order.hold_id")
        order = {"quote_id": "copies.quote", "hold_id": "copies.hold", "idempotency_key": "copies.quote::text"}
        self._insert(Order, {"id": 'copies."order"', **order}, "source.id = original_order.id")
        # Copies wait behind all jobs that wait already, a millisecond apart.
        job = {"id": "DEFAULT", "order_id": 'copies."order"', "queued_at": "now() + number * interval '1 ms'"}
        state = {"state": "'queued'", "reason": "''", "started_at": "NULL", "finished_at": "NULL", "progress": "0"}
        self._insert(Job, job | state, "source.id = copies.original")
        self._execute("DROP TABLE copies")

    def _insert(self, model: type[models.Model], changes: dict[str, str], condition: str) -> None:
        """Insert one row per copy. `changes` has SQL for the columns that differ from the original, `source`."""
        columns = [field.column for field in model._meta.local_fields]  # noqa: SLF001 - Django documents `_meta`
        values = {column: changes.get(column, f'source."{column}"') for column in columns}
        values = {column: value for column, value in values.items() if value != "DEFAULT"}
        table = model._meta.db_table  # noqa: SLF001 - as above
        names = ", ".join(f'"{column}"' for column in values)
        self._execute(
            f"INSERT INTO {table} ({names}) "  # noqa: S608 - our own names
            f"SELECT {', '.join(values.values())} FROM copies JOIN jobs_job ON jobs_job.id = copies.original "
            f"JOIN jobs_order AS original_order ON original_order.id = jobs_job.order_id "
            f"JOIN {table} AS source ON {condition}"
        )

    def _update_balances(self) -> None:
        """Add the new holds to the wallets, and update the planner's statistics as autovacuum would."""
        self._execute(
            "UPDATE billing_account SET held_minor = held.total FROM (SELECT account_id, sum(amount_minor) AS total "
            "FROM billing_hold WHERE state = 'held' GROUP BY account_id) AS held WHERE account_id = billing_account.id"
        )
        for model in (Job, Attempt, JobEvent, Order, Hold, Quote, Account):
            self._execute(f"VACUUM ANALYZE {model._meta.db_table}")  # noqa: SLF001 - as above

    @staticmethod
    def _execute(statement: str, values: Sequence[Any] | None = None) -> None:
        with connection.cursor() as cursor:
            cursor.execute(statement, values)
