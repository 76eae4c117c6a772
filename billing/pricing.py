"""What a run costs, before and after: quote and rate. PURE: no clock, no database, no import from outside.

The one rounding rule: each line is rounded once, half up, to the minor unit (`round_minor`); ranges of time are rounded
on their running total, so that a run costs the same however it was cut into ranges. The one promise: what `rate` gives
is never more than the quote's ceiling. Worked numbers stand in `docs/pricing.md`, and a test recomputes
them.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal
from fractions import Fraction
from typing import Any

from billing.usage import Range, Usage

SECONDS_PER_HOUR = 3600


class Mode(enum.StrEnum):
    """How a product is sold."""

    METERED = "metered"
    """Node-seconds used, up to the ceiling."""
    FIXED = "fixed"
    """A price for each epoch, node spec and node count, known in full before the run."""


class PriceKind(enum.StrEnum):
    """What a price in a price book is per."""

    NODE_HOUR = "node_hour"
    EPOCH = "epoch"
    FIXED_EPOCH = "fixed_epoch"
    MINIMUM = "minimum"


class PricingError(Exception):
    """A quote can't be made; `field` names what to change and `code` why."""

    def __init__(self, code: str, *, field: str, minimum: int = 0) -> None:
        super().__init__(code)
        self.code = code
        self.field = field
        self.minimum = minimum


@dataclass(frozen=True)
class PriceRow:
    """One price of a price book. `amount` in minor units; product and node_spec "" mean any."""

    kind: PriceKind
    amount: Decimal
    product: str = ""
    node_spec: str = ""
    nodes_from: int = 1


@dataclass(frozen=True)
class Purchase:
    """What is bought, as far as the price goes."""

    product: str
    mode: Mode
    node_spec: str
    nodes: int
    epochs: int


@dataclass(frozen=True)
class Estimate:
    """How long the whole run is thought to take, in seconds, and where that comes from."""

    p50_seconds: float
    p90_seconds: float
    source: str
    """`history`, `probe`, `reference`, `customer` or `free`."""
    runs: int = 0
    """How many earlier runs stand behind it."""
    measured_nodes: tuple[int, ...] = ()
    """The node counts of those runs, where none had the number asked for and their times were scaled to it."""
    efficiency: float | None = None
    """What share of the ideal speed the scaling leaves, by what was measured; None where nothing was scaled, or where
    runs of one node count alone can't show it."""


