"""Price a purchase, buy its quote, cancel a job, rerun a job.

An order, its hold and its job are written in one transaction, once per quote and per idempotency key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from typing import Any, TypedDict

from django.db import transaction
from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext as _

from billing import budgets, charges
from billing.models import Hold, Quote
from billing.pricing import Estimate, Mode
from billing.pricing import Purchase as PricedPurchase
from billing.quotes import make_quote, require_valid
from billing.selectors import wallet
from console.accounts.models import Membership, Organization, Quota, User
from console.accounts.services import record_audit_event, require_active
from console.core.enqueue import send_on_commit
from console.core.errors import CustomerError, InvalidInput
from console.observability import tracing
from jobs import estimates, lifecycle, packages, quotas, reruns, snapshots
from jobs.clusters import resolve_cluster_name
from jobs.details import default_name
from jobs.dispatch import dispatch
from jobs.errors import AlreadyEnded, ChoiceUnavailable, IdempotencyConflict, QuotaExceeded, QuoteBought
from jobs.fields import is_storable_text
from jobs.models import Job, JobDataset, JobModel, Order, PackageLayer, Product
from jobs.packages import Requirements
from jobs.purchase import EXTENSION_MARK, Purchase, asks_for_exact_rerun, parse, purchase_data
from jobs.states import OPEN, JobState
from jobs.tasks import install_packages, stop_job
from storage import registries, secret_store
from storage import selectors as storage
from storage.models import DatasetVersion, Image, ModelVersion, Workspace

MAX_REASON_LENGTH = 200
"""Characters of an operator's reason for stopping a job: one line in the customer's list of events."""


def quote_order(*, membership: Membership, data: Mapping[str, Any]) -> Quote:
    """Price a purchase and return the quote. `data` has the API's field names.

    Raises ServiceInactive, InvalidInput, and billing's errors.
    """
    organization = membership.organization
    require_active(organization=organization)
    is_exact = asks_for_exact_rerun(data)
    original = None
    if is_exact:
        data, original = reruns.exact_purchase(organization=organization, data=data)
    purchase = parse(organization=organization, data=data, uses_given_versions=is_exact, original=original)
    digest = pinned_digest(original.order.quote, purchase.image) if original else ""  # "": the current digest
    return make_quote(
        organization=organization,
        user=membership.user,
        payload=purchase.to_json()
        | {"rerun_of": _earlier_job_id(organization, data.get("rerun_of")), "exact": is_exact}
        | pinned_image(organization, purchase.image, digest),
        **pricing_inputs(purchase, estimates.estimate(purchase)),
    )


class PricingInputs(TypedDict):
    """The inputs of a price, as arguments of `billing.quotes.price` and `make_quote`."""

    purchase: PricedPurchase
    """The choices that determine the price."""
    estimate: Estimate
    headroom: Decimal
    """The product's: without `max_seconds`, the time limit is the p90 estimate times this."""
    max_deadline_seconds: int
    """The product's longest run."""
    max_seconds: int | None
    """The customer's own time limit, if any."""
    ceiling_minor: int | None
    """The customer's own ceiling, if any."""
    included_seconds: int
    """How long a run at a fixed price may take without a surcharge; see `estimates.included_seconds`."""


def pricing_inputs(purchase: Purchase, estimate: Estimate) -> PricingInputs:
    """Return the inputs of the price of a purchase."""
    return {
        "purchase": PricedPurchase(
            product=purchase.product.name,
            mode=Mode(purchase.product.mode),
            node_spec=purchase.node_spec.name,
            nodes=purchase.nodes,
            epochs=purchase.epochs,
        ),
        "estimate": estimate,
        "headroom": purchase.product.headroom,
        "max_deadline_seconds": purchase.product.max_seconds,
        "max_seconds": purchase.max_seconds,
        "ceiling_minor": purchase.ceiling_minor,
        "included_seconds": estimates.included_seconds(purchase),
    }


