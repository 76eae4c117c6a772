"""Administrators' work on money: prices, credit, invoices, and the ledger and payments, which are there to be read.

The one rule: nothing here edits the ledger; what moves money calls a service.
"""

from billing.admin import accounting, credit, ledger, payments, prices

__all__ = ["accounting", "credit", "ledger", "payments", "prices"]
