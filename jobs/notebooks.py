"""Notebooks: sessions of JupyterLab in a workspace, bought like a run and charged by time. They can be extended.

A notebook is a job with one node that runs `runtime/launcher/notebook.py` instead of a script. It ends when it is
stopped, when it was idle for as long as its order says, or at its time limit. Its cluster says how to connect to
JupyterLab; `console.serving.notebooks` forwards browsers to it.

An extension raises the hold and the job's deadline in one transaction. Only after that does `reconciliation` move the
deadline of the run, repeatedly, until the backend has it. So no crash lets a notebook run beyond what is held.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

from django.conf import settings
from django.db import transaction
from django.db.models import Q, QuerySet
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from billing import charges
from billing.errors import NotPriced, NoWallet
from billing.models import HoldExtension, NodeSpec, Quote
from billing.pricing import Estimate, Mode, PriceKind, find_price
from billing.pricing import Purchase as PricedPurchase
from billing.quotes import current_prices, make_extension_quote, make_quote, require_valid
from console.accounts.models import Membership, Organization
from console.accounts.services import record_audit_event, require_active
from console.core.enqueue import send_on_commit
from console.core.errors import InvalidInput, NotFound
from jobs import lifecycle, orders, quotas, run_specs, selectors
from jobs.clusters import cluster
from jobs.errors import (
    ChoiceUnavailable,
    IdempotencyConflict,
    NoNotebooks,
    NotExtensible,
    QuotaExceeded,
    QuoteBought,
)
from jobs.models import NOTEBOOK_SCRIPT, Attempt, Job, Order, Product
from jobs.purchase import (
    EXTENSION_MARK,
    MAX_NOTEBOOK_SECONDS,
    NotebookExtensionRequestSerializer,
    NotebookPurchase,
    parse_notebook,
)
from jobs.states import PLATFORM_FAULTS, JobState, OnHang
from jobs.tasks import extend_job
from runtime.backends.base import Tunnel
from runtime.errors import RuntimeFault

PRODUCT = "notebook"
"""Name of the product that every notebook orders. A price may be limited to it."""
QUOTE_MARK = "notebook"
"""Key that marks the stored purchase of a notebook's quote."""
MIN_LEFT = timedelta(minutes=1)
"""How much time a notebook must have left to be extended. Its run gets the new deadline at the next reconciliation,
some seconds later, and must not be ending by then."""
NOTICE = timedelta(minutes=10)
"""How long before its time limit a notebook is announced to end: enough to read an email, and to save or extend it."""


@dataclass(frozen=True)
class TimeLimit:
    """When a running notebook is ended by its cluster. `attempt` is the number of the job's attempt that runs."""

    attempt: int
    ends_at: datetime


def is_offered() -> bool:
    """Whether this installation has notebooks: they need host names of their own (`settings.NOTEBOOK_URL`)."""
    return bool(settings.NOTEBOOK_URL)


def quote_notebook(*, membership: Membership, data: Mapping[str, Any]) -> Quote:
    """Price a notebook and return the quote. `data` has the API's field names.

    Raises NoNotebooks, ServiceInactive, InvalidInput, and billing's errors.
    """
    if not is_offered():
        raise NoNotebooks
    organization = membership.organization
    require_active(organization=organization)
    purchase = parse_notebook(organization=organization, data=data)
    _require_connection(purchase)
    return make_quote(
        organization=organization,
        user=membership.user,
        payload=purchase.to_json()
        | {QUOTE_MARK: True, "product": PRODUCT}
        | orders.pinned_image(organization, purchase.image),
        purchase=_priced(purchase.node_spec),
        # How long a person uses a notebook is unknown, so the estimate is its time limit.
        estimate=Estimate(p50_seconds=purchase.max_seconds, p90_seconds=purchase.max_seconds, source="notebook"),
        headroom=Decimal(1),  # has no effect, since `max_seconds` is given
        max_deadline_seconds=MAX_NOTEBOOK_SECONDS,
        max_seconds=purchase.max_seconds,
        ceiling_minor=purchase.ceiling_minor,
    )


