"""What billing may refuse. One root, stable codes; leaves carry their figures."""

from __future__ import annotations

from django.utils.translation import gettext_lazy as _

from console.accounts.errors import CustomerError, Text


class BillingError(CustomerError):
    """Root of billing's errors."""

    code = "billing_error"


class InsufficientFunds(BillingError):
    """The wallet can't cover the amount; `missing_minor` would."""

    code = "insufficient_funds"

    def __init__(self, *, available_minor: int, needed_minor: int, message: Text) -> None:
        super().__init__(message)
        self.available_minor = available_minor
        self.needed_minor = needed_minor
        self.missing_minor = needed_minor - available_minor


class NoWallet(BillingError):
    """The organization has no wallet yet: one is made when the service is activated."""

    code = "service_inactive"
    message = _("Activate the distributed training service first: that makes your wallet.")


class QuoteExpired(BillingError):
    """The quote's prices are no longer promised."""

    code = "quote_expired"
    message = _("This quote has expired. Ask for a new one: the price may have changed.")


class NotPriced(BillingError):
    """No price in the valid price book covers the choice."""

    code = "not_priced"


class QuoteRefused(BillingError):
    """A limit in the request that no quote can meet, at its field."""

    code = "invalid"
    message = _("Some values need correcting.")


class AmountRefused(BillingError):
    """A top-up under the least or over the most amount."""

    code = "invalid"


class PaymentUnavailable(BillingError):
    """The payment provider did not answer; nothing was charged."""

    code = "payments_unavailable"
    message = _("The payment service did not answer. Nothing was charged; try again in a minute.")


class PaymentRefused(BillingError):
    """The payment provider said no to the request itself: asking again gives the same answer. `reason` is its own."""

    code = "payment_refused"
    message = _("The payment service refused this. Nothing was charged. Tell an administrator if it happens again.")

    def __init__(self, *, reason: str) -> None:
        super().__init__()
        self.reason = reason


class CustomerGone(PaymentRefused):
    """The provider has no record of the customer any more: it was deleted at the provider's own pages."""


class PaymentDeclined(BillingError):
    """The card's bank said no. `reason` is its code."""

    code = "payment_declined"
    message = _("The bank declined the card. Nothing was charged. Try another card.")

    def __init__(self, *, reason: str) -> None:
        super().__init__()
        self.reason = reason


class RefundRefused(BillingError):
    """A refund that can't be made: of a payment that never came, or of more than is left of it."""

    code = "invalid"


class WriteOffRefused(BillingError):
    """A write-off of more than is owed, or without a reason."""

    code = "invalid"


class NoSavedCard(BillingError):
    """A card that this organization has not saved, or has removed."""

    code = "invalid"
    message = _("Save a card first.")


class VoucherRefused(BillingError):
    """A code that gives nothing, or nothing more, at its field."""

    code = "invalid"


class BudgetExceeded(BillingError):
    """The purchase would pass a budget that the customer set; nothing was held."""

    code = "budget_exceeded"


class InvoiceRefused(BillingError):
    """An invoice or credit note that can't be written as asked."""

    code = "invalid"


class DocumentUnavailable(BillingError):
    """Invoices can't be drawn as PDF on this machine; they can still be read and printed as pages."""

    code = "pdf_unavailable"
    message = _(
        "PDF files can't be made here: the administrator has to install Pango (see the operator guide)."
        " Open the invoice and print it instead."
    )


class BookRefused(BillingError):
    """A price book that can't be published as it is."""

    code = "invalid"


class BadSignature(BillingError):
    """A webhook that the payment provider didn't sign, or not now."""

    code = "bad_signature"
    message = _("This is not signed by the payment provider, or its time is off.")


class Quarantined(Exception):  # no customer ever sees it
    """What the provider says does not match our rows; the text says how. It waits for a person."""


class Parked(Exception):  # no customer ever sees it
    """What the provider says can't be acted on yet; the text says why. It is tried again."""


class LedgerConflict(Exception):  # a conflict is what it is; no customer ever sees it
    """A reference that was posted before with other entries: a programming error, never a customer's."""
