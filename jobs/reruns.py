"""Rerun a job exactly as it was ordered, or with the latest script, datasets, image and prices; say what has changed.

An exact rerun runs a copy of the job's script. `snapshots.restore` writes the copy beside the script in the workspace,
so that the copy finds its modules and data files. Those are not stored with the job: they are used as they are now.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from django.utils.translation import gettext as _

from billing import pricing
from billing.amounts import money
from billing.errors import NotPriced
from billing.models import PriceBook, Quote
from billing.pricebooks import current_book, price_rows
from billing.pricing import PriceKind
from console.accounts.models import Organization
from console.core.errors import CustomerError, InvalidInput, NotFound
from jobs import packages, run_specs, snapshots
from jobs.models import Job, ScriptSnapshot
from jobs.purchase import QuoteRequestSerializer, purchase_data
from jobs.snapshots import ScriptState
from storage import selectors as storage
from storage import sharing
from storage.diffs import DiffLine
from storage.models import DatasetVersion, ModelVersion

CHANGEABLE = (
    "node_spec", "nodes", "workers_per_node", "max_seconds", "ceiling_minor", "name", "tags", "notes",
    "retries", "retry_backoff_seconds", "on_hang", "min_nodes", "collective_timeout_seconds", "stall_check_seconds",
)  # fmt: skip
"""Fields that may change in an exact rerun: where and how long it runs, its labels, and what happens after a fault."""
EMPTY: tuple[Any, ...] = (None, "", [], {})
"""Values that mean that a field was left out."""


@dataclass(frozen=True)
class Configuration:
    """The script, image and datasets of a job when it was ordered, and what has changed since.

    `sha256`, `size_bytes` and `text` describe the script; None or empty if it is not stored. `diff` compares the text
    with the script that is in the workspace now. `changes` are sentences.
    """

    sha256: str
    size_bytes: int | None
    text: str | None
    script_state: ScriptState
    diff: list[DiffLine]
    image_identity: str
    versions: list[DatasetVersion]
    changes: list[str]


def configuration(job: Job) -> Configuration:
    """Return script, image and datasets of the job's order, and compare them with those that a rerun would use now."""
    current = snapshots.current_script(job)
    state = snapshots.state_of(job, current)
    return Configuration(
        sha256=job.script.sha256 if job.script else "",
        size_bytes=job.script.size_bytes if job.script else None,
        text=snapshots.text_of(job),
        script_state=state,
        diff=snapshots.diff(job, current) if state is ScriptState.CHANGED else [],
        image_identity=job.image_identity,
        versions=run_specs.mounted_dataset_versions(job),
        changes=_change_sentences(job, state),
    )


def changes(job: Job) -> list[str]:
    """Return a sentence for each difference between the job and a rerun with the latest versions and prices."""
    return _change_sentences(job, snapshots.state_of(job, snapshots.current_script(job)))


def exact_purchase(*, organization: Organization, data: Mapping[str, Any]) -> tuple[dict[str, Any], Job]:
    """Return the purchase that repeats the job `rerun_of` with the CHANGEABLE fields of `data`, and that job.

    Raises InvalidInput if the job cannot be repeated exactly, or if `data` changes another field.
    """
    pk = data.get("rerun_of")
    jobs = Job.objects.filter(organization=organization, builtin_script="").select_related(
        "order__quote", "workspace", "packages"
    )
    # `type` instead of isinstance, because true is an instance of int.
    job = jobs.filter(pk=pk).first() if type(pk) is int and 0 < pk <= storage.MAX_KEY else None
    if job is None:
        raise InvalidInput(fields={"rerun_of": _("Choose a training of your organization to run again.")})
    _require_repeatable(job)
    original = purchase_data(job.order.quote.purchase)
    unchangeable = [name for name in map(str, QuoteRequestSerializer().fields) if name not in {*CHANGEABLE, "exact"}]
    sentence = _("An exact rerun keeps this as it was. Leave it out, or run again with the latest.")
    refused = [name for name in unchangeable if data.get(name) not in EMPTY and data[name] != original.get(name)]
    if refused:
        raise InvalidInput(fields=dict.fromkeys(refused, sentence))
    new_values = {name: data[name] for name in CHANGEABLE if name in data}
    # If name, tags or notes are empty, they stay as they were. Other CHANGEABLE fields may be emptied: without
    # `max_seconds`, for example, the default applies.
    kept_details = {name: original.get(name) for name in ("name", "tags", "notes") if data.get(name) in EMPTY}
    return {**original, **new_values, **kept_details, "rerun_of": pk}, job


def exact_original(quote: Quote) -> Job | None:
    """Return the job that a quote repeats exactly, with its script; None for a quote of another kind."""
    if not quote.purchase.get("exact"):
        return None
    jobs = Job.objects.select_related("script", "packages")
    return jobs.get(organization=quote.organization, pk=quote.purchase["rerun_of"])


