"""Notebooks: sessions of JupyterLab in a workspace, bought like a run and charged by time.

A notebook is a job with one node that runs `runtime/launcher/notebook.py` instead of a script. It ends when it is
stopped, when it was idle for the time chosen, or at its time limit. JupyterLab listens on a socket in the run's folder;
`console.serving.notebooks` forwards browsers to it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import QuerySet
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from billing.models import Quote
from billing.pricing import Estimate, Mode
from billing.pricing import Purchase as PricedPurchase
from billing.quotes import make_quote, require_valid
from console.accounts.models import Membership, Organization
from console.accounts.services import require_active
from console.core.errors import InvalidInput, NotFound
from jobs import orders, quotas, selectors
from jobs.clusters import cluster, cluster_named
from jobs.errors import ChoiceUnavailable, NoNotebooks
from jobs.models import NOTEBOOK_SCRIPT, Job, Order, Product
from jobs.purchase import MAX_NOTEBOOK_SECONDS, NotebookPurchase, parse_notebook
from jobs.states import JobState, OnHang
from runtime.errors import RuntimeFault
from runtime.launcher.notebook import SOCKET

PRODUCT = "notebook"
"""Name of the product that every notebook is an order of. Prices may name it."""
QUOTE_MARK = "notebook"
"""Key that marks the stored purchase of a notebook's quote."""


def is_offered() -> bool:
    """Return whether this installation has notebooks: they need host names of their own."""
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
        purchase=PricedPurchase(
            product=PRODUCT, mode=Mode.METERED, node_spec=purchase.node_spec.name, nodes=1, epochs=0
        ),
        estimate=Estimate(purchase.max_seconds, purchase.max_seconds, "notebook"),
        headroom=Decimal(1),
        max_deadline_seconds=MAX_NOTEBOOK_SECONDS,
        max_seconds=purchase.max_seconds,
        ceiling_minor=purchase.ceiling_minor,
    )


def place_notebook(*, membership: Membership, quote: Quote, idempotency_key: str = "") -> Order:
    """Buy a notebook's quote: hold its ceiling and queue its job. A repeated key returns the same order.

    Raises as `orders.place_order`; InvalidInput if the quote is not of a notebook.
    """
    organization = membership.organization
    key = idempotency_key or f"quote:{quote.pk}"
    if order := orders.existing_order(organization, quote, key):
        return order  # before the checks: a repeated request succeeds even if the quote has expired since
    require_active(organization=organization)
    if QUOTE_MARK not in quote.purchase:
        raise InvalidInput(fields={"quote": _("This quote is not for a notebook.")})
    require_valid(quote)
    try:
        purchase = parse_notebook(organization=organization, data=quote.purchase, is_pinned=True)
    except InvalidInput as error:
        raise ChoiceUnavailable(fields=error.fields) from error
    with transaction.atomic():
        quota = quotas.lock_quota(organization)
        # Again, under the lock: a concurrent request may have placed the order meanwhile.
        if order := orders.existing_order(organization, quote, key):
            return order
        return orders.write_order(
            membership=membership,
            quote=quote,
            product=_product(),
            key=key,
            quota=quota,
            versions=purchase.dataset_versions,
            job=_job_columns(purchase) | {"image_digest": orders.pinned_digest(quote, purchase.image)},
        )


def notebooks_for(organization: Organization) -> QuerySet[Job]:
    """Return an organization's notebooks, newest first, with what `selectors.summary` reads."""
    return selectors.jobs_for(organization).filter(builtin_script=NOTEBOOK_SCRIPT)


def notebook_for(organization: Organization, pk: int) -> Job:
    """Return a notebook of the organization. Raises NotFound."""
    job = selectors.job_for(organization, pk)
    if not job.is_notebook:
        raise NotFound
    return job


def socket_of(job: Job) -> Path | None:
    """Return the socket on which a notebook listens; None while it does not.

    The run's code can put anything in its place: see `console.serving.notebooks`.
    """
    attempt = job.attempts.filter(finished_at=None).last()
    if attempt is None or job.state not in {JobState.STARTING, JobState.RUNNING}:
        return None
    try:
        socket = cluster(attempt.backend).run_folder(attempt.run_name) / "run" / SOCKET
    except RuntimeFault:
        return None
    return socket if socket.is_socket() and not socket.is_symlink() else None


def _require_connection(purchase: NotebookPurchase) -> None:
    """Check that the console can connect to a run of this cluster: its socket must be on this machine.

    Raises InvalidInput.
    """
    if settings.TRAINYARD_CLUSTERS.get(cluster_named(purchase.node_spec.cluster)) is not None:
        sentence = _("Notebooks run on the console's own machine only. Choose another node spec.")
        raise InvalidInput(fields={"node_spec": sentence})


def _job_columns(purchase: NotebookPurchase) -> dict[str, Any]:
    """Return the columns of the notebook's job. The script ignores epochs, learning rate and batch size."""
    key = hashlib.sha256(f"{NOTEBOOK_SCRIPT}:{purchase.workspace.pk}".encode()).hexdigest()
    return {
        "name": purchase.name or purchase.workspace.name,
        "framework": purchase.framework,
        "image": purchase.image,
        "workspace": purchase.workspace,
        "code_path": "",
        "builtin_script": NOTEBOOK_SCRIPT,
        "arguments": [str(purchase.idle_seconds)],
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
    """Return the product of notebooks. It is inactive, so that it is on no list of trainings."""
    product, _created = Product.objects.get_or_create(
        name=PRODUCT,
        defaults={"title": gettext_noop("Notebook"), "is_active": False, "max_seconds": MAX_NOTEBOOK_SECONDS},
    )
    return product
