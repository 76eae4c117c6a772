"""Errors of billing, with stable codes under one root.

`console.core.error_codes` shows the first paragraph of each docstring to customers, as the meaning of the code.
"""

from __future__ import annotations

from django.utils.translation import gettext_lazy as _

from console.core.errors import CustomerError, Text


class BillingError(CustomerError):
    """Root of billing's errors."""

    code = "billing_error"


class InsufficientFunds(BillingError):
    """The wallet cannot cover the amount; `missing_minor` is the difference."""

    code = "insufficient_funds"

    def __init__(self, *, available_minor: int, needed_minor: int, message: Text) -> None:
        super().__init__(message)
        self.available_minor = available_minor
        self.needed_minor = needed_minor
        self.missing_minor = needed_minor - available_minor


class NoWallet(BillingError):
    """The organization has no wallet: activating the service creates it."""

    code = "service_inactive"
    message = _("Activate the distributed training service first; this creates your wallet.")


class QuoteExpired(BillingError):
    """The quote has expired."""

    code = "quote_expired"
    message = _("This quote has expired. Request a new one; the price may have changed.")


class NotPriced(BillingError):
    """The current price book has no price for one of the chosen values, such as the node spec."""

    code = "not_priced"


class QuoteRefused(BillingError):
    """No quote can meet a limit that the customer set, such as a ceiling. `fields` names it."""

    code = "invalid"
    message = _("Some values are invalid. Correct them and try again.")


class AmountRefused(BillingError):
    """A top-up or threshold that is out of range, or has more decimals than payments in the currency allow."""

    code = "invalid"


class PaymentUnavailable(BillingError):
    """The payment provider did not answer; nothing was charged.

    This holds for requests of customers, none of which charges a card directly. `gateway.charge_card` and
    `gateway.refund` raise this error too, and may have moved money. Their callers retry with the same reference.
    """

    code = "payments_unavailable"
    message = _("The payment provider did not answer. Nothing was charged. Try again in a minute.")


class PaymentRefused(BillingError):
    """The payment provider rejected the request; a retry would be rejected too. `reason` is the provider's."""

    code = "payment_refused"
    message = _(
        "The payment provider refused this request. Nothing was charged. If it happens again, contact an administrator."
    )

    def __init__(self, *, reason: str) -> None:
        super().__init__()
        self.reason = reason


class CustomerGone(PaymentRefused):
    """The customer was deleted in the provider's dashboard."""


class PaymentDeclined(BillingError):
    """The bank declined the card. `reason` is the bank's code."""

    code = "payment_declined"
    message = _("The bank declined the card. Nothing was charged. Try another card.")

    def __init__(self, *, reason: str) -> None:
        super().__init__()
        self.reason = reason


class RefundRefused(BillingError):
    """A refund of an unpaid top-up, of more than can still be refunded, or with too many decimals."""

    code = "invalid"


class WriteOffRefused(BillingError):
    """A write-off that exceeds the debt or has no reason."""

    code = "invalid"


class NoSavedCard(BillingError):
    """The organization has no saved card, or the chosen card is not one of its own."""

    code = "invalid"
    message = _("Add a card first.")


class VoucherRefused(BillingError):
    """A voucher code that is unknown, expired, used up or in another currency, or too many wrong codes."""

    code = "invalid"


class BudgetExceeded(BillingError):
    """The purchase would exceed a budget; nothing was held."""

    code = "budget_exceeded"


class InvoiceRefused(BillingError):
    """An invoice or credit note that cannot be issued as requested."""

    code = "invalid"


class DocumentUnavailable(BillingError):
    """This machine lacks the libraries that render PDFs; the invoice's page can still be printed."""

    code = "pdf_unavailable"
    message = _(
        "PDF files need Pango, which is not installed. Ask the administrator to install it (see the "
        "operator guide), or open the invoice and print it."
    )


class BookRefused(BillingError):
    """A price book that cannot be published."""

    code = "invalid"


class BadSignature(BillingError):
    """A webhook without a valid, recent signature of the payment provider."""

    code = "bad_signature"
    message = _("Invalid signature or timestamp.")


class Quarantined(Exception):  # internal: never shown to customers
    """A payment provider's event contradicts our rows; the argument says why. An administrator must decide."""


class Parked(Exception):  # internal: never shown to customers
    """A payment provider's event cannot be applied yet; the argument says why. It is retried."""


class HoldUsedUp(Exception):  # internal: never shown to customers
    """A sweep's hold has ended, or has less left than its next trial needs."""


class LedgerConflict(Exception):  # internal: never shown to customers
    """A posting that contradicts the ledger, such as a used reference with other entries. It is a bug."""
