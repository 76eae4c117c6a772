"""Rules that all accounts and orders keep, as SQL.

Each query returns the rows that break its rule; its key says what is then wrong. No code under test is used; only its
rows are read.
"""

from __future__ import annotations

from django.db import connection

BROKEN_BOOKS = {
    "a transaction does not sum to zero": """
        SELECT transaction_id FROM billing_entry GROUP BY transaction_id HAVING sum(amount_minor) <> 0""",
    "a balance is not the sum of its entries": """
        SELECT a.id FROM billing_account a LEFT JOIN billing_entry e ON e.account_id = a.id
        GROUP BY a.id HAVING a.posted_minor <> coalesce(sum(e.amount_minor), 0)""",
    "what is held is not the sum of the open holds": """
        SELECT a.id FROM billing_account a LEFT JOIN billing_hold h ON h.account_id = a.id AND h.state = 'held'
        GROUP BY a.id HAVING a.held_minor <> coalesce(sum(h.amount_minor), 0)""",
    "a wallet is below what is held, or below zero": """
        SELECT id FROM billing_account
        WHERE kind = 'wallet' AND NOT (posted_minor >= held_minor AND held_minor >= 0)""",
    "a charge passes its ceiling": """
        SELECT h.id FROM billing_hold h
        WHERE greatest(h.charged_minor, h.metered_minor) > h.amount_minor""",
    "a hold, its open parts and the charges of its ended parts do not sum to the ceiling of its quote": """
        SELECT h.id FROM billing_hold h JOIN billing_quote q ON q.id = h.quote_id
        LEFT JOIN billing_hold part ON part.parent_id = h.id
        GROUP BY h.id, q.id
        HAVING h.amount_minor + coalesce(sum(CASE part.state WHEN 'held' THEN part.amount_minor
                                             ELSE coalesce(part.charged_minor, 0) END), 0) <> q.ceiling_minor""",
    "a part of a hold outlives it, or is of another wallet": """
        SELECT part.id FROM billing_hold part JOIN billing_hold h ON h.id = part.parent_id
        WHERE part.account_id <> h.account_id OR (part.state = 'held' AND h.state <> 'held')""",
    "more credit is reserved for a hold than it holds, or for an ended one": """
        SELECT h.id FROM billing_hold h JOIN billing_credituse u ON u.hold_id = h.id
        GROUP BY h.id HAVING sum(u.reserved_minor) > CASE h.state WHEN 'held' THEN h.amount_minor ELSE 0 END""",
    "a credit's reserved part is not what open holds reserve": """
        SELECT g.id FROM billing_creditgrant g LEFT JOIN billing_credituse u ON u.grant_id = g.id
        GROUP BY g.id HAVING g.reserved_minor <> coalesce(sum(u.reserved_minor), 0)
            OR g.used_minor <> coalesce(sum(u.used_minor), 0)""",
    "a settled hold was not charged exactly once and by its amount, or a hold that is not settled was charged": """
        SELECT h.id FROM billing_hold h
        LEFT JOIN billing_transaction t ON t.reference = 'settle:' || h.reference
        LEFT JOIN billing_entry e ON e.transaction_id = t.id AND e.account_id = h.account_id
        GROUP BY h.id HAVING count(e.id) <> (h.state = 'settled')::int
            OR coalesce(sum(e.amount_minor), 0) <> -coalesce(h.charged_minor, 0)""",
    "a receipt does not sum to its total, or is not what was charged": """
        SELECT r.id FROM billing_receipt r JOIN billing_hold h ON h.id = r.hold_id
        WHERE r.total_minor <> coalesce(h.charged_minor, 0) OR r.ceiling_minor <> h.amount_minor
            OR r.total_minor <> (SELECT coalesce(sum((line ->> 'amount_minor')::bigint), 0)
                                 FROM jsonb_array_elements(r.lines) AS line)""",
    "a top-up was credited twice, or is paid and was not": """
        SELECT u.id FROM billing_topup u LEFT JOIN billing_transaction t ON t.reference = 'top-up:' || u.id
        LEFT JOIN billing_entry e ON e.transaction_id = t.id AND e.account_id = u.account_id
        GROUP BY u.id HAVING count(e.id) <> (u.state = 'paid')::int
            OR coalesce(sum(e.amount_minor), 0) <> CASE WHEN u.state = 'paid' THEN u.amount_minor ELSE 0 END""",
    "a top-up was credited, but its row does not say that it was paid": """
        SELECT t.reference FROM billing_transaction t LEFT JOIN billing_topup u ON t.reference = 'top-up:' || u.id
        WHERE t.kind = 'top-up' AND t.reference LIKE 'top-up:%' AND u.state IS DISTINCT FROM 'paid'""",
    "a refund did not move its amount, or a failed one did not move it back": """
        SELECT r.id FROM billing_refund r
        LEFT JOIN billing_transaction t ON t.reference IN ('refund:' || r.id, 'refund-failed:' || r.id)
        LEFT JOIN (SELECT e.transaction_id, e.amount_minor FROM billing_entry e
                   JOIN billing_account a ON a.id = e.account_id AND a.kind = 'clearing') c ON c.transaction_id = t.id
        GROUP BY r.id
        HAVING coalesce(sum(c.amount_minor), 0) <> CASE r.state WHEN 'failed' THEN 0 ELSE r.amount_minor END
            OR count(t.id) <> CASE r.state WHEN 'failed' THEN 2 ELSE 1 END""",
    "a dispute did not move what its row says": """
        SELECT d.id FROM billing_dispute d
        LEFT JOIN billing_disputemovement m ON m.dispute_id = d.id
        LEFT JOIN billing_transaction t ON t.reference = m.reference
        LEFT JOIN (SELECT e.transaction_id, e.amount_minor FROM billing_entry e
                   JOIN billing_account a ON a.id = e.account_id AND a.kind = 'clearing') c ON c.transaction_id = t.id
        GROUP BY d.id HAVING count(t.id) <> count(m.id) FILTER (WHERE m.amount_minor <> 0)
            OR coalesce(sum(c.amount_minor), 0) <> d.withdrawn_minor
            OR coalesce(sum(m.amount_minor), 0) <> d.withdrawn_minor""",
    "a dispute took more than was paid in": """
        SELECT d.id FROM billing_dispute d JOIN billing_topup u ON u.id = d.top_up_id
        WHERE d.withdrawn_minor NOT BETWEEN 0 AND u.amount_minor""",
    "more was refunded than was paid in": """
        SELECT u.id FROM billing_topup u JOIN billing_refund r ON r.top_up_id = u.id AND r.state <> 'failed'
        GROUP BY u.id HAVING sum(r.amount_minor) > u.amount_minor OR u.state <> 'paid'""",
    # A debt is a balance below zero, of an account of its own.
    "the account of a debt has a balance above zero, as if the organization owed less than nothing": """
        SELECT id FROM billing_account WHERE kind IN ('receivable', 'written_off') AND posted_minor > 0""",
    # A debt is never paid from credit, so unused credit in the wallet is taken off what the wallet could pay. An
    # organization has one wallet, and all its credit is in this wallet's currency.
    "an organization owes what its wallet could pay": """
        SELECT d.id FROM billing_account d JOIN billing_account w ON w.organization_id = d.organization_id
            AND w.kind = 'wallet' AND w.currency = d.currency
        WHERE d.kind = 'receivable' AND d.posted_minor < 0 AND w.posted_minor - w.held_minor > (
            SELECT coalesce(sum(g.amount_minor - g.used_minor - g.expired_minor - g.reserved_minor), 0)
            FROM billing_creditgrant g WHERE g.organization_id = w.organization_id)""",
    "a write-off did not move its amount out of the debt": """
        SELECT w.id FROM billing_writeoff w LEFT JOIN billing_transaction t ON t.reference = 'write-off:' || w.id
        LEFT JOIN billing_entry e ON e.transaction_id = t.id AND e.account_id = w.account_id
        WHERE e.amount_minor IS DISTINCT FROM w.amount_minor""",
    "a wallet holds less than the credit in it": """
        SELECT a.id FROM billing_account a
        JOIN billing_creditgrant g ON g.organization_id = a.organization_id
        WHERE a.kind = 'wallet' GROUP BY a.id
        HAVING sum(g.amount_minor - g.used_minor - g.expired_minor - g.reserved_minor)
            > a.posted_minor - a.held_minor""",
    "an invoice is not the sum of its lines": """
        SELECT i.id FROM billing_invoice i LEFT JOIN billing_invoiceline l ON l.invoice_id = i.id
        GROUP BY i.id HAVING i.subtotal_minor <> coalesce(sum(l.amount_minor), 0)""",
}
BROKEN_ORDERS = {
    "an ended job has no receipt, or a job that has not ended has one": """
        SELECT j.id FROM jobs_job j JOIN jobs_order o ON o.id = j.order_id JOIN billing_hold h ON h.id = o.hold_id
        LEFT JOIN billing_receipt r ON r.hold_id = h.id
        WHERE (j.finished_at IS NOT NULL) <> (r.id IS NOT NULL) OR (r.id IS NULL) <> (h.state = 'held')""",
    "a hold has no job and no sweep, or both": """
        SELECT h.reference FROM billing_hold h
        LEFT JOIN jobs_order o ON o.hold_id = h.id LEFT JOIN jobs_job j ON j.order_id = o.id
        LEFT JOIN jobs_sweep s ON s.hold_id = h.id
        WHERE (j.id IS NULL) = (s.id IS NULL)""",
    "a trial is not paid from its sweep's hold, two trials have one number, or a part of a hold has no trial": """
        SELECT t.id FROM jobs_trial t JOIN jobs_sweep s ON s.id = t.sweep_id JOIN jobs_job j ON j.id = t.job_id
        JOIN jobs_order o ON o.id = j.order_id JOIN billing_hold h ON h.id = o.hold_id
        WHERE h.parent_id IS DISTINCT FROM s.hold_id
        UNION ALL SELECT min(id) FROM jobs_trial GROUP BY sweep_id, number HAVING count(*) > 1
        UNION ALL SELECT h.id FROM billing_hold h LEFT JOIN jobs_order o ON o.hold_id = h.id
        LEFT JOIN jobs_job j ON j.order_id = o.id LEFT JOIN jobs_trial t ON t.job_id = j.id
        WHERE h.parent_id IS NOT NULL AND t.id IS NULL""",
    "a sweep has ended and holds money, or has not ended and holds none": """
        SELECT s.id FROM jobs_sweep s JOIN billing_hold h ON h.id = s.hold_id
        WHERE (s.ended_at IS NOT NULL) <> (h.state <> 'held')""",
    # A job that ends by a platform fault may be charged for an earlier attempt that the code ended.
    "a job was charged, but no attempt of it ran, or platform faults ended all that ran": """
        SELECT j.id FROM jobs_job j JOIN jobs_order o ON o.id = j.order_id JOIN billing_hold h ON h.id = o.hold_id
        WHERE h.charged_minor IS NOT NULL AND NOT EXISTS (
            SELECT 1 FROM jobs_attempt a WHERE a.job_id = j.id AND a.started_at IS NOT NULL
                AND a.reason NOT IN ('no_capacity', 'node_lost', 'platform_error'))""",
    "an idempotency key or a quote was bought twice": """
        SELECT min(id::text) FROM jobs_order GROUP BY organization_id, idempotency_key HAVING count(*) > 1
        UNION ALL SELECT min(id::text) FROM jobs_order GROUP BY quote_id HAVING count(*) > 1""",
    "two attempts of a job are open": """
        SELECT job_id FROM jobs_attempt WHERE finished_at IS NULL GROUP BY job_id HAVING count(*) > 1""",
}
CLEARED = """
SELECT coalesce(-sum(posted_minor), 0) FROM billing_account WHERE kind = 'clearing' AND currency = %s"""
"""Negated: a payment adds to a wallet and subtracts from the clearing account, so that its transaction sums to zero."""


def broken(rules: dict[str, str]) -> dict[str, list[tuple[object, ...]]]:
    """Return the broken rules with the first rows that break each."""
    violations = {}
    with connection.cursor() as cursor:
        for name, query in rules.items():
            cursor.execute(query)
            if rows := cursor.fetchmany(5):
                violations[name] = rows
    return violations


def cleared(currency: str = "USD") -> int:
    """Return how much the payment provider holds for us, according to our ledger, in minor units."""
    with connection.cursor() as cursor:
        cursor.execute(CLEARED, [currency])
        return int(cursor.fetchone()[0])
