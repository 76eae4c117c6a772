"""Fill a database with the rows of a large installation, by copying those of one customer inside PostgreSQL."""

from __future__ import annotations

import time
from typing import Any

TIME_BETWEEN_JOBS = "interval '20 seconds'"
"""One million jobs then span seven months."""
EVENTS_PER_JOB = 2
"""How many of the original job's events each copy gets."""


def copy_row(cursor: Any, model: Any, pk: Any, count: int, **changed: str) -> int:
    """Insert `count` copies of a row, numbered `n` from 1. Return their base: the id of copy `n` is the base plus `n`.

    `changed` has the SQL of the columns that differ. In it, `n` is the number of the copy and `t` the original row. For
    a model whose ids are not numbers, `changed` must have `id`; the function then returns 0.
    """
    meta = model._meta  # noqa: SLF001 - Django's documented API of models
    columns = [field.column for field in meta.concrete_fields]
    base = 0
    if "id" not in changed:
        base = model.objects.latest("pk").pk
        changed["id"] = f"{base} + n"
    names = ", ".join(f'"{column}"' for column in columns)
    values = ", ".join(changed.get(column, f't."{column}"') for column in columns)
    table = meta.db_table
    started_at = time.monotonic()
    rows = f"{table} t, generate_series(1, {count}) n"
    cursor.execute(f"INSERT INTO {table} ({names}) SELECT {values} FROM {rows} WHERE t.id = %s", [pk])  # noqa: S608 - our own names
    if base:
        cursor.execute("SELECT setval(pg_get_serial_sequence(%s, 'id'), %s)", [table, base + count])
    print(f"{count:>9,} rows of {table} in {time.monotonic() - started_at:.1f} s", flush=True)
    return base


def fill(customer: Any, *, organizations: int, jobs: int, own_jobs: int, entries: int) -> None:
    """Copy the customer's organization and last job, and with the job its money, events and attempt.

    The customer gets `own_jobs` of the `jobs` copies; the rest is spread over the other organizations. Transactions,
    each with two of the `entries`, are spread in the same way.
    """
    from django.db import connection  # noqa: PLC0415 - Django must be set up first

    from billing.models import Account, Entry, Hold, Quote, Receipt, Transaction  # noqa: PLC0415 - as above
    from console.accounts.models import AuditEvent, Membership, Organization, User  # noqa: PLC0415 - as above
    from jobs.models import Attempt, Job, JobEvent, Order  # noqa: PLC0415 - as above

    organization = customer.organization
    wallet = Account.objects.get(organization=organization, kind=Account.Kinds.WALLET)
    job = Job.objects.filter(organization=organization).latest("pk")
    hold, quote, order = job.order.hold, job.order.quote, job.order
    charge = Entry.objects.filter(account=wallet).latest("pk")
    opposite = Entry.objects.filter(transaction=charge.transaction_id).exclude(pk=charge.pk).earliest("pk")
    other_count, own_every = organizations - 1, jobs // own_jobs
    created_at = f"now() - ({jobs} - n) * {TIME_BETWEEN_JOBS}"
    ended_at = f"{created_at} + interval '5 minutes'"

    def own_or_other(own: int, other_base: int) -> str:
        """Return the SQL of a key: for every `own_every`th copy the customer's, else another organization's in turn."""
        return f"(CASE WHEN n % {own_every} = 0 THEN {own} ELSE {other_base + 1} + n % {other_count} END)"

    with connection.cursor() as cursor:
        # Without checks of foreign keys and triggers, to save time: the copies are consistent.
        cursor.execute("SET session_replication_role = replica")

        def copy(model: Any, pk: Any, count: int, **changed: str) -> int:
            # In a statement with parameters, psycopg reads %% as the operator %.
            return copy_row(cursor, model, pk, count, **{name: sql.replace("%", "%%") for name, sql in changed.items()})

        user_base = copy(User, customer.membership.user_id, other_count, email="'copy-' || n || '@example.com'")
        organization_base = copy(
            Organization, organization.pk, other_count, name="t.name || ' ' || n", slug="t.slug || '-' || n"
        )
        member_keys = {"user_id": f"{user_base} + n", "organization_id": f"{organization_base} + n"}
        copy(Membership, customer.membership.pk, other_count, **member_keys)
        wallet_base = copy(Account, wallet.pk, other_count, organization_id=f"{organization_base} + n")
        owner, account = own_or_other(organization.pk, organization_base), own_or_other(wallet.pk, wallet_base)
        new_quote, new_order = "md5('quote' || n)::uuid", "md5('order' || n)::uuid"
        owner_and_time = {"organization_id": owner, "created_at": created_at}
        copy(Quote, quote.pk, jobs, id=new_quote, expires_at=ended_at, **owner_and_time)
        hold_keys = {"quote_id": new_quote, "account_id": account, "reference": "'copy:' || n"}
        hold_base = copy(Hold, hold.pk, jobs, created_at=created_at, ended_at=ended_at, **hold_keys)
        order_keys = {"quote_id": new_quote, "hold_id": f"{hold_base} + n", "idempotency_key": "'copy:' || n"}
        # Another member has ordered a thousandth of the customer's jobs, so that a search by member finds few rows.
        placed_by = f"(CASE WHEN n % {1000 * own_every} = 0 THEN {user_base + 1} ELSE t.placed_by_id END)"
        copy(Order, order.pk, jobs, id=new_order, placed_by_id=placed_by, **order_keys, **owner_and_time)
        state = "CASE WHEN n % 7 = 0 THEN 'failed' ELSE t.state END"
        name = "'training ' || n % 1000"
        times = {"queued_at": created_at, "started_at": created_at, "finished_at": ended_at}
        job_base = copy(
            Job, job.pk, jobs, organization_id=owner, order_id=new_order, placed_by_id=placed_by, name=name,
            state=state, **times,
        )  # fmt: skip
        copy(Receipt, hold.receipt.pk, jobs, hold_id=f"{hold_base} + n", title=name, **owner_and_time)
        copy(Attempt, job.attempts.get().pk, jobs, job_id=f"{job_base} + n")
        for event in JobEvent.objects.filter(job=job).order_by("pk")[:EVENTS_PER_JOB]:
            copy(JobEvent, event.pk, jobs, job_id=f"{job_base} + n", created_at=created_at)
        transaction_base = copy(
            Transaction, charge.transaction_id, entries // 2, reference="'copy:' || n", created_at=created_at
        )
        for entry, entry_account in ((charge, account), (opposite, "t.account_id")):
            copy(Entry, entry.pk, entries // 2, transaction_id=f"{transaction_base} + n", account_id=entry_account)
        audit_event = AuditEvent.objects.filter(organization=organization).latest("pk")
        copy(AuditEvent, audit_event.pk, jobs, **owner_and_time)
        cursor.execute("SET session_replication_role = DEFAULT")
        started_at = time.monotonic()
        cursor.execute("VACUUM ANALYZE")
        print(f"vacuumed and analyzed in {time.monotonic() - started_at:.1f} s", flush=True)
