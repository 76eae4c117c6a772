"""The rows of billing, by what they are about: prices and quotes, the ledger, payments.

One rule: other modules import them from here, so that a class may move.
"""

from billing.models.ledger import Account, Entry, Hold, Receipt, Transaction
from billing.models.payments import (
    AutoTopUp,
    CreditGrant,
    Dispute,
    PaymentCustomer,
    Refund,
    StripeEvent,
    TopUp,
)
from billing.models.pricing import NodeSpec, Price, PriceBook, Quote

__all__ = [
    "Account",
    "AutoTopUp",
    "CreditGrant",
    "Dispute",
    "Entry",
    "Hold",
    "NodeSpec",
    "PaymentCustomer",
    "Price",
    "PriceBook",
    "Quote",
    "Receipt",
    "Refund",
    "StripeEvent",
    "TopUp",
    "Transaction",
]