def place_order(*, membership: Membership, quote: Quote, idempotency_key: str = "") -> Order:
    """Buy a quote: hold its ceiling and queue its job. A repeated key returns the same order.

    Raises ServiceInactive, QuoteExpired, QuoteBought, IdempotencyConflict, ChoiceUnavailable, QuotaExceeded,
    InsufficientFunds, BudgetExceeded, and InvalidInput if the quote is one of a sweep or a notebook.
    """
    organization = membership.organization
    key = idempotency_key or f"quote:{quote.pk}"  # without a key, a second request for the same quote is a repeat
    if order := existing_order(organization, quote, key):
        return order  # before the checks: a repeated request succeeds even if the quote has expired since
    require_active(organization=organization)
    if "sweep" in quote.purchase:
        raise InvalidInput(fields={"quote": _("This quote is for a sweep. Buy it as a sweep.")})
    if "notebook" in quote.purchase:
        raise InvalidInput(fields={"quote": _("This quote is for a notebook. Buy it as a notebook.")})
    require_valid(quote)
    original = reruns.exact_original(quote)
    try:
        # Parsed again, because the customer may have deleted or changed something since the quote. The versions of
        # datasets and models are those that were quoted.
        purchase = parse(
            organization=organization, data=purchase_data(quote.purchase), uses_given_versions=True, original=original
        )
    except InvalidInput as error:
        raise ChoiceUnavailable(fields=error.fields) from error
    return _write_training_order(membership, quote, purchase, key, original)


def cancel_job(*, membership: Membership, job: Job) -> Job:
    """Cancel a job. A queued job ends at once; the run of an active job is asked to stop.

    Safe to repeat. Raises AlreadyEnded.
    """
    return _end_job(job, actor=membership.user, requested_by=membership.user, action="job.cancelled")


def cancel_jobs(*, membership: Membership, jobs: Iterable[Job]) -> int:
    """Cancel several jobs, each in a transaction of its own. Return how many of them had not ended."""
    cancelled = 0
    for job in jobs:
        with suppress(AlreadyEnded):  # an ended job is not counted
            cancel_job(membership=membership, job=job)
            cancelled += 1
    return cancelled


def cancel_trial(*, job: Job) -> Job:
    """Cancel a job for its sweep, as `cancel_job` does. Safe to repeat. Raises AlreadyEnded."""
    return _end_job(job, actor=None, requested_by=None, action="job.cancelled")


def stop_job_as_operator(*, actor: User, job: Job, why: str) -> Job:
    """End a customer's job as `cancel_job` does. Its events say that an administrator stopped it, and why.

    Safe to repeat. Raises InvalidInput, AlreadyEnded.
    """
    return _end_job(job, actor=None, requested_by=actor, action="job.stopped_by_operator", why=normalize_reason(why))


def normalize_reason(text: str) -> str:
    """Return an administrator's reason on one line. Raises InvalidInput (`why`)."""
    why = " ".join(text.split())
    if not why or len(why) > MAX_REASON_LENGTH or not is_storable_text(why):
        raise InvalidInput(fields={"why": _("The reason must have 1 to 200 characters.")})
    return why


def _end_job(job: Job, *, actor: User | None, requested_by: User | None, action: str, why: str = "") -> Job:
    """End a job, unless it is already being ended.

    The audit log names `requested_by`. The job's events, which customers see, name `actor`; None for an administrator
    or a sweep.
    """
    with transaction.atomic():
        job = Job.objects.select_for_update().get(pk=job.pk)
        if job.is_ended:
            raise AlreadyEnded
        if job.state != JobState.STOPPING:  # otherwise the job is already being ended
            data: dict[str, Any] = {"why": why} if why else {}
            if why:
                lifecycle.record_event(job=job, kind="stopped_by_operator", data=data)
            lifecycle.request_cancel(job=job, actor=actor, why=why)
            if job.is_notebook:  # people do not cancel a notebook but stop it, so the audit log has other words
                data |= {"is_notebook": True}
            record_audit_event(
                organization=job.organization, actor=requested_by, action=action, target=f"job:{job.pk}", data=data
            )
            if job.state == JobState.STOPPING:
                send_on_commit(stop_job, job.pk)
            else:
                # The job was queued and has ended. The cluster may have kept capacity free for it.
                send_on_commit(dispatch, resolve_cluster_name(job.node_spec.cluster))
    return job


