"""The rows of billing, by what they are about: prices and quotes, the ledger, payments.

One rule: other modules import them from here, so that a class may move.
"""

from billing.models.ledger import Account, Entry, Hold, Receipt, Transaction
from billing.models.payments import CreditGrant, StripeEvent, TopUp
from billing.models.pricing import NodeSpec, Price, PriceBook, Quote

__all__ = [
    "Account",
    "CreditGrant",
    "Entry",
    "Hold",
    "NodeSpec",
    "Price",
    "PriceBook",
    "Quote",
    "Receipt",
    "StripeEvent",
    "TopUp",
    "Transaction",
]
