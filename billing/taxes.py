"""What tax an organization's invoices carry. The one rule: rounded once for each document, half up."""

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
    """A tax by name and rate (percent). Inclusive: prices hold it; else it comes on top, on the invoice."""

    name: str
    percent: Decimal
    inclusive: bool

    def of(self, taxable_minor: int) -> int:
        """The tax in, or on, an amount that is not negative."""
        whole = Fraction(100) + Fraction(self.percent) if self.inclusive else Fraction(100)
        return round_minor(Fraction(taxable_minor) * Fraction(self.percent) / whole)


def tax_for(organization: Organization) -> Tax:
    """The organization's own tax where an administrator set one, else the policy's."""
    rules = policy()
    details = BillingDetails.objects.filter(organization=organization).first() or BillingDetails()
    return Tax(
        name=rules.tax_name,
        percent=rules.tax_percent if details.tax_percent is None else details.tax_percent,
        inclusive=rules.tax_inclusive if details.tax_inclusive is None else details.tax_inclusive,
    )
