"""Price a run before it starts (`quote`), and the usage of a run (`rate`).

Pure functions: no clock, no database, no third-party imports.

Each line is rounded once, half up, to the minor unit (`round_minor`). The time of a run consists of ranges, each with a
constant number of nodes (`usage.Range`). The running total is rounded at the end of each range, and the line of a range
is the increase of this rounded total. So a run costs the same however its time is divided into ranges. `rate` never
exceeds the quote's ceiling. `docs/pricing.md` has worked examples, which a test recomputes.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal
from fractions import Fraction
from typing import Any

from billing.usage import Usage

SECONDS_PER_HOUR = 3600


class Mode(enum.StrEnum):
    """How a product is sold."""

    METERED = "metered"
    """By the node-seconds used, up to the ceiling."""
    FIXED = "fixed"
    """At a price per epoch that depends on node spec and nodes, and includes a limited running time."""


class PriceKind(enum.StrEnum):
    """The unit that a price applies to."""

    NODE_HOUR = "node_hour"
    EPOCH = "epoch"
    """Metered mode: an epoch of a completed run, in addition to its node-hours."""
    FIXED_EPOCH = "fixed_epoch"
    """Fixed mode: an epoch on one node."""
    MINIMUM = "minimum"
    """The least that a run with billable time costs."""
    STORAGE = "storage"
    """A GB stored for a month."""


class PricingError(Exception):
    """No quote is possible.

    `code` says why, and `field` names the value to change. `limit` is the nearest allowed value of that field, in the
    field's unit, or 0 if there is none.
    """

    def __init__(self, code: str, *, field: str, limit: int = 0) -> None:
        super().__init__(code)
        self.code = code
        self.field = field
        self.limit = limit


@dataclass(frozen=True)
class PriceRow:
    """One price of a price book, in minor units. An empty `product` or `node_spec` stands for all."""

    kind: PriceKind
    amount: Decimal
    product: str = ""
    node_spec: str = ""
    nodes_from: int = 1
    """The price is for runs on this number of nodes or more, up to the next price with a larger number."""


@dataclass(frozen=True)
class Purchase:
    """The choices that determine a price."""

    product: str
    mode: Mode
    node_spec: str
    nodes: int
    epochs: int
    """0 for a notebook, which is charged for time only."""


@dataclass(frozen=True)
class Estimate:
    """The estimated duration of a run, and its basis.

    Half of the runs with this estimate should end within `p50_seconds`, and 90% within `p90_seconds`.
    """

    p50_seconds: float
    p90_seconds: float
    source: str
    """What the estimate is based on: `history` (earlier runs), `probe` (free estimates of the script), `reference` (the
    product's reference speed), `customer` (the longest time that the customer set), `free` or `notebook` (the time
    limit alone, for a free run or a notebook)."""
    runs: int = 0
    """Number of earlier runs, or of free estimates, that the estimate is based on."""
    measured_nodes: tuple[int, ...] = ()
    """Node counts of the earlier runs if their times were scaled, because none had the requested count; else empty."""
    efficiency: float | None = None
    """Measured share of linear scaling: 1 if twice the nodes halve the time. None if nothing was scaled, or if only one
    node count was measured."""


@dataclass(frozen=True)
class Terms:
    """The prices of a quote, from which `rate` computes the charge. Amounts in minor units."""

    mode: Mode
    nodes: int
    epochs: int
    hourly: Decimal
    """Price of one node for one hour, in a run on `nodes` nodes."""
    per_epoch: Decimal
    """Price of one epoch. Metered mode: charged when the run completes. Fixed mode: on all nodes together."""
    minimum_minor: int
    ceiling_minor: int
    included_seconds: int | None = None
    """Fixed mode: running time that the price includes. Time beyond it costs `hourly`. None: all is included."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data; `from_json` is the inverse."""
        return {name: str(value) if isinstance(value, Decimal) else value for name, value in vars(self).items()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Terms:
        """Rebuild terms from the data of `to_json`."""
        converted: dict[str, Any] = {
            "mode": Mode(data["mode"]),
            "hourly": Decimal(data["hourly"]),
            "per_epoch": Decimal(data["per_epoch"]),
        }
        return cls(**data | converted)


OPTIONAL_LINE_FIELDS = frozenset({"began_at", "ended_at", "nodes", "evidence"})
"""Fields of a line that its JSON omits when they are empty, as in every line of a quote."""


@dataclass(frozen=True)
class Line:
    """One line of a quote or receipt. `rule` is a stable code; `billing.messages` has its title."""

    rule: str
    quantity: str
    """A decimal string, like `unit_minor`, so that the number stays exact in JSON."""
    unit: str
    """`node_hours`, `epochs`, `seconds`, `run` or `gigabytes`."""
    unit_minor: str
    """Price of one unit."""
    amount_minor: int
    began_at: str = ""
    """Start of the line's time range (ISO 8601), with `ended_at`; empty for lines without a time range."""
    ended_at: str = ""
    nodes: int = 0
    """Number of nodes in the time range; 0 if it does not apply."""
    evidence: dict[str, Any] = field(default_factory=dict, hash=False)
    """Why the line is free: the node and the failure, as codes and numbers. A dict has no hash, hence `hash=False`."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data without empty optional fields."""
        data = dataclasses.asdict(self)
        return {name: data[name] for name in data if data[name] or name not in OPTIONAL_LINE_FIELDS}


@dataclass(frozen=True)
class Offer:
    """A priced purchase, which `billing.quotes` stores as a Quote. Amounts in minor units; `lines` sum to the ceiling.

    `p50_minor` and `p90_minor` are the costs of a run that completes in the estimated time, at most the ceiling.
    """

    terms: Terms
    lines: tuple[Line, ...]
    p50_minor: int
    p90_minor: int
    ceiling_minor: int
    deadline_seconds: int


@dataclass(frozen=True)
class Charge:
    """The charge of a run: lines and their total, at most the ceiling."""

    lines: tuple[Line, ...]
    total_minor: int


def round_minor(amount: Decimal | Fraction) -> int:
    """Round an amount in minor units to an integer, half up."""
    return math.floor(Fraction(amount) + Fraction(1, 2))


def quote(
    prices: list[PriceRow],
    purchase: Purchase,
    estimate: Estimate,
    *,
    headroom: Decimal,
    min_deadline_seconds: int,
    max_deadline_seconds: int,
    max_seconds: int | None = None,
    ceiling_minor: int | None = None,
    included_seconds: int | None = None,
) -> Offer:
    """Price a purchase.

    The deadline is the customer's `max_seconds`. Without this limit, it is the p90 estimate times `headroom`, a factor
    of the product, from `min_deadline_seconds` to `max_deadline_seconds`. A customer's `ceiling_minor` shortens the
    deadline to the time that the ceiling pays for.

    A fixed price includes `included_seconds` of running time (None: all until the deadline). More time costs the
    node-hour price. A deadline from the estimate is at least as long as the included time.

    Raises PricingError with code `not_priced`, `max_seconds_too_large` or `ceiling_too_small`.
    """
    is_fixed = purchase.mode is Mode.FIXED
    minimum = find_price(prices, PriceKind.MINIMUM, purchase)
    hourly = find_price(prices, PriceKind.NODE_HOUR, purchase)
    per_epoch = find_price(prices, PriceKind.FIXED_EPOCH if is_fixed else PriceKind.EPOCH, purchase)
    if hourly is None or (is_fixed and per_epoch is None):
        raise PricingError("not_priced", field="node_spec")
    if max_seconds is not None and max_seconds > max_deadline_seconds:
        raise PricingError("max_seconds_too_large", field="max_seconds", limit=max_deadline_seconds)
    # Rounded to a millisecond, so that `ceil` does not turn an error of floating point into a whole second.
    default_seconds = max(min_deadline_seconds, math.ceil(Decimal(str(round(estimate.p90_seconds, 3))) * headroom))
    if is_fixed:
        default_seconds = max(default_seconds, included_seconds or 0)
    seconds = max_seconds or min(max_deadline_seconds, default_seconds)
    included = seconds if included_seconds is None else min(seconds, included_seconds)
    per_epoch = per_epoch or Decimal(0)
    terms = Terms(
        mode=purchase.mode,
        nodes=purchase.nodes,
        epochs=purchase.epochs,
        hourly=hourly,
        per_epoch=per_epoch * purchase.nodes if is_fixed else per_epoch,  # a fixed price is for an epoch on one node
        minimum_minor=round_minor(minimum or Decimal(0)),
        ceiling_minor=0,  # not known yet: `_offer` sets it
        included_seconds=included if is_fixed else None,
    )
    if is_fixed:
        return _fixed_offer(terms, estimate, seconds, ceiling_minor)
    return _metered_offer(terms, estimate, seconds, ceiling_minor)


def quote_extension(terms: Terms, *, deadline_seconds: int) -> Offer:
    """Price a metered purchase again, at the prices of its `terms`, with a later deadline.

    The deadline is also the estimate: only notebooks are extended, and a notebook's estimate is its time limit.
    """
    # `source` only describes an estimate; no price depends on it.
    estimate = Estimate(p50_seconds=deadline_seconds, p90_seconds=deadline_seconds, source="")
    return _metered_offer(terms, estimate, deadline_seconds, None)


def terms_for(
    prices: list[PriceRow], purchase: Purchase, *, deadline_seconds: int, included_seconds: int | None
) -> Terms:
    """Return the terms of a purchase with this deadline under `prices`. Raises PricingError (`not_priced`)."""
    offer = quote(
        prices,
        purchase,
        # Has no effect on the terms, since the deadline is given.
        Estimate(p50_seconds=0.0, p90_seconds=0.0, source=""),
        headroom=Decimal(1),
        min_deadline_seconds=0,
        max_deadline_seconds=deadline_seconds,
        max_seconds=deadline_seconds,
        included_seconds=included_seconds,
    )
    return offer.terms


def rate(usage: Usage, terms: Terms) -> Charge:
    """Return the charge for `usage` under a quote's terms, at most the ceiling.

    A completed run in fixed mode costs the fixed price plus the time beyond the included time. All other runs cost the
    time used at the node-hour price. An incomplete fixed run costs at most as much as a completed one of the same time;
    a completed metered run adds its epochs. A run that used any time costs at least the minimum.
    """
    if usage.billable_seconds <= 0:
        return Charge((), 0)
    if terms.mode is Mode.FIXED:
        lines = _fixed_lines(terms, usage.node_seconds(terms.nodes))
        if not usage.completed:
            lines = _with_cap(sum(line.amount_minor for line in lines), _used_lines(terms, usage))
    else:
        lines = _used_lines(terms, usage)
        if usage.completed and terms.per_epoch and terms.epochs:
            lines.append(_epochs_line(terms))
    return _capped_charge(lines, terms)


def affordable_seconds(terms: Terms, budget_minor: int) -> int:
    """Return how many seconds on all nodes `budget_minor` pays for, after the price of the epochs."""
    for_time_minor = budget_minor - _epochs_line(terms).amount_minor
    if for_time_minor < 0:
        return 0
    if terms.hourly == 0:
        return 10**9  # time is free; 31 years are longer than any deadline
    return math.floor(for_time_minor / _time_minor(terms, Decimal(1)))


def _metered_offer(terms: Terms, estimate: Estimate, seconds: int, ceiling_minor: int | None) -> Offer:
    """Price a metered purchase. A customer's ceiling shortens the deadline, `seconds`, to the time that it pays for."""
    if ceiling_minor is not None:
        # The ceiling must pay for a minute: a shorter run would not get past its start. The price of that minute is
        # rounded up, so that the ceiling in the error is enough.
        minute_minor = math.ceil(_time_minor(terms, Decimal(60)))
        smallest_ceiling = max(terms.minimum_minor, minute_minor + _epochs_line(terms).amount_minor)
        if ceiling_minor < smallest_ceiling:
            raise PricingError("ceiling_too_small", field="ceiling_minor", limit=smallest_ceiling)
        seconds = min(seconds, affordable_seconds(terms, ceiling_minor))
    lines = [_time_line(terms, Decimal(seconds))]
    if terms.per_epoch and terms.epochs:
        lines.append(_epochs_line(terms))
    return _offer(terms, estimate, seconds, lines)


def _fixed_offer(terms: Terms, estimate: Estimate, seconds: int, ceiling_minor: int | None) -> Offer:
    """Price a fixed purchase. A customer's ceiling shortens the deadline, `seconds`.

    The included time stays, and is followed by the time that the rest of the ceiling pays for.
    """
    price, included = _epochs_line(terms).amount_minor, terms.included_seconds or 0
    if ceiling_minor is not None:
        if ceiling_minor < (smallest_ceiling := max(price, terms.minimum_minor)):
            raise PricingError("ceiling_too_small", field="ceiling_minor", limit=smallest_ceiling)
        seconds = min(seconds, included + affordable_seconds(terms, ceiling_minor))
    return _offer(terms, estimate, seconds, _fixed_lines(terms, Decimal(seconds * terms.nodes)))


def _offer(terms: Terms, estimate: Estimate, seconds: int, lines: list[Line]) -> Offer:
    """Build the offer. If needed, a line raises the sum of `lines` to the minimum charge. The sum is the ceiling."""
    lines = _with_minimum(terms.minimum_minor, lines)
    ceiling = sum(line.amount_minor for line in lines)
    p50, p90 = (
        min(ceiling, _completed_cost(terms, Decimal(str(estimated))))
        for estimated in (estimate.p50_seconds, estimate.p90_seconds)
    )
    return Offer(dataclasses.replace(terms, ceiling_minor=ceiling), tuple(lines), p50, p90, ceiling, seconds)


def trials_line(trials: int, ceiling_minor: int) -> Line:
    """Return the line of a sweep's quote: each of its trials costs at most `ceiling_minor`."""
    return _line("trials", Decimal(trials), "run", Decimal(ceiling_minor))


def above_ceiling_line(amount_minor: int) -> Line:
    """Return the line that lowers a sweep's quote by `amount_minor`, to the customer's ceiling."""
    return _line("above_ceiling", Decimal(1), "run", Decimal(-amount_minor))


def _capped_charge(lines: list[Line], terms: Terms) -> Charge:
    """Raise the charge to the minimum and cut it at the ceiling. Both are lines, so that lines sum to the total."""
    lines = _with_cap(terms.ceiling_minor, _with_minimum(terms.minimum_minor, lines), rule="above_ceiling")
    return Charge(tuple(lines), sum(line.amount_minor for line in lines))


def _with_minimum(amount_minor: int, lines: list[Line]) -> list[Line]:
    """If the lines sum to less than `amount_minor`, add a line with the difference."""
    missing = amount_minor - sum(line.amount_minor for line in lines)
    return [*lines, _line("minimum", Decimal(1), "run", Decimal(missing))] if missing > 0 else lines


def _with_cap(amount_minor: int, lines: list[Line], *, rule: str = "above_fixed_price") -> list[Line]:
    """If the lines sum to more than `amount_minor`, add a negative line with the difference."""
    above = sum(line.amount_minor for line in lines) - amount_minor
    return [*lines, _line(rule, Decimal(1), "run", Decimal(-above))] if above > 0 else lines


def _completed_cost(terms: Terms, seconds: Decimal) -> int:
    """Return the cost of a completed run of `seconds` on all nodes."""
    if terms.mode is Mode.FIXED:
        lines = _fixed_lines(terms, seconds * terms.nodes)
    else:
        lines = [_time_line(terms, seconds), _epochs_line(terms)]
    return max(terms.minimum_minor, sum(line.amount_minor for line in lines))


def _epochs_line(terms: Terms) -> Line:
    """Return the line of all epochs: in fixed mode the fixed price, in metered mode the price of completing them."""
    rule = "fixed_price" if terms.mode is Mode.FIXED else "epochs_completed"
    return _line(rule, Decimal(terms.epochs), "epochs", terms.per_epoch)


def _fixed_lines(terms: Terms, node_seconds: Decimal) -> list[Line]:
    """Return the lines of a completed fixed run: its price and the node time beyond the included time."""
    lines = [_epochs_line(terms)]
    extra = 0 if terms.included_seconds is None else node_seconds - terms.included_seconds * terms.nodes
    if extra > 0:
        # One node, because `extra` counts node-seconds.
        line = _time_line(dataclasses.replace(terms, nodes=1), Decimal(extra))
        lines.append(dataclasses.replace(line, rule="extra_time"))
    return lines


def _time_minor(terms: Terms, seconds: Decimal) -> Fraction:
    """Return the exact price of `seconds` on all nodes. A Fraction, because a Decimal would be rounded here already."""
    return Fraction(seconds) * terms.nodes * Fraction(terms.hourly) / SECONDS_PER_HOUR


def _used_lines(terms: Terms, usage: Usage) -> list[Line]:
    """Return a line per time range. The amounts are rounded so that they sum to the rounded total price."""
    lines, exact_minor, rounded_minor = [], Fraction(0), 0
    for part in usage.parts(terms.nodes):
        part_terms = dataclasses.replace(terms, nodes=part.nodes)
        seconds = Decimal(str(part.seconds))
        exact_minor += _time_minor(part_terms, seconds)
        amount = round_minor(exact_minor) - rounded_minor
        rounded_minor += amount
        lines.append(
            dataclasses.replace(
                _time_line(part_terms, seconds),
                amount_minor=amount,
                began_at=part.began_at,
                ended_at=part.ended_at,
                # Without ranges, the only part has no start. It has all nodes of the quote, which need not be shown.
                nodes=part.nodes if part.began_at else 0,
            )
        )
    return lines


def _time_line(terms: Terms, seconds: Decimal) -> Line:
    """Return the line of `seconds` on all nodes of `terms`, at the node-hour price."""
    hours = seconds * terms.nodes / SECONDS_PER_HOUR
    return Line(
        rule="time_used",
        # Rounded for display only: the amount is computed from the seconds.
        quantity=_plain(hours.quantize(Decimal("0.000001"), rounding=ROUND_HALF_UP)),
        unit="node_hours",
        unit_minor=_plain(terms.hourly),
        amount_minor=round_minor(_time_minor(terms, seconds)),
    )


def _line(rule: str, quantity: Decimal, unit: str, unit_minor: Decimal) -> Line:
    return Line(rule, _plain(quantity), unit, _plain(unit_minor), round_minor(quantity * unit_minor))


def _plain(number: Decimal) -> str:
    """Format a Decimal without exponent and trailing zeros."""
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def find_price(prices: list[PriceRow], kind: PriceKind, purchase: Purchase) -> Decimal | None:
    """Return the price of `kind` for a purchase, or None.

    The product's own price wins over the price of all products. Then the price with the largest `nodes_from` wins.
    Node specs need no such rule: of each kind, either all prices name a node spec or none does (`models.Price`).
    """
    matching = [
        row
        for row in prices
        if row.kind is kind
        and row.product in {"", purchase.product}
        and row.node_spec in {"", purchase.node_spec}
        and row.nodes_from <= purchase.nodes
    ]
    best = max(matching, key=lambda row: (row.product != "", row.nodes_from), default=None)
    return best.amount if best else None
