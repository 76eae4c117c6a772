"""Free estimates: run the customer's code for a minute on one node, so that the estimate of a first run is measured.

A free estimate is an order like any other, with a price of 0. It cannot replace a paid run: it has one node, one
minute, and the daily limits of the billing policy (per organization and per person). Stored values and the API call a
free estimate a probe. A rerun of a free estimate is a paid run: of the purchase that was measured, with its own nodes
and limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from django.db import transaction
from django.utils.translation import gettext as _

from billing.models import Quote, TopUp
from billing.policy import policy
from billing.quotes import make_free_quote
from console.accounts.models import Membership, Organization, User
from console.accounts.services import require_active
from jobs import free_runs, orders, quotas
from jobs.errors import IdempotencyConflict, QuotaExceeded
from jobs.models import Order
from jobs.purchase import FREE_ESTIMATE_MARK, MEASURED, parse, purchase_data

MAX_SECONDS = 60
"""Time limit of a free estimate: enough for the first epoch of a small training, too short for useful training."""
_RESOLVED_FIELDS = frozenset({"dataset_versions", "resolved_datasets", "model_versions", "resolved_models"})
"""Fields of a stored purchase that the same choices may fill differently later: a new version may be the latest one."""
IMPROVABLE_SOURCES = frozenset({"reference", "customer"})
"""Sources of estimates (`Quote.basis`) that no measurement supports. A free estimate can improve only these."""


def order_free_estimate(*, membership: Membership, data: Mapping[str, Any], idempotency_key: str = "") -> Order:
    """Order a free estimate of the purchase in `data` (the API's field names). `nodes` may be missing.

    A repeated key returns the same order, even if its datasets or models have newer versions since. Raises
    ServiceInactive, NoWallet, InvalidInput, QuotaExceeded, and IdempotencyConflict if the key bought something else.
    """
    organization = membership.organization
    require_active(organization=organization)
    # `uses_given_versions`, because pages send the purchase of a quote: the run must read the same dataset versions.
    measured = parse(organization=organization, data={"nodes": 1, **data}, uses_given_versions=True)
    # What runs instead of the measured purchase: the same, within the limits of a free estimate.
    purchase = replace(
        measured,
        nodes=1,
        max_seconds=MAX_SECONDS,
        ceiling_minor=None,
        fault_tolerance=replace(measured.fault_tolerance, min_nodes=0, retries=0, retry_backoff_seconds=0),
    )
    script = orders.read_purchased_script(purchase)
    with transaction.atomic():
        quota = quotas.lock_quota(organization)
        if idempotency_key and (existing := orders.order_with_key(organization, idempotency_key)):
            if not _has_bought(existing, measured.to_json()):
                raise IdempotencyConflict
            return existing
        free_runs.lock_user(membership.user)  # the quota's lock does not cover the person's other organizations
        if not _is_eligible(organization):
            raise QuotaExceeded(
                _("Free estimates are available after your first payment. Top up the wallet, or buy the run.")
            )
        if not left_today(organization, membership.user):
            sentence = _(
                "The free estimates of the last 24 hours are used up. The limit is %(most)d per "
                "organization, and per person across all organizations. Buy the run, or try again later."
            )
            raise QuotaExceeded(sentence % {"most": policy().probes_per_day})
        # The fields that this function has changed are stored as the customer sent them, for a rerun as a paid run.
        limited, as_asked = purchase.to_json(), measured.to_json()
        differences = {name: value for name, value in as_asked.items() if limited[name] != value}
        quote = make_free_quote(
            organization=organization,
            user=membership.user,
            nodes=1,
            deadline_seconds=MAX_SECONDS,
            payload=limited | {FREE_ESTIMATE_MARK: True, MEASURED: differences},
        )
        return orders.write_order(
            membership=membership,
            quote=quote,
            product=purchase.product,
            idempotency_key=idempotency_key or f"quote:{quote.pk}",  # an order needs a key that no other order has
            quota=quota,
            versions=purchase.dataset_versions,
            requirements=purchase.requirements,
            models=purchase.model_versions,
            columns=orders.job_columns(purchase, script) | {"name": f"Free estimate of {_name(purchase.code_path)}"},
        )


def _has_bought(order: Order, asked: Mapping[str, Any]) -> bool:
    """Return whether the order is a free estimate of this purchase, given as `Purchase.to_json` returns it.

    A request for a paid run names a quote. A request for a free estimate has only choices, so these are compared.
    """
    stored = order.quote.purchase
    if FREE_ESTIMATE_MARK not in stored:
        return False
    bought = purchase_data(stored)
    # Fields that are new since the order are not in `bought`.
    return all(bought.get(name, value) == value for name, value in asked.items() if name not in _RESOLVED_FIELDS)


def left_today(organization: Organization, user: User | None) -> int:
    """Return how many more free estimates the organization's and the user's daily limits allow."""
    limit = policy().probes_per_day
    return free_runs.left_today(free_runs.FREE_ESTIMATES, organization=organization, user=user, limit=limit)


def is_worthwhile(quote: Quote) -> bool:
    """Whether a free estimate would improve this quote's estimate, and the quote's creator may order one."""
    if quote.basis.get("source") not in IMPROVABLE_SOURCES or not _is_eligible(quote.organization):
        return False
    return left_today(quote.organization, quote.created_by) > 0


def _is_eligible(organization: Organization) -> bool:
    """Whether the organization has paid in before, if the billing policy requires that."""
    if not policy().probes_need_payment:
        return True
    return TopUp.objects.filter(account__organization=organization, state=TopUp.States.PAID).exists()


def _name(path: str) -> str:
    """Return the script's file name, cut so that it fits in `Job.name` (100 characters) after a prefix."""
    return path.rsplit("/", 1)[-1][:80]
