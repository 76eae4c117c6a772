"""Buying: a quote for a purchase, an order for a quote, cancelling, running again.

The one rule: an order, its hold and its job are written together or not at all, once for each quote and idempotency
key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.db import transaction
from django.db.models import Count, Q
from django.utils import timezone
from django.utils.translation import gettext as _

from billing import charges
from billing.models import NodeSpec, Quote
from billing.pricing import Mode
from billing.pricing import Purchase as Priced
from billing.quotes import make_quote, require_valid
from console.accounts.errors import InvalidInput
from console.accounts.hints import hint, send
from console.accounts.models import Membership, Organization, Quota
from console.accounts.services import record, require_active
from console.operations import tracing
from console.operations.kept import Kept, given
from jobs import bell, calibration, lifecycle, queue
from jobs.backend import cluster_named
from jobs.errors import AlreadyEnded, ChoiceGone, IdempotencyConflict, QuotaExceeded, QuoteBought
from jobs.models import Job, JobDataset, Order, Product
from jobs.purchase import Purchase, parse
from jobs.states import ENDED, JobState
from jobs.tasks import dispatch_queue, stop_job
from storage.models import DatasetVersion

_OPEN_JOBS = Kept(
    lambda: (
        Job.objects.filter(organization=given("organization"))
        .exclude(state__in=ENDED)
        .order_by()
        .values_list("organization")
        .annotate(count=Count("pk"))
    )
)
_BOUGHT = Kept(
    lambda: Order.objects.filter(
        Q(quote=given("quote")) | Q(organization=given("organization"), idempotency_key=given("key"))
    ).select_related("job")
)


def quote_order(*, membership: Membership, data: Mapping[str, Any]) -> Quote:
    """Price what `data` asks for (the API's field names).

    Raises ServiceInactive, InvalidInput, and billing's errors.
    """
    organization = membership.organization
    require_active(organization=organization)
    purchase = parse(organization=organization, data=data)
    return make_quote(
        organization=organization,
        user=membership.user,
        purchase=Priced(
            product=purchase.product.name,
            mode=Mode(purchase.product.mode),
            node_spec=purchase.node_spec.name,
            nodes=purchase.nodes,
            epochs=purchase.epochs,
        ),
        payload=purchase.to_json() | {"rerun_of": _earlier_job(organization, data.get("rerun_of"))},
        estimate=calibration.estimate(purchase),
        headroom=purchase.product.headroom,
        most_seconds=purchase.product.max_seconds,
        max_seconds=purchase.max_seconds,
        ceiling_minor=purchase.ceiling_minor,
    )


def place_order(*, membership: Membership, quote: Quote, idempotency_key: str = "") -> Order:
    """Buy a quote: hold its ceiling and queue its job. The same key again gives the same order.

    Raises ServiceInactive, QuoteExpired, QuoteBought, IdempotencyConflict, ChoiceGone, QuotaExceeded,
    InsufficientFunds, BudgetExceeded.
    """
    organization = membership.organization
    key = idempotency_key or f"quote:{quote.pk}"
    if order := _bought(organization, quote, key):
        return order
    require_active(organization=organization)
    require_valid(quote)
    try:
        purchase = parse(
            organization=organization, data=quote.purchase, pinned=quote.purchase.get("dataset_versions", ())
        )
    except InvalidInput as error:
        raise ChoiceGone(fields=error.fields) from error
    return _write_order(membership, quote, purchase, key)


def cancel_job(*, membership: Membership, job: Job) -> Job:
    """End a job: at once while it waits, by stopping its run otherwise.

    Cancelling twice is fine. Raises AlreadyEnded.
    """
    with transaction.atomic():
        job = Job.objects.select_for_update().get(pk=job.pk)
        if job.is_ended:
            raise AlreadyEnded
        if job.state != JobState.STOPPING:
            lifecycle.request_cancel(job=job, actor=membership.user)
            record(organization=job.organization, actor=membership.user, action="job.cancelled", target=f"job:{job.pk}")
            if job.state == JobState.STOPPING:
                hint(stop_job, job.pk)
            else:
                _wake_queue(job.node_spec)
    return job


def rerun(*, membership: Membership, job: Job, changes: Mapping[str, Any], idempotency_key: str = "") -> Order:
    """Buy the same run again, with some settings changed; datasets are taken at their latest version.

    Raises as `quote_order` and `place_order`.
    """
    if known := _rerun_before(membership.organization, job, idempotency_key):
        return known
    data = job.order.quote.purchase | dict(changes) | {"rerun_of": job.pk}
    quote = quote_order(membership=membership, data=data)
    try:
        return place_order(membership=membership, quote=quote, idempotency_key=idempotency_key)
    except IdempotencyConflict:
        # The same request, sent twice at once: the other one was first.
        if known := _rerun_before(membership.organization, job, idempotency_key):
            return known
        raise


def _write_order(membership: Membership, quote: Quote, purchase: Purchase, key: str) -> Order:
    organization = membership.organization
    with transaction.atomic():
        quota = queue.locked_quota(organization)
        if order := _bought(organization, quote, key):
            return order
        return write_order(
            membership=membership,
            quote=quote,
            product=purchase.product,
            key=key,
            quota=quota,
            versions=purchase.dataset_versions,
            job=columns(purchase) | {"rerun_of_id": quote.purchase.get("rerun_of")},
        )


def columns(purchase: Purchase) -> dict[str, Any]:
    """A purchase as the columns of its job."""
    return {
        "name": purchase.code_path.rsplit("/", 1)[-1][:100],
        "framework": purchase.framework,
        "image": purchase.image,
        "workspace": purchase.workspace,
        "code_path": purchase.code_path,
        "arguments": list(purchase.arguments),
        "epochs": purchase.epochs,
        "lr": purchase.lr,
        "batch_size": purchase.batch_size,
        "node_spec": purchase.node_spec,
        "nodes": purchase.nodes,
        "workers_per_node": purchase.workers_per_node,
        "code_key": purchase.code_key,
    } | purchase.resilience.to_json()


def write_order(
    *,
    membership: Membership,
    quote: Quote,
    product: Product,
    key: str,
    quota: Quota,
    versions: Sequence[DatasetVersion],
    job: Mapping[str, Any],
) -> Order:
    """Hold the quote's ceiling and queue a job with the columns `job`; the caller's transaction has locked the quota.

    Raises QuotaExceeded, InsufficientFunds, and what a budget refuses.
    """
    organization = membership.organization
    _require_room(organization, quota)
    hold = charges.hold(
        quote=quote,
        reference=f"order:{quote.pk}",
        user=membership.user,
        labels={"workspace": job["workspace"].name, "node_spec": job["node_spec"].name, "product": product.name},
    )
    order = Order.objects.create(
        organization=organization,
        quote=quote,
        hold=hold,
        product=product,
        idempotency_key=key,
        placed_by=membership.user,
    )
    made = Job.objects.create(
        organization=organization,
        order=order,
        deadline_seconds=quote.deadline_seconds,
        queued_at=timezone.now(),
        traceparent=tracing.current(),
        **job,
    )
    JobDataset.objects.bulk_create(
        JobDataset(job=made, version=version, position=position) for position, version in enumerate(versions)
    )
    lifecycle.note(job=made, kind="ordered", actor=membership.user, data={"ceiling_minor": quote.ceiling_minor})
    record(organization=organization, actor=membership.user, action="order.placed", target=f"job:{made.pk}")
    _wake_queue(made.node_spec)
    return order


def _wake_queue(spec: NodeSpec) -> None:
    """Have what waits for a spec's cluster looked at once this is committed: by the watcher, else by a worker."""
    name = cluster_named(spec.cluster)
    transaction.on_commit(lambda: None if bell.ring_queue(name) else send(dispatch_queue))


def _require_room(organization: Organization, quota: Quota) -> None:
    open_jobs = sum(count for _organization, count in _OPEN_JOBS.all(organization=organization))
    if open_jobs >= quota.max_open_jobs:
        raise QuotaExceeded(
            _("Your organization has %(jobs)d jobs queued or running, as many as it may. Wait for one, or cancel one.")
            % {"jobs": open_jobs}
        )


def _bought(organization: Organization, quote: Quote, key: str) -> Order | None:
    # In one look: a repeat that is overtaken between two must find its own order, not a stranger's.
    orders = {order.quote_id: order for order in _BOUGHT.all(quote=quote, organization=organization, key=key)}
    if order := orders.get(quote.pk):
        if order.idempotency_key != key:
            raise QuoteBought
        return order
    if orders:
        raise IdempotencyConflict
    return None


def _rerun_before(organization: Organization, job: Job, key: str) -> Order | None:
    known = order_by_key(organization, key) if key else None
    if known and known.job.rerun_of_id != job.pk:
        raise IdempotencyConflict
    return known


def _earlier_job(organization: Organization, value: Any) -> int | None:
    """The organization's job that a purchase repeats, as its form or `rerun` names it."""
    if not isinstance(value, int):
        return None
    return Job.objects.filter(organization=organization, pk=value).values_list("pk", flat=True).first()


def order_by_key(organization: Organization, key: str) -> Order | None:
    """The order that an idempotency key bought."""
    return Order.objects.filter(organization=organization, idempotency_key=key).select_related("job").first()