def _priced(node_spec: NodeSpec) -> PricedPurchase:
    """Return what pricing needs to know of a notebook."""
    return PricedPurchase(product=PRODUCT, mode=Mode.METERED, node_spec=node_spec.name, nodes=1, epochs=0)


def hourly_price_to_inspect(job: Job) -> int | None:
    """Return the price per hour, in minor units, of a notebook in which a member can look into a failed job.

    None if the job's page offers no notebook: the job did not fail, its code is not at fault or never started, it ran
    no customer's script or lost its workspace, or its node type has no notebooks or no price.
    """
    is_fault_of_code = job.state == JobState.FAILED and job.started_at and job.reason not in PLATFORM_FAULTS
    if not is_fault_of_code or job.builtin_script or job.workspace.deleted_at or not is_offered():
        return None
    try:
        has_notebooks = job.node_spec.is_active and cluster(job.node_spec.cluster).has_notebooks
        amount = find_price(current_prices(job.organization).rows, PriceKind.NODE_HOUR, _priced(job.node_spec))
    except (RuntimeFault, NoWallet, NotPriced):
        return None
    return round(amount) if has_notebooks and amount is not None else None


def quote_extension(*, membership: Membership, job: Job, data: Mapping[str, Any]) -> Quote:
    """Price more time for a running notebook, at the prices at which it was bought. `data` has `added_seconds`.

    The quote prices the notebook's whole time, not only the added time. `place_notebook` buys it. Raises
    ServiceInactive, InvalidInput, NotExtensible.
    """
    require_active(organization=membership.organization)
    added_seconds = NotebookExtensionRequestSerializer(data=data).values()["added_seconds"]
    _require_extensible(job)
    total_seconds = job.deadline_seconds + added_seconds
    if total_seconds > MAX_NOTEBOOK_SECONDS:
        sentence = _("A notebook may run for at most %(most)d hours in all, and this one has %(hours)s already.")
        hours = {"most": MAX_NOTEBOOK_SECONDS // 3600, "hours": f"{job.deadline_seconds / 3600:.1f}"}
        raise InvalidInput(fields={"added_seconds": sentence % hours})
    hold = job.order.hold
    extends = {"job": job.pk, "deadline_seconds": job.deadline_seconds, "held_minor": hold.amount_minor}
    # A customer's own ceiling limits only the first purchase: an extension raises the ceiling by what its time costs.
    changes = {"max_seconds": total_seconds, "ceiling_minor": None, EXTENSION_MARK: extends}
    return make_extension_quote(
        hold=hold,
        user=membership.user,
        payload=job.order.quote.purchase | changes,
        deadline_seconds=total_seconds,
    )


def place_notebook(*, membership: Membership, quote: Quote, idempotency_key: str = "") -> Order:
    """Buy a notebook's quote: hold its ceiling and queue its job. A repeated key returns the same order.

    A quote from `quote_extension` extends its notebook instead. Raises what `orders.place_order` raises, InvalidInput
    if the quote is not one of a notebook, and NotExtensible.
    """
    organization = membership.organization
    key = idempotency_key or f"quote:{quote.pk}"
    if EXTENSION_MARK in quote.purchase:
        return _place_extension(membership, quote, key)
    if order := orders.existing_order(organization, quote, key):
        return order  # before the checks: a repeated request succeeds even if the quote has expired since
    require_active(organization=organization)
    if QUOTE_MARK not in quote.purchase:
        raise InvalidInput(fields={"quote": _("This quote is not for a notebook.")})
    require_valid(quote)
    try:
        purchase = parse_notebook(organization=organization, data=quote.purchase, uses_given_versions=True)
    except InvalidInput as error:
        raise ChoiceUnavailable(fields=error.fields) from error
    with transaction.atomic():
        quota = quotas.lock_quota(organization)
        # Checked again under the lock, because a concurrent request may have placed the order meanwhile.
        if order := orders.existing_order(organization, quote, key):
            return order
        return orders.write_order(
            membership=membership,
            quote=quote,
            product=_product(),
            idempotency_key=key,
            quota=quota,
            versions=purchase.dataset_versions,
            requirements=purchase.requirements,
            columns=_job_columns(purchase) | {"image_digest": orders.pinned_digest(quote, purchase.image)},
        )


def _place_extension(membership: Membership, quote: Quote, key: str) -> Order:
    """Hold the added amount and move the notebook's deadline. A repeated key changes nothing.

    `extends["deadline_seconds"]` is the notebook's deadline when the quote was made.
    """
    organization, extends = membership.organization, quote.purchase[EXTENSION_MARK]
    order = notebook_for(organization, extends["job"]).order
    if _is_extended(order, quote, key):
        return order
    require_active(organization=organization)
    require_valid(quote)
    with transaction.atomic():
        quotas.lock_quota(organization)
        job = Job.objects.select_for_update().get(pk=extends["job"])
        # Checked again under the lock, because a concurrent request may have bought the extension meanwhile.
        if _is_extended(order, quote, key):
            return order
        if job.deadline_seconds != extends["deadline_seconds"]:
            raise ChoiceUnavailable  # another quote has extended it since
        _require_extensible(job)
        if sentence := orders.storage_refusal(organization):
            raise QuotaExceeded(sentence)
        extension = charges.extend(hold=order.hold, quote=quote, idempotency_key=key, user=membership.user)
        lifecycle.extend(
            job=job,
            deadline_seconds=quote.deadline_seconds,
            actor=membership.user,
            data={"amount_minor": extension.amount_minor, "currency": quote.currency},
        )
        record_audit_event(
            organization=organization, actor=membership.user, action="notebook.extended", target=f"job:{job.pk}"
        )
        send_on_commit(extend_job, job.pk)
    return order


def _is_extended(order: Order, quote: Quote, key: str) -> bool:
    """Whether this idempotency key already bought this extension. Raises QuoteBought, IdempotencyConflict."""
    extensions = HoldExtension.objects.filter(Q(quote=quote) | Q(hold=order.hold_id, idempotency_key=key))
    keys = {extension.quote_id: extension.idempotency_key for extension in extensions}
    if quote.pk in keys and keys[quote.pk] != key:
        raise QuoteBought
    if keys and quote.pk not in keys:
        raise IdempotencyConflict
    return quote.pk in keys


def is_extensible(job: Job) -> bool:
    """Return whether a notebook can be extended now. False too if its cluster is no longer in the settings."""
    try:
        _require_extensible(job)
    except (NotExtensible, RuntimeFault):
        return False
    return True


def _require_extensible(job: Job) -> None:
    """Raise NotExtensible if the notebook does not run, is about to end, or its cluster cannot move a deadline."""
    attempt = _running_attempt(job)
    if attempt is None:
        raise NotExtensible
    if not cluster(attempt.backend).extends_runs:
        raise NotExtensible(_("This cluster can't move the time limit of a notebook. Stop it, and resume it."))
    if _end_time(attempt) - timezone.now() < MIN_LEFT:
        raise NotExtensible(_("This notebook ends in less than a minute. Resume it once it has ended."))


def time_limit(job: Job) -> TimeLimit | None:
    """Return when a notebook reaches its time limit; None if it does not run."""
    attempt = _running_attempt(job)
    return None if attempt is None else TimeLimit(attempt.number, _end_time(attempt))


def notice_before_end(job: Job) -> timedelta:
    """Return how long before its time limit a notebook's end is announced.

    NOTICE, but at most a quarter of its time, so that a short notebook is not announced as soon as it starts.
    """
    return min(NOTICE, timedelta(seconds=job.deadline_seconds) / 4)


def _running_attempt(job: Job) -> Attempt | None:
    """Return the attempt of a running notebook; None if the notebook does not run."""
    attempt = job.attempts.filter(finished_at=None).last() if job.state == JobState.RUNNING else None
    if attempt is None or attempt.started_at is None:
        return None
    attempt.job = job  # saves a query
    return attempt


def _end_time(attempt: Attempt) -> datetime:
    """Return when the attempt, which has started, reaches its time limit."""
    return cast("datetime", attempt.started_at) + timedelta(seconds=run_specs.deadline_seconds(attempt))


def current_quote(job: Job) -> Quote:
    """Return the quote by which a job is charged: the order's, or that of a notebook's last extension."""
    extension = job.order.hold.extensions.select_related("quote").last() if job.is_notebook else None
    return extension.quote if extension else job.order.quote


def notebooks_for(organization: Organization) -> QuerySet[Job]:
    """Return an organization's notebooks, newest first, with the related rows that the API reads."""
    jobs = selectors.jobs_for(organization).filter(builtin_script=NOTEBOOK_SCRIPT)
    return jobs.prefetch_related("attempts")


def notebook_for(organization: Organization, pk: int) -> Job:
    """Return a notebook of the organization. Raises NotFound."""
    job = selectors.job_for(organization, pk)
    if not job.is_notebook:
        raise NotFound
    return job


def socket_of(job: Job) -> Path | Tunnel | None:
    """Return how to connect to a notebook (`Backend.notebook_socket`); None while it does not run.

    The run's code can put anything at such a path, so `console.serving.notebooks` checks what it opens. A tunnel waits
    while JupyterLab starts, but not while its node starts, so a tunnel is returned only for a running notebook.
    """
    if job.state not in {JobState.STARTING, JobState.RUNNING}:
        return None
    open_attempts = [attempt for attempt in job.attempts.all() if attempt.finished_at is None]
    if not open_attempts:
        return None
    attempt = open_attempts[-1]
    try:
        socket = cluster(attempt.backend).notebook_socket(attempt.run_name)
    except RuntimeFault:
        return None
    if isinstance(socket, Path):
        return socket if socket.is_socket() and not socket.is_symlink() else None
    return socket if job.state == JobState.RUNNING else None


def _require_connection(purchase: NotebookPurchase) -> None:
    """Check that the console can connect to notebooks of this cluster. Raises InvalidInput."""
    if not cluster(purchase.node_spec.cluster).has_notebooks:
        sentence = _("The cluster of this node spec has no notebooks. Choose another node spec.")
        raise InvalidInput(fields={"node_spec": sentence})


def _job_columns(purchase: NotebookPurchase) -> dict[str, Any]:
    """Return the columns of the notebook's job. The script ignores epochs, learning rate and batch size."""
    # Groups the notebooks of a workspace, apart from its trainings: see `Purchase.code_key`.
    key = hashlib.sha256(f"{NOTEBOOK_SCRIPT}:{purchase.workspace.pk}".encode()).hexdigest()
    return {
        "name": purchase.name or purchase.workspace.name,
        "framework": purchase.framework,
        "image": purchase.image,
        "workspace": purchase.workspace,
        "code_path": "",
        "builtin_script": NOTEBOOK_SCRIPT,
        "arguments": [str(purchase.idle_seconds)],  # read by `runtime/launcher/notebook.py`
        "epochs": 1,
        "lr": "0.01",
        "batch_size": 1,
        "node_spec": purchase.node_spec,
        "nodes": 1,
        "workers_per_node": 1,
        "on_hang": OnHang.IGNORE,  # a notebook that waits for its user shows no sign of progress
        "code_key": key,
    }


def _product() -> Product:
    """Return the product of notebooks, created if it is missing. It is inactive, so that no list shows it."""
    product, _created = Product.objects.get_or_create(
        name=PRODUCT,
        defaults={"title": gettext_noop("Notebook"), "is_active": False, "max_seconds": MAX_NOTEBOOK_SECONDS},
    )
    return product
