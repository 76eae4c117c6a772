"""Compare price books: simulate a past month under a draft, and list the prices that differ. Read-only.

A simulation rates each run again (`pricing.rate`), from the usage on the run's receipt. The deadline of the run's quote
gives the new ceiling. Under unchanged prices each run therefore costs the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from billing import pricing
from billing.costs import Month
from billing.models import Hold, Price, PriceBook, Receipt
from billing.pricebooks import price_name, price_rows
from billing.usage import Usage
from console.accounts.models import Organization


@dataclass
class CustomerSimulation:
    """One customer's month: the amount that was charged and the amount under the draft, in minor units."""

    organization: Organization
    runs: int = 0
    charged_minor: int = 0
    simulated_minor: int = 0

    @property
    def change_minor(self) -> int:
        """Return simulated minus charged."""
        return self.simulated_minor - self.charged_minor

    @property
    def change_fraction(self) -> float | None:
        """Return the change as a fraction, None if nothing was charged."""
        return self.change_minor / self.charged_minor if self.charged_minor else None


@dataclass
class Simulation:
    """A month simulated under a draft, per customer (largest first) and in total."""

    book: PriceBook
    month: Month
    customers: list[CustomerSimulation]
    unpriced: dict[str, int] = field(default_factory=dict)
    """Number of runs that have no price in the draft, by product, node spec and nodes. Their original cost is used."""
    without_usage: int = 0
    """Number of runs whose usage or node spec is unknown, because an early version wrote their receipts. Their original
    cost is used."""

    @property
    def runs(self) -> int:
        """Return the number of runs of all customers."""
        return sum(customer.runs for customer in self.customers)

    @property
    def charged_minor(self) -> int:
        """Return the total charged."""
        return sum(customer.charged_minor for customer in self.customers)

    @property
    def simulated_minor(self) -> int:
        """Return the simulated total."""
        return sum(customer.simulated_minor for customer in self.customers)

    @property
    def change_minor(self) -> int:
        """Return simulated minus charged."""
        return self.simulated_minor - self.charged_minor

    @property
    def change_fraction(self) -> float | None:
        """Return the change as a fraction, None if nothing was charged."""
        return self.change_minor / self.charged_minor if self.charged_minor else None


@dataclass(frozen=True)
class PriceChange:
    """One price in two books, None where a book lacks it."""

    name: str
    old: Decimal | None
    new: Decimal | None

    @property
    def fraction(self) -> float | None:
        """Return the change as a fraction of the old price. None if a book lacks the price, or the old price is 0."""
        return float(self.new / self.old - 1) if self.old and self.new is not None else None

    @property
    def is_large(self) -> bool:
        """Return whether the price changes by more than half: always if it was 0, never if one book lacks it."""
        if self.old is None or self.new is None:
            return False
        return abs(self.new - self.old) * 2 > self.old


def simulate_month(*, book: PriceBook, month: Month) -> Simulation:
    """Simulate the runs of a month in the currency of `book` under its prices."""
    rows = price_rows(book)
    simulation = Simulation(book, month, [])
    customers: dict[int, CustomerSimulation] = {}
    receipts = (
        Receipt.objects.filter(currency=book.currency, created_at__gte=month.start, created_at__lt=month.end)
        .exclude(hold__reference__startswith=Hold.STORAGE_PREFIX)  # storage charges are not runs
        .select_related("hold__quote", "organization")
        .prefetch_related("hold__extensions__quote")
        .order_by("pk")
    )
    for receipt in receipts.iterator(chunk_size=500):
        customer = customers.setdefault(receipt.organization_id, CustomerSimulation(receipt.organization))
        customer.runs += 1
        customer.charged_minor += receipt.total_minor
        customer.simulated_minor += _simulated_minor(receipt, rows, simulation)
    simulation.customers = sorted(
        customers.values(), key=lambda customer: (-customer.charged_minor, customer.organization.name)
    )
    return simulation


def diff(*, old: PriceBook, new: PriceBook) -> list[PriceChange]:
    """Return the prices that differ between two books, or that only one of them has, sorted by name."""
    old_prices = _by_name(old.prices.select_related("node_spec"))
    new_prices = _by_name(new.prices.select_related("node_spec"))
    names = sorted(set(old_prices) | set(new_prices))
    changes = [PriceChange(name, old_prices.get(name), new_prices.get(name)) for name in names]
    return [change for change in changes if change.old != change.new]


def large_changes(*, old: PriceBook, new: PriceBook) -> list[PriceChange]:
    """Return the prices that change by more than half.

    Each price is compared with the price that the other book applies to the same purchase. If the other book has no
    price of its own for a product, that is the price of all products.
    """
    old_rows, new_rows = price_rows(old), price_rows(new)
    prices = [*new.prices.select_related("node_spec"), *old.prices.select_related("node_spec")]
    changes = {}
    for price in prices:
        kind = pricing.PriceKind(price.kind)
        purchase = pricing.Purchase(
            product=price.product,
            mode=pricing.Mode.METERED,  # any: `find_price` reads neither `mode` nor `epochs`
            node_spec=price.node_spec.name if price.node_spec else "",
            nodes=price.nodes_from,
            epochs=1,
        )
        change = PriceChange(
            price_name(price),
            pricing.find_price(old_rows, kind, purchase),
            pricing.find_price(new_rows, kind, purchase),
        )
        if change.is_large:
            changes[change.name] = change
    return list(changes.values())


def _simulated_minor(receipt: Receipt, rows: list[pricing.PriceRow], simulation: Simulation) -> int:
    """Return the cost of a run under the prices `rows`.

    If this cost cannot be computed, the run is counted in `simulation`, and its original cost is returned.
    """
    quote = receipt.hold.quote
    if not quote.ceiling_minor:
        return receipt.total_minor  # free runs stay free
    labels: dict[str, Any] = receipt.hold.labels
    if receipt.usage is None or "node_spec" not in labels:
        simulation.without_usage += 1
        return receipt.total_minor
    terms = pricing.Terms.from_json(quote.terms)
    purchase = pricing.Purchase(
        product=str(labels.get("product", "")),
        mode=terms.mode,
        node_spec=labels["node_spec"],
        nodes=terms.nodes,
        epochs=terms.epochs,
    )
    usage = Usage.from_json(receipt.usage)
    deadlines = [  # the quote of an extension has a later deadline for the whole run
        quote.deadline_seconds,
        *(extension.quote.deadline_seconds for extension in receipt.hold.extensions.all()),
    ]
    try:
        under_draft = pricing.terms_for(
            rows,
            purchase,
            deadline_seconds=max(deadlines),
            included_seconds=terms.included_seconds,
        )
        return pricing.rate(usage, under_draft).total_minor
    except pricing.PricingError:
        name = f"{purchase.product} · {purchase.node_spec} · {purchase.nodes}"
        simulation.unpriced[name] = simulation.unpriced.get(name, 0) + 1
        return receipt.total_minor


def _by_name(prices: Iterable[Price]) -> dict[str, Decimal]:
    return {price_name(price): price.amount for price in prices}
