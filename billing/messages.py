"""Translated sentences about money: titles of receipt lines, failed payments, the basis of an estimate.

Rows store codes and figures; this module turns them into sentences when they are shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, gettext_noop, ngettext

LINE_TITLES = {
    "time_used": gettext_lazy("Node time"),
    "epochs_completed": gettext_lazy("Epochs, charged when the run completes"),
    "fixed_price": gettext_lazy("Fixed price of the epochs"),
    "extra_time": gettext_lazy("Node time beyond the fixed price"),
    "minimum": gettext_lazy("Minimum charge"),
    "above_fixed_price": gettext_lazy("Above the fixed price: not charged"),
    "above_ceiling": gettext_lazy("Above the ceiling: not charged"),
    "trials": gettext_lazy("All trials, each at its ceiling"),
    "queue": gettext_lazy("Waiting in the queue: free"),
    "start": gettext_lazy("Starting the nodes: free"),
    "hang": gettext_lazy("Hanging without progress: free"),
    "platform_fault": gettext_lazy("Platform fault: free"),
    "after_cancel": gettext_lazy("After cancellation: free"),
    "storage": gettext_lazy("Storage of the day, and unpaid storage of earlier days"),
}
"""Title of a quote's or receipt's line by its rule."""

PAYMENT_FAILURES = {
    "insufficient_funds": gettext_lazy("The card has insufficient funds."),
    "expired_card": gettext_lazy("The card has expired."),
    "authentication_required": gettext_lazy("The bank requires the cardholder to confirm each payment."),
    # Never shown as lost: the payer may be a thief. Stripe's advice is to show a general decline.
    "lost_card": gettext_lazy("The bank declined the card."),
    "disputed": gettext_lazy("A payment with this card was disputed."),
    "refunded": gettext_lazy("A payment with this card was refunded."),
    "refused": gettext_lazy("The payment provider refused the card."),
    "card_gone": gettext_lazy("The card is no longer saved."),
    "customer_gone": gettext_lazy("The saved cards were deleted at the payment provider. Add a card again."),
    "unanswered": gettext_lazy("The payment provider did not answer."),
}
"""Sentence for each failure code of a payment: Stripe's decline codes and our own codes."""

EARLIER_DESCRIPTIONS = (
    gettext_noop("Credit that expired"),
    gettext_noop("Dispute won: back in the wallet"),
    gettext_noop("Disputed payment: taken back by the bank"),
    gettext_noop("Paid from it: a debt that had been written off"),
    gettext_noop("Paid from it: what was owed"),
    gettext_noop("Refund that failed: back in the wallet"),
)
"""Descriptions that earlier versions stored in the ledger. Ledger rows never change, so these are still translated."""

ESTIMATE_BASES = {
    "customer": gettext_lazy("Assumes the longest time that you set. No run of this script has been measured yet."),
    "notebook": gettext_lazy(
        "You pay for the time until you stop the notebook, it is idle for too long, or it reaches its time limit."
    ),
    "free": gettext_lazy("This run is free. It ends at its time limit at the latest."),
    "reference": gettext_lazy("Assumes the product's reference speed. No run of this script has been measured yet."),
}
"""Sentence for each `Estimate.source` whose sentence contains no figures."""
MIN_RUNS_FOR_P90 = 5
"""Fewest earlier runs from which the page claims "90% of runs". The p90 of fewer runs is no measurement, because
`jobs.estimates` makes it at least a fixed multiple of the p50. The number equals `FEW_RUNS` of that module, which
`billing` cannot import."""


def line_title(line: Mapping[str, Any]) -> str:
    """Return the title of a quote's or receipt's line."""
    return str(LINE_TITLES.get(line["rule"], line["rule"]))


def basis_sentence(basis: Mapping[str, Any]) -> str:
    """Return a sentence about the basis of an estimate. `basis` has the fields of `billing.pricing.Estimate`."""
    source, runs = basis.get("source"), int(basis.get("runs") or 0)
    if source == "history" and basis.get("measured_nodes"):  # only runs on other numbers of nodes were measured
        return _scaled_sentence(basis, runs)
    if source == "history":
        return ngettext(
            "Based on %(runs)d earlier run of the same script on the same nodes.",
            "Based on %(runs)d earlier runs of the same script on the same nodes.",
            runs,
        ) % {"runs": runs}
    if source == "probe":
        return ngettext(
            "Based on %(runs)d free estimate of this script on one node.",
            "Based on %(runs)d free estimates of this script on one node.",
            runs,
        ) % {"runs": runs}
    return str(ESTIMATE_BASES.get(str(source), ESTIMATE_BASES["reference"]))


def p90_label(basis: Mapping[str, Any]) -> str:
    """Return the label of an estimate's p90: "90% of runs cost less than" only if enough such runs were measured.

    Runs on other numbers of nodes, which `measured_nodes` lists, do not count. `basis` has the fields of
    `billing.pricing.Estimate`.
    """
    is_measured = basis.get("source") == "history" and not basis.get("measured_nodes")
    if is_measured and int(basis.get("runs") or 0) >= MIN_RUNS_FOR_P90:
        # xgettext: no-python-format, because "% o" is not a placeholder here.
        return _("90% of runs cost less than")
    return _("High estimate")


def _scaled_sentence(basis: Mapping[str, Any], runs: int) -> str:
    sentence = ngettext(
        "Scaled from %(runs)d earlier run of the same script on a different number of these nodes (%(nodes)s).",
        "Scaled from %(runs)d earlier runs of the same script on a different number of these nodes (%(nodes)s).",
        runs,
    ) % {"runs": runs, "nodes": ", ".join(map(str, basis["measured_nodes"]))}
    if basis.get("efficiency") is None:
        return sentence
    efficiency = _("Measured efficiency: %(percent)d %%.") % {"percent": round(float(basis["efficiency"]) * 100)}
    return f"{sentence} {efficiency}"


def payment_failure_sentence(code: str) -> str:
    """Return why a payment failed. Unknown codes, of which Stripe has many, get a general sentence."""
    return str(PAYMENT_FAILURES.get(code, _("The bank declined the card.")))
