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


class BookRefused(BillingError):
    """A price book that can't be published as it is."""

    code = "invalid"


class BadSignature(BillingError):
    """A webhook that the payment provider didn't sign, or not now."""

    code = "bad_signature"
    message = _("This is not signed by the payment provider, or its time is off.")


class LedgerConflict(Exception):  # a conflict is what it is; no customer ever sees it
    """A reference that was posted before with other entries: a programming error, never a customer's."""
