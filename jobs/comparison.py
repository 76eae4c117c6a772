"""A quote beside the same run on other numbers of nodes, and on other node specs: time, price, efficiency, start.

Nothing is stored. Each alternative is validated and priced by the code that makes quotes. So a quote for it has the
same price, unless prices or estimates change in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from billing.models import NodeSpec, Quote
from billing.pricing import Estimate
from billing.quotes import CurrentPrices, current_prices, price
from console.core.errors import CustomerError, InvalidInput
from jobs import estimates, orders, reruns
from jobs.availability import Forecast, StartForecast
from jobs.errors import ChoiceUnavailable
from jobs.estimates import History
from jobs.models import Job
from jobs.purchase import Purchase, parse, purchase_data

NODE_COUNTS = (1, 2, 4)
"""Numbers of nodes that a quote is compared with: enough to show how the run scales."""
MAX_SPECS = 12
"""Node specs that a quote is compared with: each costs a few queries."""


@dataclass(frozen=True)
class Figures:
    """Price and time of an alternative. Amounts in minor units."""

    p50_minor: int
    p90_minor: int
    ceiling_minor: int
    deadline_seconds: int
    estimate: Mapping[str, Any]
    """Times in seconds and their basis, as `Quote.basis`."""


@dataclass(frozen=True)
class Alternative:
    """The quoted run (`is_quoted`), or the same run on other nodes.

    If no quote for it is possible, `refusal` says why, and `figures` and `start` are None. `efficiency` is the share of
    linear scaling from one node; `is_measured`: earlier runs on different numbers of nodes show this share.
    """

    node_spec: NodeSpec
    nodes: int
    workers_per_node: int
    is_quoted: bool = False
    figures: Figures | None = None
    start: StartForecast | None = None
    refusal: str = ""
    efficiency: float | None = None
    is_measured: bool = False


@dataclass(frozen=True)
class Comparison:
    """A quote's alternatives: by number of nodes, and by node spec as pages list them. Both include the quoted run."""

    quote: Quote
    by_nodes: list[Alternative]
    by_spec: list[Alternative]


def compare(quote: Quote) -> Comparison:
    """Compare a quote with its alternatives. Raises ChoiceUnavailable if something in the quote no longer exists."""
    original = reruns.exact_original(quote)
    purchase = _parse_purchase(quote, changes={}, original=original)
    comparer = _Comparer(quote, purchase, original)
    counts = sorted({*NODE_COUNTS, purchase.nodes})
    specs = NodeSpec.objects.filter(is_active=True)[:MAX_SPECS]
    return Comparison(
        quote,
        by_nodes=[comparer.on_nodes(count) for count in counts],
        by_spec=[comparer.on_spec(spec) for spec in specs],
    )


class _Comparer:
    """Builds the alternatives of a quote. Prices, capacity and earlier runs are read once for all of them."""

    def __init__(self, quote: Quote, purchase: Purchase, original: Job | None) -> None:
        self._quote, self._purchase, self._original = quote, purchase, original
        self._prices: CurrentPrices = current_prices(quote.organization)
        self._forecast = Forecast(quote.organization)
        self._history: History = estimates.history(purchase)
        self._one_node = estimates.estimate_from(self._history, replace(purchase, nodes=1))

    def on_nodes(self, nodes: int) -> Alternative:
        """Return the run on a number of nodes."""
        if nodes == self._purchase.nodes:
            alternative = self._quoted()
        else:
            # If an elastic run's minimum is more than these nodes, all of them are needed.
            min_nodes = min(self._purchase.fault_tolerance.min_nodes, nodes)
            changes = {"nodes": nodes, "min_nodes": min_nodes}
            alternative = self._alternative(self._purchase.node_spec, changes, self._history)
        if alternative.figures is None:
            return alternative
        efficiency = _efficiency(self._one_node, alternative.figures.estimate, nodes)
        return replace(alternative, efficiency=efficiency, is_measured=self._history.measures_scaling)

    def on_spec(self, spec: NodeSpec) -> Alternative:
        """Return the run on the same number of nodes of another spec."""
        if spec == self._purchase.node_spec:
            return self._quoted()
        # If either spec has GPUs, the default applies: one process per GPU, or one on a node without GPUs. Otherwise
        # the number of processes in the quote stays.
        has_gpus = spec.gpus or self._purchase.node_spec.gpus
        workers = (spec.gpus or 1) if has_gpus else self._purchase.workers_per_node
        return self._alternative(spec, {"node_spec": spec.name, "workers_per_node": workers}, history=None)

    def _quoted(self) -> Alternative:
        """Return the quoted run with the figures of its quote."""
        quote, purchase = self._quote, self._purchase
        return Alternative(
            purchase.node_spec,
            purchase.nodes,
            purchase.workers_per_node,
            is_quoted=True,
            figures=Figures(quote.p50_minor, quote.p90_minor, quote.ceiling_minor, quote.deadline_seconds, quote.basis),
            start=self._start(purchase),
        )

    def _alternative(self, spec: NodeSpec, changes: Mapping[str, Any], history: History | None) -> Alternative:
        """Return the quoted run with `changes`. `history`: its earlier runs, if they are already read."""
        nodes = changes.get("nodes", self._purchase.nodes)
        alternative = Alternative(spec, nodes, changes.get("workers_per_node", self._purchase.workers_per_node))
        try:
            purchase = _parse_purchase(self._quote, changes, self._original)
            estimate = estimates.estimate_from(history or estimates.history(purchase), purchase)
            offer = price(self._prices, **orders.pricing_inputs(purchase, estimate))
        except CustomerError as error:
            return replace(alternative, refusal=_refusal(error))
        figures = Figures(offer.p50_minor, offer.p90_minor, offer.ceiling_minor, offer.deadline_seconds, vars(estimate))
        return replace(alternative, figures=figures, start=self._start(purchase))

    def _start(self, purchase: Purchase) -> StartForecast:
        """Return when the run could start. An elastic one needs only its minimum nodes."""
        return self._forecast.start(purchase.node_spec, purchase.fault_tolerance.min_nodes or purchase.nodes)


def _parse_purchase(quote: Quote, changes: Mapping[str, Any], original: Job | None) -> Purchase:
    """Return a quote's purchase with changes, validated as for an order. Raises ChoiceUnavailable.

    The versions of datasets and models stay those of the quote. `original`: the job that the quote repeats exactly, if
    any.
    """
    data = {**purchase_data(quote.purchase), **changes}
    try:
        return parse(organization=quote.organization, data=data, uses_given_versions=True, original=original)
    except InvalidInput as error:
        raise ChoiceUnavailable(fields=error.fields) from error


def _efficiency(one_node: Estimate, estimate: Mapping[str, Any], nodes: int) -> float | None:
    """Return the share of linear scaling, 0 to 1; None if an estimate is only the customer's time limit."""
    seconds = float(estimate["p50_seconds"])
    if "customer" in {one_node.source, estimate["source"]} or not seconds:
        return None
    return round(min(1.0, one_node.p50_seconds / seconds / nodes), 3)


def _refusal(error: CustomerError) -> str:
    """Return an error's sentences without repetition."""
    return " ".join(dict.fromkeys(map(str, error.fields.values()))) or str(error.message)
