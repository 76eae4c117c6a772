"""SQL with which `bench.simulated_customers` checks the ledger, independently of the code that writes it.

`tests.books` has the checks of all organizations together.
"""

from __future__ import annotations

BROKEN_ACCOUNTS = """
-- The balance of an account is the sum of its entries, and its held amount the sum of its open holds. The balance of a
-- wallet covers its held amount. Receivable and written-off accounts are debts, so their balances are never positive.
SELECT a.id FROM billing_account a
WHERE a.organization_id = %(organization)s AND (
    a.posted_minor <> (SELECT coalesce(sum(amount_minor), 0) FROM billing_entry e WHERE e.account_id = a.id)
    OR a.held_minor <> (SELECT coalesce(sum(amount_minor), 0) FROM billing_hold h
                        WHERE h.account_id = a.id AND h.state = 'held')
    OR a.kind = 'wallet' AND NOT (a.posted_minor >= a.held_minor AND a.held_minor >= 0)
    OR a.kind IN ('receivable', 'written_off') AND a.posted_minor > 0)
UNION ALL
-- Neither the charge nor the metered cost of a hold exceeds its amount, the ceiling.
SELECT h.id FROM billing_hold h JOIN billing_account a ON a.id = h.account_id
WHERE a.organization_id = %(organization)s
    AND (h.charged_minor > h.amount_minor OR h.metered_minor > h.amount_minor)
UNION ALL
-- While the organization has a debt (d), all available money of its wallet (w) is free credit.
SELECT d.id FROM billing_account d JOIN billing_account w ON w.organization_id = d.organization_id AND w.kind = 'wallet'
WHERE d.organization_id = %(organization)s AND d.kind = 'receivable' AND d.posted_minor < 0
    AND w.posted_minor - w.held_minor > (
        SELECT coalesce(sum(g.amount_minor - g.used_minor - g.expired_minor - g.reserved_minor), 0)
        FROM billing_creditgrant g WHERE g.organization_id = %(organization)s)
UNION ALL
-- The entries of each transaction add up to zero. Only the transactions of the newest 10 entries are checked, because
-- this query runs after each step of the simulation, which also checks all transactions from time to time.
SELECT e.transaction_id FROM billing_entry e WHERE e.transaction_id IN (
    SELECT e.transaction_id FROM billing_entry e JOIN billing_account a ON a.id = e.account_id
    WHERE a.organization_id = %(organization)s ORDER BY e.id DESC LIMIT 10)
GROUP BY e.transaction_id HAVING sum(e.amount_minor) <> 0
"""
"""Rows of one organization that break an invariant."""

CLEARING_BALANCE = """
SELECT coalesce(-sum(c.amount_minor), 0) FROM billing_entry c
JOIN billing_account a ON a.id = c.account_id AND a.kind = 'clearing'
WHERE EXISTS (SELECT 1 FROM billing_entry e JOIN billing_account own ON own.id = e.account_id
              JOIN accounts_organization o ON o.id = own.organization_id
              WHERE e.transaction_id = c.transaction_id AND o.slug LIKE %(slugs)s)
"""
"""The payment provider's balance for the organizations with these slugs, according to the ledger's clearing account."""
