"""Purchases by the thousand: rows of ones that were bought as anybody buys, copied inside the database.

The one rule: a copy differs from its original in its keys and times alone, so that every query finds what it would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db import connection, models

from billing.models import Account, Hold, Quote
from jobs.models import Attempt, Job, JobEvent, Order
from jobs.states import JobState
from tests.factories.jobs import Customer

RICH = 10**12


class Copies:
    """One purchase of each shape by each of several organizations, and its copies."""

    def __init__(self, cluster: Any, organizations: int, shapes: Sequence[tuple[str, int]]) -> None:
        cluster.cores = 4096.0
        customers = [Customer(cluster) for _ in range(organizations)]
        for customer in customers:
            customer.quota(max_running_nodes=10_000, max_open_jobs=1_000_000)
        self._originals = [
            customer.job(node_spec=spec, nodes=nodes).pk for customer in customers for spec, nodes in shapes
        ]
        cluster.cores = 0.0
        Account.objects.filter(kind=Account.Kinds.WALLET).update(posted_minor=RICH)

    def queue_up_to(self, count: int) -> None:
        """Let so many wait."""
        self._copy(count - Job.objects.filter(state=JobState.QUEUED).count())
        self._settle_down()

    def finish(self, count: int) -> None:
        """Let so many have run and ended well."""
        last = Job.objects.latest("pk").pk
        self._copy(count)
        made = Job.objects.filter(pk__gt=last)
        self._run(
            "INSERT INTO jobs_attempt (job_id, number, backend, granted_nodes, claimed_at, submitted_at, started_at, "
            "finished_at, reason, detail, nodes, spans, restarts, cursor) SELECT id, 1, 'default', nodes, queued_at, "
            "queued_at, queued_at, now(), 'completed', '', '[]', '[]', 0, '{}' FROM jobs_job WHERE id > %s",
            [last],
        )
        for kind in ("ordered", "starting", "running", "succeeded"):
            self._run(
                "INSERT INTO jobs_jobevent (job_id, attempt, kind, data, created_at) "
                "SELECT id, 1, %s, '{}', queued_at FROM jobs_job WHERE id > %s",
                [kind, last],
            )
        self._run(
            "UPDATE billing_hold SET state = 'settled', charged_minor = 1, ended_at = now() WHERE id IN (SELECT "
            "jobs_order.hold_id FROM jobs_order JOIN jobs_job ON order_id = jobs_order.id WHERE jobs_job.id > %s)",
            [last],
        )
        made.update(state=JobState.SUCCEEDED, reason="completed", finished_at=models.F("queued_at"))
        self._settle_down()

    def _copy(self, count: int) -> None:
        if count <= 0:
            return
        self._run(
            "CREATE TEMP TABLE fresh AS SELECT original, number, gen_random_uuid() AS quote, gen_random_uuid() AS "
            "\"order\", nextval(pg_get_serial_sequence('billing_hold', 'id')) AS hold FROM "
            "(SELECT number, (%s::bigint[])[1 + number %% %s] AS original FROM generate_series(0, %s) AS number) AS o",
            [self._originals, len(self._originals), count - 1],
        )
        self._insert(Quote, {"id": "fresh.quote"}, "source.id = origin.quote_id")
        hold = {"id": "fresh.hold", "quote_id": "fresh.quote", "reference": "fresh.quote::text", "state": "'held'"}
        hold |= {"charged_minor": "NULL", "ended_at": "NULL", "metered_minor": "0"}
        self._insert(Hold, hold, "source.id = origin.hold_id")
        order = {"quote_id": "fresh.quote", "hold_id": "fresh.hold", "idempotency_key": "fresh.quote::text"}
        self._insert(Order, {"id": 'fresh."order"', **order}, "source.id = origin.id")
        # Fresh ones wait behind those that wait already, a millisecond apart.
        job = {"id": "DEFAULT", "order_id": 'fresh."order"', "queued_at": "now() + number * interval '1 ms'"}
        state = {"state": "'queued'", "reason": "''", "started_at": "NULL", "finished_at": "NULL", "progress": "0"}
        self._insert(Job, job | state, "source.id = fresh.original")
        self._run("DROP TABLE fresh")

    def _insert(self, model: type[models.Model], changes: dict[str, str], where: str) -> None:
        columns = [field.column for field in model._meta.local_fields]  # noqa: SLF001 - Django's own way to them
        chosen = {column: changes.get(column, f'source."{column}"') for column in columns}
        chosen = {column: value for column, value in chosen.items() if value != "DEFAULT"}
        table = model._meta.db_table  # noqa: SLF001 - as above
        names = ", ".join(f'"{column}"' for column in chosen)
        self._run(
            f"INSERT INTO {table} ({names}) "  # noqa: S608 - our own names
            f"SELECT {', '.join(chosen.values())} FROM fresh JOIN jobs_job ON jobs_job.id = fresh.original "
            f"JOIN jobs_order AS origin ON origin.id = jobs_job.order_id JOIN {table} AS source ON {where}"
        )

    def _settle_down(self) -> None:
        """What is held is held in the wallets too; and statistics as they are after a while."""
        self._run(
            "UPDATE billing_account SET held_minor = held.total FROM (SELECT account_id, sum(amount_minor) AS total "
            "FROM billing_hold WHERE state = 'held' GROUP BY account_id) AS held WHERE account_id = billing_account.id"
        )
        for model in (Job, Attempt, JobEvent, Order, Hold, Quote, Account):
            self._run(f"VACUUM ANALYZE {model._meta.db_table}")  # noqa: SLF001 - Django's own way to it

    @staticmethod
    def _run(statement: str, values: Sequence[Any] | None = None) -> None:
        with connection.cursor() as cursor:
            cursor.execute(statement, values)