def rerun(*, membership: Membership, job: Job, changes: Mapping[str, Any], idempotency_key: str = "") -> Order:
    """Order a job again, with `changes` to its settings (API field names).

    The new job runs the script in the workspace on the latest versions of the datasets, unless `changes` has `exact`.
    Raises the errors of `quote_order` and `place_order`.
    """
    # Each call makes a new quote, and `place_order` would refuse a key that bought another quote.
    if existing := _existing_rerun(membership.organization, job, idempotency_key):
        return existing
    # The `dataset_versions` in the old quote have no effect: without `exact`, `quote_order` takes the latest versions.
    # `exact` is set even if it is false, because the old quote may be that of an exact rerun.
    rerun_fields = {"rerun_of": job.pk, "exact": changes.get("exact", False)}
    data = purchase_data(job.order.quote.purchase) | dict(changes) | rerun_fields
    quote = quote_order(membership=membership, data=data)
    try:
        return place_order(membership=membership, quote=quote, idempotency_key=idempotency_key)
    except IdempotencyConflict:
        # A concurrent request with the same key placed its order first.
        if existing := _existing_rerun(membership.organization, job, idempotency_key):
            return existing
        raise


def _write_training_order(
    membership: Membership, quote: Quote, purchase: Purchase, key: str, original: Job | None
) -> Order:
    """Write the order of a training. `original`: the job that the training repeats exactly, with its stored script."""
    organization = membership.organization
    script = None if original else read_purchased_script(purchase)
    with transaction.atomic():
        quota = quotas.lock_quota(organization)
        # Checked again under the lock, because a concurrent request may have placed the order meanwhile.
        if order := existing_order(organization, quote, key):
            return order
        return write_order(
            membership=membership,
            quote=quote,
            product=purchase.product,
            idempotency_key=key,
            quota=quota,
            versions=purchase.dataset_versions,
            requirements=purchase.requirements,
            models=purchase.model_versions,
            columns=job_columns(purchase, script)
            | {"rerun_of_id": quote.purchase.get("rerun_of"), "image_digest": pinned_digest(quote, purchase.image)}
            | ({"script": original.script, "runs_snapshot": True} if original else {}),
        )


def pinned_image(organization: Organization, image: Image, digest: str = "") -> dict[str, Any]:
    """Return the part of a quote's payload that pins its image to `digest`, by default to the image's current digest.

    All attempts of the order then use the same image, even if the tag is moved in the registry.
    """
    digest = digest or registries.current_digest(organization=organization, image=image)
    return {"pinned_image": {"reference": image.reference, "digest": digest}}


def pinned_digest(quote: Quote, image: Image) -> str:
    """Return the digest that the image had when the quote was made; empty if that is unknown."""
    pinned = quote.purchase.get("pinned_image", {})
    # If the customer has edited the image since the quote, the digest is that of its old reference.
    return str(pinned["digest"]) if pinned.get("reference") == image.reference else ""


def read_purchased_script(purchase: Purchase) -> snapshots.Script | None:
    """Return the script of a purchase for its snapshot; None if the script is too large. Raises ChoiceUnavailable.

    Call it before the transaction that writes the order: reading customers' files must not hold locks.
    """
    try:
        return snapshots.read_script(purchase.workspace, purchase.code_path)
    except CustomerError as error:  # the script was deleted or made unreadable since `parse` checked it
        raise ChoiceUnavailable(fields={"code_path": error.message}) from error


