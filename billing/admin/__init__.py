"""Administrators' work on money: prices, credits, and the ledger and payments, which are there to be read.

The one rule: nothing here edits the ledger; what moves money calls a service.
"""

from billing.admin import credit, ledger, payments, prices

__all__ = ["credit", "ledger", "payments", "prices"]