def _require_repeatable(job: Job) -> None:
    """Raise InvalidInput if the job's script is not stored, or its workspace was deleted."""
    sentence = ""
    if job.workspace.deleted_at:
        sentence = _("The workspace of job #%(job)d was deleted. Restore it under Usage.")
    elif not job.script_id or not ScriptSnapshot.objects.filter(pk=job.script_id, content__isnull=False).exists():
        sentence = _("The script of job #%(job)d is not stored, so it can't run exactly. Run again with the latest.")
    if sentence:
        raise InvalidInput(fields={"rerun_of": sentence % {"job": job.pk}})


def _change_sentences(job: Job, state: ScriptState) -> list[str]:
    """Return the sentences of `changes`. `state` compares the script with the workspace."""
    script = {
        ScriptState.UNCHANGED: "",
        ScriptState.CHANGED: _("The script %(path)s has changed."),
        ScriptState.MISSING: _("The script %(path)s can't be read. It was deleted or moved."),
        ScriptState.UNKNOWN: _("It is not known whether %(path)s has changed, because no snapshot was taken."),
    }[state] % {"path": job.code_path}
    datasets = [_dataset_change(job, version) for version in run_specs.mounted_dataset_versions(job)]
    models = [_model_change(version) for version in run_specs.mounted_model_versions(job)]
    return [
        sentence
        for sentence in (script, _requirements_change(job), *datasets, *models, _image_change(job), _price_change(job))
        if sentence
    ]


def _requirements_change(job: Job) -> str:
    """Return how the requirements file differs from the ordered one; empty if it does not, or none was ordered."""
    ordered = packages.requirements_of(job)
    if ordered is None:
        return ""
    try:
        current = packages.read_requirements(job.workspace, ordered.path)
    except CustomerError:
        return _("The requirements file %(path)s can't be read.") % {"path": ordered.path}
    return "" if current == ordered else _("The requirements file %(path)s has changed.") % {"path": ordered.path}


def _dataset_change(job: Job, version: DatasetVersion) -> str:
    """Return how the dataset that a rerun would read differs from the one that the job read; empty if it does not."""
    name = version.dataset.name
    try:
        latest = storage.latest_version(sharing.usable_dataset_named(job.organization, name))
    except NotFound:
        latest = None
    if latest is None:  # deleted, or no longer shared
        return _("The dataset %(name)s is no longer available.") % {"name": name}
    if latest.dataset_id != version.dataset_id:
        return _("The name %(name)s means another dataset now.") % {"name": name}
    if latest.pk == version.pk:
        return ""
    values = {"name": name, "old": version.number, "new": latest.number}
    return _("The dataset %(name)s has version %(new)d; the job read version %(old)d.") % values


def _model_change(version: ModelVersion) -> str:
    """Return how the model that a rerun would read differs from the one that the job read; empty if it does not."""
    latest = storage.model_versions_of(version.model).first() if version.model.deleted_at is None else None
    values = {"name": version.model.name, "old": version.number, "new": latest.number if latest else 0}
    if latest is None:
        return _("The model %(name)s was deleted.") % values
    if latest.pk != version.pk:
        return _("The model %(name)s has version %(new)d; the job read version %(old)d.") % values
    return ""


def _image_change(job: Job) -> str:
    """Return a sentence if the image has another identity now; empty if not, or if either identity is unknown."""
    identity = snapshots.image_identity(job.image, job.node_spec.cluster)
    if not job.image_identity or not identity or identity == job.image_identity:
        return ""
    return _("The image %(image)s is another build now.") % {"image": job.image.name}


def _price_change(job: Job) -> str:
    """Return a sentence about the price of a node-hour; empty if the quote's price book still applies, or none does.

    If the price did not change, or either is unknown, the sentence only names the new price book.
    """
    quote = job.order.quote
    try:
        book = current_book(currency=quote.currency)
    except NotPriced:
        return ""
    if book.pk == quote.book_id:
        return ""
    old, new = _hourly(quote.book, job, quote), _hourly(book, job, quote)
    if old == new or old is None or new is None:
        return _("The price book %(book)s applies now.") % {"book": book.name}
    sentence = _("A node-hour of %(spec)s costs %(new)s; it was %(old)s.")
    prices = {"old": money(old, quote.currency, exact=True), "new": money(new, quote.currency, exact=True)}
    return sentence % {"spec": job.node_spec.title, **prices}


def _hourly(book: PriceBook, job: Job, quote: Quote) -> Decimal | None:
    """Return a book's price for one node and hour of the job, in minor units; None if the book has no such price."""
    purchase = pricing.Purchase(
        product=job.order.product.name,
        mode=pricing.Mode(quote.mode),
        node_spec=job.node_spec.name,
        nodes=job.nodes,
        epochs=job.epochs,
    )
    return pricing.find_price(price_rows(book), PriceKind.NODE_HOUR, purchase)