@dataclass(frozen=True)
class Terms:
    """The prices a quote was made with: all that `rate` needs. Amounts in minor units."""

    mode: Mode
    nodes: int
    epochs: int
    hourly: Decimal
    """One node, one hour, at this node count's tier."""
    per_epoch: Decimal
    """Metered: one epoch, charged when the run completes. Fixed: one epoch on all nodes."""
    minimum_minor: int
    ceiling_minor: int

    def to_json(self) -> dict[str, Any]:
        """As plain JSON; `from_json` is the inverse."""
        return {name: str(value) if isinstance(value, Decimal) else value for name, value in vars(self).items()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Terms:
        """Read what `to_json` gave."""
        return cls(
            **{
                **data,
                "mode": Mode(data["mode"]),
                "hourly": Decimal(data["hourly"]),
                "per_epoch": Decimal(data["per_epoch"]),
            }
        )


@dataclass(frozen=True)
class Line:
    """One line of a quote or receipt. `rule` is the stable name of why it is so; the words for it are the display's."""

    rule: str
    quantity: str
    unit: str
    """`node_hours`, `epochs`, `seconds` or `run`."""
    unit_minor: str
    amount_minor: int
    began_at: str = ""
    """With `ended_at`, the moments (ISO 8601) of a line that is about a stretch of time; empty for any other."""
    ended_at: str = ""
    nodes: int = 0
    """How many nodes a stretch of time is about; 0 where that says nothing."""
    evidence: dict[str, Any] = field(default_factory=dict, hash=False)
    """What stands behind a line that is free: which node, what failed (plain names and numbers)."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON, without what does not apply."""
        data = dataclasses.asdict(self)
        return {name: data[name] for name in data if data[name] or name not in OPTIONAL_OF_A_LINE}


@dataclass(frozen=True)
class Offer:
    """A priced purchase. `lines` say what the ceiling is made of and sum to it."""

    terms: Terms
    lines: tuple[Line, ...]
    p50_minor: int
    p90_minor: int
    ceiling_minor: int
    deadline_seconds: int


OPTIONAL_OF_A_LINE = frozenset({"began_at", "ended_at", "nodes", "evidence"})


@dataclass(frozen=True)
class Charge:
    """What is due: the lines and their total, never above the ceiling."""

    lines: tuple[Line, ...]
    total_minor: int


def round_minor(amount: Decimal | Fraction) -> int:
    """An amount in minor units as an integer, half up."""
    return math.floor(Fraction(amount) + Fraction(1, 2))


def quote(
    prices: list[PriceRow],
    purchase: Purchase,
    estimate: Estimate,
    *,
    headroom: Decimal,
    least_seconds: int,
    most_seconds: int,
    max_seconds: int | None = None,
    ceiling_minor: int | None = None,
) -> Offer:
    """Price a purchase.

    The deadline is the customer's `max_seconds`, or else the p90 estimate times `headroom`; never under
    `least_seconds` (unless the customer said so) nor over `most_seconds`. A customer's `ceiling_minor` shortens it to
    what that money buys. Raises PricingError: `not_priced`, `max_seconds_too_large`, `ceiling_too_small` (with the
    least that works).
    """
    minimum = _find(prices, PriceKind.MINIMUM, purchase)
    hourly = _find(prices, PriceKind.NODE_HOUR, purchase)
    fixed = _find(prices, PriceKind.FIXED_EPOCH, purchase)
    extra = _find(prices, PriceKind.EPOCH, purchase)
    if hourly is None or (purchase.mode is Mode.FIXED and fixed is None):
        raise PricingError("not_priced", field="node_spec")
    if max_seconds is not None and max_seconds > most_seconds:
        raise PricingError("max_seconds_too_large", field="max_seconds", minimum=most_seconds)
    seconds = max_seconds or min(most_seconds, max(least_seconds, int(Decimal(estimate.p90_seconds) * headroom) + 1))
    terms = Terms(
        mode=purchase.mode,
        nodes=purchase.nodes,
        epochs=purchase.epochs,
        hourly=hourly,
        per_epoch=(fixed or Decimal(0)) * purchase.nodes if purchase.mode is Mode.FIXED else extra or Decimal(0),
        minimum_minor=round_minor(minimum or Decimal(0)),
        ceiling_minor=0,
    )
    if purchase.mode is Mode.FIXED:
        return _fixed_offer(terms, seconds, ceiling_minor)
    return _metered_offer(terms, estimate, seconds, ceiling_minor)


def terms_for(prices: list[PriceRow], purchase: Purchase, *, deadline_seconds: int) -> Terms:
    """The terms that `prices` would give a purchase of this deadline. Raises PricingError (`not_priced`)."""
    unknown = Estimate(0.0, 0.0, "")
    offer = quote(
        prices,
        purchase,
        unknown,
        headroom=Decimal(1),
        least_seconds=0,
        most_seconds=deadline_seconds,
        max_seconds=deadline_seconds,
    )
    return offer.terms


def rate(usage: Usage, terms: Terms) -> Charge:
    """What `usage` costs under a quote's terms. Never more than the ceiling.

    Fixed and completed: the price. Everything else: the time used, at the node-hour price; a completed metered run
    adds its epochs, and a run that used any time costs at least the minimum.
    """
    if usage.billable_seconds <= 0:
        return Charge((), 0)
    if terms.mode is Mode.FIXED and usage.completed:
        lines = [_line("fixed_price", Decimal(terms.epochs), "epochs", terms.per_epoch)]
    else:
        lines = _used_lines(terms, usage)
        if terms.mode is Mode.METERED and usage.completed and terms.per_epoch:
            lines.append(_line("epochs_completed", Decimal(terms.epochs), "epochs", terms.per_epoch))
    return _within(lines, terms)


def affordable_seconds(terms: Terms, budget_minor: int) -> int:
    """The most whole seconds on all nodes whose price, with the epochs', is within `budget_minor`; never negative."""
    room = budget_minor - _epochs_minor(terms)
    if room < 0:
        return 0
    if terms.hourly == 0:
        return 10**9
    return math.floor(room / _time_minor(terms, Decimal(1)))


def _metered_offer(terms: Terms, estimate: Estimate, seconds: int, ceiling_minor: int | None) -> Offer:
    if ceiling_minor is not None:
        # Rounded up: what is named as the least does buy a minute.
        least = max(terms.minimum_minor, math.ceil(_time_minor(terms, Decimal(60))) + _epochs_minor(terms))
        if ceiling_minor < least:
            raise PricingError("ceiling_too_small", field="ceiling_minor", minimum=least)
        seconds = min(seconds, affordable_seconds(terms, ceiling_minor))
    lines = [_time_line(terms, Decimal(seconds))]
    if terms.per_epoch:
        lines.append(_line("epochs_completed", Decimal(terms.epochs), "epochs", terms.per_epoch))
    shortfall = terms.minimum_minor - sum(line.amount_minor for line in lines)
    if shortfall > 0:
        lines.append(_line("minimum", Decimal(1), "run", Decimal(shortfall)))
    ceiling = sum(line.amount_minor for line in lines)
    return Offer(
        terms=dataclasses.replace(terms, ceiling_minor=ceiling),
        lines=tuple(lines),
        p50_minor=min(ceiling, _total(terms, Decimal(str(estimate.p50_seconds)))),
        p90_minor=min(ceiling, _total(terms, Decimal(str(estimate.p90_seconds)))),
        ceiling_minor=ceiling,
        deadline_seconds=seconds,
    )


def _fixed_offer(terms: Terms, seconds: int, ceiling_minor: int | None) -> Offer:
    lines = [_line("fixed_price", Decimal(terms.epochs), "epochs", terms.per_epoch)]
    shortfall = terms.minimum_minor - lines[0].amount_minor
    if shortfall > 0:
        lines.append(_line("minimum", Decimal(1), "run", Decimal(shortfall)))
    price = sum(line.amount_minor for line in lines)
    if ceiling_minor is not None and ceiling_minor < price:
        raise PricingError("ceiling_too_small", field="ceiling_minor", minimum=price)
    return Offer(
        terms=dataclasses.replace(terms, ceiling_minor=price),
        lines=tuple(lines),
        p50_minor=price,
        p90_minor=price,
        ceiling_minor=price,
        deadline_seconds=seconds,
    )


def _within(lines: list[Line], terms: Terms) -> Charge:
    """Raise to the minimum and cut at the ceiling, each as a line of its own: the lines always sum to the total."""
    total = sum(line.amount_minor for line in lines)
    if total < terms.minimum_minor:
        lines.append(_line("minimum", Decimal(1), "run", Decimal(terms.minimum_minor - total)))
        total = terms.minimum_minor
    if total > terms.ceiling_minor:
        lines.append(_line("above_ceiling", Decimal(1), "run", Decimal(terms.ceiling_minor - total)))
        total = terms.ceiling_minor
    return Charge(tuple(lines), total)


def _total(terms: Terms, seconds: Decimal) -> int:
    return max(terms.minimum_minor, _time_line(terms, seconds).amount_minor + _epochs_minor(terms))


def _epochs_minor(terms: Terms) -> int:
    return round_minor(terms.per_epoch * terms.epochs)


def _time_minor(terms: Terms, seconds: Decimal) -> Fraction:
    """The price of `seconds` on all nodes, exact: a third has no end in decimals, and must not tip a half."""
    return Fraction(seconds) * terms.nodes * Fraction(terms.hourly) / SECONDS_PER_HOUR


def _used_lines(terms: Terms, usage: Usage) -> list[Line]:
    """A line for each range, rounded so that they sum to the rounded price of all of them."""
    whole = Range(usage.billable_seconds, terms.nodes)
    lines, due, written = [], Fraction(0), 0
    for part in usage.ranges or (whole,):
        of_part = dataclasses.replace(terms, nodes=part.nodes)
        seconds = Decimal(str(part.seconds))
        due += _time_minor(of_part, seconds)
        amount = round_minor(due) - written
        written += amount
        lines.append(
            dataclasses.replace(
                _time_line(of_part, seconds),
                amount_minor=amount,
                began_at=part.began_at,
                ended_at=part.ended_at,
                nodes=part.nodes if part.began_at else 0,
            )
        )
    return lines


def _time_line(terms: Terms, seconds: Decimal) -> Line:
    hours = seconds * terms.nodes / SECONDS_PER_HOUR
    return Line(
        rule="time_used",
        quantity=_plain(hours.quantize(Decimal("0.000001"), rounding=ROUND_HALF_UP)),
        unit="node_hours",
        unit_minor=_plain(terms.hourly),
        amount_minor=round_minor(_time_minor(terms, seconds)),
    )


def _line(rule: str, quantity: Decimal, unit: str, unit_minor: Decimal) -> Line:
    return Line(rule, _plain(quantity), unit, _plain(unit_minor), round_minor(quantity * unit_minor))


def _plain(number: Decimal) -> str:
    """A Decimal in plain digits, without trailing zeros."""
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _find(prices: list[PriceRow], kind: PriceKind, purchase: Purchase) -> Decimal | None:
    """The price of `kind`: the product's own before everyone's, then the highest tier that the node count reaches."""
    found = [
        row
        for row in prices
        if row.kind is kind
        and row.product in {"", purchase.product}
        and row.node_spec in {"", purchase.node_spec}
        and row.nodes_from <= purchase.nodes
    ]
    best = max(found, key=lambda row: (row.product != "", row.nodes_from), default=None)
    return best.amount if best else None
