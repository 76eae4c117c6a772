"""Admin pages of billing. Ledger and payments are read-only; everything that moves money goes through services."""

from billing.admin import accounting, credit, ledger, payments, prices

__all__ = ["accounting", "credit", "ledger", "payments", "prices"]
