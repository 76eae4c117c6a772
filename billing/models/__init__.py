"""The models of billing. Import them from here, not from the submodules."""

from billing.models.budgets import BalanceWarning, Budget, BudgetAlert
from billing.models.credits import CreditGrant, CreditUse, Voucher
from billing.models.invoices import (
    BillingDetails,
    BillingPolicy,
    Invoice,
    InvoiceDocument,
    InvoiceLine,
    InvoiceMail,
    InvoiceSeries,
)
from billing.models.ledger import Account, Entry, Hold, HoldExtension, Receipt, Transaction, WriteOff
from billing.models.payments import (
    AutoTopUp,
    Dispute,
    DisputeMovement,
    PaymentCustomer,
    Refund,
    StripeEvent,
    TopUp,
)
from billing.models.pricing import NodeSpec, Price, PriceBook, Quote
from billing.models.storage import StorageBalance, StorageDay

__all__ = [
    "Account",
    "AutoTopUp",
    "BalanceWarning",
    "BillingDetails",
    "BillingPolicy",
    "Budget",
    "BudgetAlert",
    "CreditGrant",
    "CreditUse",
    "Dispute",
    "DisputeMovement",
    "Entry",
    "Hold",
    "HoldExtension",
    "Invoice",
    "InvoiceDocument",
    "InvoiceLine",
    "InvoiceMail",
    "InvoiceSeries",
    "NodeSpec",
    "PaymentCustomer",
    "Price",
    "PriceBook",
    "Quote",
    "Receipt",
    "Refund",
    "StorageBalance",
    "StorageDay",
    "StripeEvent",
    "TopUp",
    "Transaction",
    "Voucher",
    "WriteOff",
]
