"""The tax on an organization's invoices. Tax is rounded once per document, half up."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from billing.models import BillingDetails
from billing.policy import policy
from billing.pricing import round_minor
from console.accounts.models import Organization


@dataclass(frozen=True)
class Tax:
    """A tax and its rate in percent. Prices contain an `inclusive` tax; an invoice adds any other tax to them."""

    name: str
    percent: Decimal
    inclusive: bool

    def of(self, taxable_minor: int) -> int:
        """Return the tax in minor units that the amount contains (inclusive) or that is added to it."""
        base = Fraction(100) + Fraction(self.percent) if self.inclusive else Fraction(100)
        return round_minor(Fraction(taxable_minor) * Fraction(self.percent) / base)


def tax_for(organization: Organization) -> Tax:
    """Return the tax of an organization: the policy's, unless an administrator set another for the organization."""
    billing_policy = policy()
    details = BillingDetails.objects.filter(organization=organization).first() or BillingDetails()
    return Tax(
        name=billing_policy.tax_name,
        percent=billing_policy.tax_percent if details.tax_percent is None else details.tax_percent,
        inclusive=billing_policy.tax_inclusive if details.tax_inclusive is None else details.tax_inclusive,
    )