def job_columns(purchase: Purchase, script: snapshots.Script | None) -> dict[str, Any]:
    """Return the columns of Job that a purchase decides, and store its script. Call it in the order's transaction."""
    return {
        "script": snapshots.store(purchase.workspace.organization_id, script),
        "image_identity": snapshots.image_identity(purchase.image, purchase.node_spec.cluster),
        "name": purchase.name or default_name(purchase.code_path),
        "tags": list(purchase.tags),
        "notes": purchase.notes,
        "framework": purchase.framework,
        "image": purchase.image,
        "workspace": purchase.workspace,
        "code_path": purchase.code_path,
        "arguments": list(purchase.arguments),
        "expands_arguments": True,  # variables such as $LR; False only in jobs of older versions
        "environment": purchase.environment,
        "secrets": list(purchase.secrets),
        "local_rank_argument": purchase.local_rank_argument,
        "epochs": purchase.epochs,
        "lr": purchase.lr,
        "lr_scaling": purchase.lr_scaling,
        "warmup_epochs": purchase.warmup_epochs,
        "batch_size": purchase.batch_size,
        "node_spec": purchase.node_spec,
        "nodes": purchase.nodes,
        "workers_per_node": purchase.workers_per_node,
        "code_key": purchase.code_key,
        "from_checkpoint": purchase.from_checkpoint,
    } | purchase.fault_tolerance.to_json()


def write_order(
    *,
    membership: Membership,
    quote: Quote,
    product: Product,
    idempotency_key: str,
    quota: Quota,
    versions: Sequence[DatasetVersion],
    columns: Mapping[str, Any],
    requirements: Requirements | None = None,
    models: Sequence[ModelVersion] = (),
    parent: Hold | None = None,
) -> Order:
    """Hold the quote's ceiling and queue a job with these columns of `Job`. The caller has locked `quota`.

    With `requirements`, the job waits until their packages are installed. With `parent`, the hold of a sweep, the
    ceiling is taken out of that hold instead of the wallet.

    Raises QuotaExceeded, ChoiceUnavailable, InsufficientFunds, BudgetExceeded, and with a `parent` HoldUsedUp.
    """
    organization = membership.organization
    cluster_name = resolve_cluster_name(columns["node_spec"].cluster)
    _require_choices(columns["workspace"], versions, models)
    if secret_store.missing(organization, columns.get("secrets", ())):
        raise ChoiceUnavailable
    _require_quota(organization, quota)
    packages_columns: dict[str, Any] = {}
    if requirements:
        layer = packages.require_layer(
            organization=organization,
            image=columns["image"],
            digest=columns.get("image_digest", ""),
            cluster_name=cluster_name,
            lines=requirements.lines,
        )
        is_installed = layer.state == PackageLayer.States.READY
        packages_columns = {
            "requirements_path": requirements.path,
            "packages": layer,
            "awaits_packages": not is_installed,
        }
        if not is_installed:
            send_on_commit(install_packages)
    hold = charges.hold(
        quote=quote,
        reference=f"order:{quote.pk}",  # one hold per quote: `charges.hold` returns an existing one
        user=membership.user,
        labels={  # by which the cost pages group
            "workspace": columns["workspace"].name,
            "node_spec": columns["node_spec"].name,
            "product": product.name,
        },
        parent=parent,
    )
    order = Order.objects.create(
        organization=organization,
        quote=quote,
        hold=hold,
        product=product,
        idempotency_key=idempotency_key,
        placed_by=membership.user,
    )
    job = Job.objects.create(
        organization=organization,
        order=order,
        placed_by=order.placed_by,
        deadline_seconds=quote.deadline_seconds,
        queued_at=timezone.now(),
        traceparent=tracing.current_traceparent(),
        **packages_columns,
        **columns,
    )
    JobDataset.objects.bulk_create(
        JobDataset(job=job, version=version, position=position) for position, version in enumerate(versions)
    )
    JobModel.objects.bulk_create(
        JobModel(job=job, version=version, position=position) for position, version in enumerate(models)
    )
    lifecycle.record_event(job=job, kind="ordered", actor=membership.user, data={"ceiling_minor": quote.ceiling_minor})
    packages.record_installation(job)
    record_audit_event(organization=organization, actor=membership.user, action="order.placed", target=f"job:{job.pk}")
    send_on_commit(dispatch, cluster_name)
    return order


def _require_quota(organization: Organization, quota: Quota) -> None:
    """Raise QuotaExceeded if the organization has too many open jobs, or no storage left for results."""
    open_jobs = Job.objects.filter(organization=organization, state__in=OPEN).count()
    if open_jobs >= quota.max_open_jobs:
        raise QuotaExceeded(
            _(
                "Your organization has reached its limit of %(jobs)d queued or running jobs. Wait for one to "
                "end, or cancel one."
            )
            % {"jobs": quota.max_open_jobs}
        )
    if sentence := storage_refusal(organization):
        raise QuotaExceeded(sentence)


