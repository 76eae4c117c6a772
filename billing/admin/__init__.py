"""Admin pages of billing. Ledger and payments are read-only; everything that moves money goes through services."""

from billing.admin import accounting, closures, credit, ledger, payments, prices

__all__ = ["accounting", "closures", "credit", "ledger", "payments", "prices"]
