"""Prices, quotes, the ledger, payments and invoices. Never imports `storage`."""