def held_minor(quote: Quote) -> int:
    """Return how much of a quote's ceiling is already held, in minor units: 0 unless the quote extends a notebook."""
    return int(quote.purchase.get(EXTENSION_MARK, {}).get("held_minor", 0))


def refusal(quote: Quote, buyer: User | None) -> str:
    """Return why `buyer` cannot buy `quote` even with enough money in the wallet; empty if nothing prevents it.

    Checks budgets and the storage quota, so that customers do not top up for a quote that they cannot buy.
    """
    account = wallet(quote.organization)
    amount = quote.ceiling_minor - held_minor(quote)
    over_budget = budgets.refusal(account=account, user=buyer, amount_minor=amount) if account else ""
    return over_budget or storage_refusal(quote.organization)


def storage_refusal(organization: Organization) -> str:
    """Return why no run can store results; empty if at least 1 MiB of the storage quota is left.

    A run gets its limit in whole MiB (`RunSpec.storage_left_mib`), so with less than 1 MiB left it could write nothing.
    """
    if storage.quota_left(organization) >> 20:
        return ""
    # `quota_left` is also 0 while `stops_writes` is set, which happens if the wallet can't pay for storage.
    if Quota.objects.filter(organization=organization, stops_writes=True).exists():
        return _("Your wallet can't pay for storage, so a run can't save its results. Top up the wallet.")
    return _("Your storage quota is used up, so a run can't save its results. Delete files that you no longer need.")


def _require_choices(workspace: Workspace, versions: Sequence[DatasetVersion], models: Sequence[ModelVersion]) -> None:
    """Check that workspace, datasets and models still exist. Raises ChoiceUnavailable.

    The caller has locked the organization's quota. Each deletion in the organization locks it too, so no deletion can
    come between this check and the new job. Versions of datasets are locked too, because another organization may own
    them.
    """
    version_ids = [version.pk for version in versions]
    existing = storage.lock_versions(version_ids) if version_ids else 0
    if existing < len(version_ids) or not Workspace.objects.filter(pk=workspace.pk, deleted_at=None).exists():
        raise ChoiceUnavailable
    model_ids = [version.pk for version in models]
    if model_ids and ModelVersion.objects.filter(pk__in=model_ids, deleted_at=None).count() < len(model_ids):
        raise ChoiceUnavailable


def existing_order(organization: Organization, quote: Quote, key: str) -> Order | None:
    """Return the order that this key bought for this quote; None if quote and key are both unused.

    Raises QuoteBought, IdempotencyConflict.
    """
    # One query looks for quote and key. Between two queries, a concurrent request could write the order. The query for
    # the quote would then miss it, and the query for the key would find it, as if the key had bought another quote.
    matching_orders = Order.objects.filter(Q(quote=quote) | Q(organization=organization, idempotency_key=key))
    orders = {order.quote_id: order for order in matching_orders.select_related("job")}
    if order := orders.get(quote.pk):
        if order.idempotency_key != key:
            raise QuoteBought
        return order
    if orders:
        raise IdempotencyConflict
    return None


def _existing_rerun(organization: Organization, job: Job, key: str) -> Order | None:
    """Return the rerun of `job` that this key bought, if any. Raises IdempotencyConflict if it bought another job."""
    order = order_with_key(organization, key) if key else None
    if order and order.job.rerun_of_id != job.pk:
        raise IdempotencyConflict
    return order


def _earlier_job_id(organization: Organization, value: Any) -> int | None:
    """Return the id of the job that a purchase reruns; None if the organization has no such job."""
    if type(value) is not int:  # not `isinstance`, because JSON's true is an instance of int
        return None
    return Job.objects.filter(organization=organization, pk=value).values_list("pk", flat=True).first()


def order_with_key(organization: Organization, key: str) -> Order | None:
    """Return the organization's order with this idempotency key, if any."""
    return Order.objects.filter(organization=organization, idempotency_key=key).select_related("job").first()
