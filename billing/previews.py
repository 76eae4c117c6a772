"""What other prices would have meant: a draft against a month that was, and one book beside another. Reads only.

The one rule: a run is reckoned again from the usage on its receipt and the deadline of its quote, by `billing.pricing`
itself; so under the same prices each run costs what it did.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from billing import pricing
from billing.costs import Month
from billing.models import Price, PriceBook, Receipt
from billing.pricebooks import price_name, price_rows
from billing.usage import Usage
from console.accounts.models import Organization


@dataclass
class CustomerPreview:
    """One customer's month: what it was charged, and would have been; amounts in minor units."""

    organization: Organization
    runs: int = 0
    charged_minor: int = 0
    would_minor: int = 0

    @property
    def change_minor(self) -> int:
        """How much more."""
        return self.would_minor - self.charged_minor

    @property
    def change(self) -> float | None:
        """The same as a fraction; None where nothing was charged."""
        return self.change_minor / self.charged_minor if self.charged_minor else None


@dataclass
class Preview:
    """A month under a draft: customer by customer, the largest first, and all of them together."""

    book: PriceBook
    month: Month
    customers: list[CustomerPreview]
    unpriced: dict[str, int] = field(default_factory=dict)
    """What the draft has no price for, and how many runs there were of it; they are counted at what they cost."""
    unknown: int = 0
    """Runs from before usage was kept on receipts, counted at what they cost."""

    @property
    def runs(self) -> int:
        """All of them."""
        return sum(each.runs for each in self.customers)

    @property
    def charged_minor(self) -> int:
        """What all were charged."""
        return sum(each.charged_minor for each in self.customers)

    @property
    def would_minor(self) -> int:
        """What all would have been charged."""
        return sum(each.would_minor for each in self.customers)

    @property
    def change_minor(self) -> int:
        """How much more."""
        return self.would_minor - self.charged_minor

    @property
    def change(self) -> float | None:
        """The same as a fraction."""
        return self.change_minor / self.charged_minor if self.charged_minor else None


@dataclass(frozen=True)
class Change:
    """One price in two books; None where a book lacks it."""

    name: str
    old: Decimal | None
    new: Decimal | None

    @property
    def fraction(self) -> float | None:
        """How much more, as a fraction; None where there is nothing to compare."""
        return float(self.new / self.old - 1) if self.old and self.new is not None else None


def preview(*, book: PriceBook, month: Month) -> Preview:
    """What the month's runs in the book's currency would have cost under it."""
    rows = price_rows(book)
    found = Preview(book, month, [])
    customers: dict[int, CustomerPreview] = {}
    receipts = (
        Receipt.objects.filter(currency=book.currency, created_at__gte=month.start, created_at__lt=month.end)
        .select_related("hold__quote", "organization")
        .order_by("pk")
    )
    for receipt in receipts.iterator(chunk_size=500):
        row = customers.setdefault(receipt.organization_id, CustomerPreview(receipt.organization))
        row.runs += 1
        row.charged_minor += receipt.total_minor
        row.would_minor += _would(receipt, rows, found)
    found.customers = sorted(customers.values(), key=lambda row: (-row.charged_minor, row.organization.name))
    return found


def diff(*, old: PriceBook, new: PriceBook) -> list[Change]:
    """Every price that differs between two books."""
    before, after = _by_name(old.prices.select_related("node_spec")), _by_name(new.prices.select_related("node_spec"))
    names = sorted(set(before) | set(after))
    changes = [Change(name, before.get(name), after.get(name)) for name in names]
    return [change for change in changes if change.old != change.new]


def _would(receipt: Receipt, rows: list[pricing.PriceRow], found: Preview) -> int:
    quote = receipt.hold.quote
    if not quote.ceiling_minor:
        return receipt.total_minor  # what was free stays so
    labels: dict[str, Any] = receipt.hold.labels
    if receipt.usage is None or "node_spec" not in labels:
        found.unknown += 1
        return receipt.total_minor
    terms = pricing.Terms.from_json(quote.terms)
    purchase = pricing.Purchase(
        str(labels.get("product", "")), terms.mode, labels["node_spec"], terms.nodes, terms.epochs
    )
    usage = Usage.from_json(receipt.usage)
    try:
        return pricing.rate(
            usage, pricing.terms_for(rows, purchase, deadline_seconds=quote.deadline_seconds)
        ).total_minor
    except pricing.PricingError:
        missing = f"{purchase.product} · {purchase.node_spec} · {purchase.nodes}"
        found.unpriced[missing] = found.unpriced.get(missing, 0) + 1
        return receipt.total_minor


def _by_name(prices: Iterable[Price]) -> dict[str, Decimal]:
    return {price_name(price): price.amount for price in prices}
