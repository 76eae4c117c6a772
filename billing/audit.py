"""Whether the books are right: every sum that must be, asked of the entries themselves. Reads only.

The database holds each rule as it writes (triggers, constraints); this is asked now and then because a restored backup,
a hand at the database or a fault of ours would show here first. The one rule: each question is one statement, so one
moment of the books, and money that moves meanwhile is in it whole or not at all.
"""

from __future__ import annotations

import logging

from django.db import connection

logger = logging.getLogger(__name__)

QUESTIONS = {
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
"""What -> how many of it are wrong: transactions that do not sum to zero, cached balances, cached holds."""


def check_books() -> dict[str, int]:
    """How many of each are wrong; all 0 when the books are right. Minutes apart: it reads every entry."""
    found = {what: _count(sql) for what, sql in QUESTIONS.items()}
    wrong = {what: count for what, count in found.items() if count}
    if wrong:
        logger.critical("The books are wrong: %s. See docs/operations.md.", wrong)
    return found


def _count(sql: str) -> int:
    with connection.cursor() as cursor:
        cursor.execute(sql)
        return int(cursor.fetchone()[0])
