"""Check the ledger: recompute every sum from the entries and count the differences. Read-only.

Triggers and constraints enforce the rules on each write. This module checks the rules again: a restored backup, manual
changes in the database or a bug would show here first. Each check is one SQL statement, so it sees one consistent
snapshot even while money moves.
"""

from __future__ import annotations

import logging

from django.db import connection

logger = logging.getLogger(__name__)

CHECKS = {
    "transactions": """
        SELECT count(*) FROM (
            SELECT entry.transaction_id FROM billing_entry entry
            JOIN billing_account account ON account.id = entry.account_id
            GROUP BY entry.transaction_id, account.currency HAVING sum(entry.amount_minor) <> 0) unbalanced
    """,
    "balances": """
        SELECT count(*) FROM billing_account account
        LEFT JOIN (SELECT account_id, sum(amount_minor) AS total FROM billing_entry GROUP BY account_id) moved
            ON moved.account_id = account.id
        WHERE account.posted_minor <> COALESCE(moved.total, 0)
    """,
    "holds": """
        SELECT count(*) FROM billing_account account
        LEFT JOIN (
            SELECT account_id, sum(amount_minor) AS total FROM billing_hold WHERE state = 'held' GROUP BY account_id
        ) held ON held.account_id = account.id
        WHERE account.held_minor <> COALESCE(held.total, 0)
    """,
}
"""SQL by name. Each counts rows that are wrong: unbalanced transactions, cached balances, cached holds."""


def check_ledger() -> dict[str, int]:
    """Return the number of wrong rows by check, all 0 if the ledger is consistent. Reads every entry: run it rarely."""
    counts = {name: _count(sql) for name, sql in CHECKS.items()}
    wrong = {name: count for name, count in counts.items() if count}
    if wrong:
        logger.critical("The ledger is inconsistent: %s. See docs/operator-guide/alerts.md.", wrong)
    return counts


def _count(sql: str) -> int:
    with connection.cursor() as cursor:
        cursor.execute(sql)
        return int(cursor.fetchone()[0])
