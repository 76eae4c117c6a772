"""A free probe: the customer's own code for a minute on one node, so that a first run's estimate is measured.

It is bought, held and receipted as any run is, at 0; what limits it is the billing policy. The one rule: nothing but an
estimate comes of it that a paid run would give, so it is one node, one minute, and so many a day.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.utils import timezone
from django.utils.translation import gettext as _

from billing.models import Quote
from billing.policy import policy
from billing.quotes import make_free_quote
from console.accounts.models import Membership, Organization
from console.accounts.services import require_active
from jobs import orders, queue
from jobs.errors import QuotaExceeded
from jobs.models import Job, Order
from jobs.purchase import parse

PROBE_SECONDS = 60
SOURCES = frozenset({"reference", "customer"})
"""Of an estimate that a probe would make better."""


def place_probe(*, membership: Membership, data: Mapping[str, Any], idempotency_key: str = "") -> Order:
    """Run what `data` asks for (the API's field names) on one node for a minute, free.

    Raises ServiceInactive, NoWallet, InvalidInput, QuotaExceeded. The same key again gives the same order.
    """
    organization = membership.organization
    require_active(organization=organization)
    limits = {"nodes": 1, "min_nodes": 0, "max_seconds": PROBE_SECONDS, "ceiling_minor": None, "retries": 0}
    purchase = parse(organization=organization, data={**data, **limits}, pinned=data.get("dataset_versions", ()))
    with transaction.atomic():
        quota = queue.locked_quota(organization)
        if idempotency_key and (known := orders.order_by_key(organization, idempotency_key)):
            return known
        if not left_today(organization):
            raise QuotaExceeded(_("The free probes of the last 24 hours are used up. Buy the run, or try later."))
        quote = make_free_quote(
            organization=organization,
            user=membership.user,
            nodes=1,
            deadline_seconds=PROBE_SECONDS,
            payload=purchase.to_json() | {"probe": True},
        )
        return orders.write_order(
            membership=membership,
            quote=quote,
            product=purchase.product,
            key=idempotency_key or f"quote:{quote.pk}",
            quota=quota,
            versions=purchase.dataset_versions,
            job=orders.columns(purchase) | {"name": _("Probe of %(script)s") % {"script": _name(purchase.code_path)}},
        )


def left_today(organization: Organization) -> int:
    """How many probes the organization may still have now."""
    since = timezone.now() - timedelta(days=1)
    made = Job.objects.filter(
        organization=organization, order__quote__purchase__has_key="probe", queued_at__gt=since
    ).count()
    return max(0, policy().probes_per_day - made)


def is_worthwhile(quote: Quote) -> bool:
    """Whether a probe would make this quote's estimate better, and one is left."""
    return quote.basis.get("source") in SOURCES and left_today(quote.organization) > 0


def _name(path: str) -> str:
    return path.rsplit("/", 1)[-1][:80]
