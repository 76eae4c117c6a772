"""New training: what is bought, with a live quote beside it, and the order.

The one rule: the fields have the API's names, and `jobs.orders` says what is wrong with each; nothing is checked twice.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.views.decorators.http import require_GET, require_POST
from django_htmx.http import HttpResponseClientRedirect

from billing import payments, receivables, wording
from billing import selectors as billing
from billing.errors import BudgetExceeded, InsufficientFunds
from billing.models import Quote
from billing.quotes import quote_for, require_valid
from billing.taxes import tax_for
from console.accounts.errors import CustomerError, NotFound
from console.accounts.models import Organization
from console.accounts.roles import Capability
from console.accounts.services import is_active
from console.web.access import MemberRequest, member
from console.web.amounts import row_number, seconds
from console.web.images import FRAMEWORK_TITLES
from jobs import orders, paid, probes
from jobs import selectors as jobs
from jobs.backend import cluster_named, resources_of
from jobs.models import Job
from jobs.resilience import MOST_RETRIES
from jobs.sentences import terms_sentences
from storage import files
from storage import selectors as storage
from storage.models import Image, Workspace
from storage.paths import Kind

FIELDS = (
    "product",
    "framework",
    "image",
    "workspace",
    "code_path",
    "arguments",
    "datasets",
    "epochs",
    "lr",
    "batch_size",
    "node_spec",
    "nodes",
    "workers_per_node",
    "retries",
    "retry_backoff_seconds",
    "on_hang",
    "min_nodes",
    "controller",
    "collective_timeout_seconds",
    "stall_check_seconds",
)
"""What goes to the quote as it was typed. The limits are typed in other units: `_data` turns them."""
LIMITS = ("max_seconds", "ceiling_minor")
ADVANCED: dict[str, Any] = {
    "retries": 0,
    "retry_backoff_seconds": "",
    "on_hang": "stop",
    "min_nodes": "",
    "controller": "gloo",
    "collective_timeout_seconds": "",
    "stall_check_seconds": "",
}
"""What stands in the fold of the form, and means nothing special."""
UNITS = {"minutes": 60, "hours": 3600}
SCRIPTS_SHOWN = 300
FOLDERS_SEARCHED = 200
SKIPPED_FOLDERS = {"__pycache__", "node_modules"}


@dataclass(frozen=True)
class SpecChoice:
    """A node spec on offer: its price for one node and hour, and how many of it could start now and ever."""

    offer: billing.OfferedSpec
    free: int | None
    most: int | None


@require_GET
@member(Capability.RUN)
def training_new(request: MemberRequest) -> HttpResponse:
    """The page. `?rerun=<job>` fills it as that job was bought; any field can be given by its name."""
    organization = request.membership.organization
    account = billing.wallet(organization)
    if account is None or not is_active(organization):
        return render(request, "jobs/training_inactive.html")
    images = list(storage.images_for(organization))
    workspaces = list(storage.workspaces_for(organization))
    specs = _specs(account.currency)
    values = _defaults(images, workspaces, specs) | _rerun(organization, request.GET.get("rerun", ""))
    values |= {name: request.GET[name] for name in FIELDS if name in request.GET}
    workspace = next((each for each in workspaces if each.name == values["workspace"]), None)
    scripts = _scripts(workspace) if workspace else []
    if len(scripts) == 1:
        values["code_path"] = values["code_path"] or scripts[0]
    return render(
        request,
        "jobs/training_new.html",
        {
            "values": values,
            "products": jobs.products(),
            "framework_titles": FRAMEWORK_TITLES,
            "images": images,
            "workspaces": workspaces,
            "scripts": scripts,
            "datasets": storage.datasets_for(organization),
            "specs": specs,
            "account": account,
            "units": UNITS,
            "retry_counts": range(MOST_RETRIES + 1),
            "hang_policies": Job.HangPolicies.choices,
            "controllers": Job.Controllers.choices,
            "advanced": any(values[name] != usual for name, usual in ADVANCED.items()),
        },
    )


@require_GET
@member(Capability.RUN)
def training_scripts(request: MemberRequest) -> HttpResponse:
    """The scripts of a workspace, as options."""
    try:
        workspace = storage.workspace_named(request.membership.organization, request.GET.get("workspace", ""))
    except NotFound:
        return HttpResponse("")
    return render(request, "jobs/_scripts.html", {"scripts": _scripts(workspace)})


@require_POST
@member(Capability.RUN)
def training_quote(request: MemberRequest) -> HttpResponse:
    """The card beside the form: a quote for what is in it now, or what is still wrong with it."""
    account = billing.wallet(request.membership.organization)
    currency = account.currency if account else billing.default_currency()
    data, faults = _data(request.POST, currency)
    try:
        quote = orders.quote_order(membership=request.membership, data=data)
    except CustomerError as error:
        return _refusal(request, error, faults)
    if faults:
        return _refusal(request, CustomerError(fields=faults), {})
    return _card(request, quote)


@require_POST
@member(Capability.RUN)
def training_order(request: MemberRequest) -> HttpResponse:
    """Buy the quote that was shown. The same card sent twice buys once."""
    quote = quote_for(organization=request.membership.organization, quote_id=request.POST.get("quote", ""))
    try:
        order = orders.place_order(
            membership=request.membership,
            quote=quote,
            idempotency_key=request.POST.get("idempotency_key", "").replace("\0", "")[:255],
        )
    except (InsufficientFunds, BudgetExceeded) as error:
        return _card(request, quote, problem=str(error.message))
    except CustomerError as error:
        sentences = [str(sentence) for sentence in error.fields.values()] or [str(error.message)]
        return _card(request, quote, problem=" ".join(sentences), stale=True)
    messages.success(request, _("Bought. The ceiling is held in your wallet; the run starts as soon as there is room."))
    return HttpResponseClientRedirect(reverse("job_detail", args=[order.job.pk]))


@require_POST
@member(Capability.RUN)
def training_probe(request: MemberRequest) -> HttpResponse:
    """Run what was quoted for a minute on one node, free, so that the next quote is measured."""
    quote = quote_for(organization=request.membership.organization, quote_id=request.POST.get("quote", ""))
    try:
        order = probes.place_probe(
            membership=request.membership, data=quote.purchase, idempotency_key=f"probe:{quote.pk}"
        )
    except CustomerError as error:
        sentences = [str(sentence) for sentence in error.fields.values()] or [str(error.message)]
        return _card(request, quote, problem=" ".join(sentences))
    messages.success(request, _("The probe runs for a minute at most and costs nothing. Then ask for a new quote."))
    return HttpResponseClientRedirect(reverse("job_detail", args=[order.job.pk]))


@require_POST
@member(Capability.RUN)
def training_pay(request: MemberRequest) -> HttpResponse:
    """Pay what the wallet lacks for the quote that was shown; it is bought when the money has come in."""
    organization = request.membership.organization
    quote = quote_for(organization=organization, quote_id=request.POST.get("quote", ""))
    account = billing.wallet(organization)
    if account is None or not request.membership.allows(Capability.PAY):
        raise PermissionDenied
    try:
        require_valid(quote)
        started = payments.pay_for(
            quote=quote,
            account=account,
            user=request.membership.user,
            return_path=reverse("training_paid", args=[quote.pk]),
        )
    except CustomerError as error:
        return _card(request, quote, problem=str(error.message), stale=quote.is_expired)
    return HttpResponseClientRedirect(started.checkout_url)


@require_GET
@member(Capability.RUN)
def training_paid(request: MemberRequest, quote_id: UUID) -> HttpResponse:
    """Where a customer comes back to from paying for a quote: waits for the money, then shows the job."""
    quote = quote_for(organization=request.membership.organization, quote_id=str(quote_id))
    top_up = quote.top_ups.select_related("quote", "created_by").order_by("-created_at").first()
    if top_up is None:
        raise Http404
    order = paid.buy(top_up=top_up)
    if order is not None:
        messages.success(request, _("Paid and bought. The run starts as soon as there is room."))
        where = reverse("job_detail", args=[order.job.pk])
        return HttpResponseClientRedirect(where) if request.htmx else redirect(where)
    template = "jobs/_training_paid.html" if request.htmx else "jobs/training_paid.html"
    waits = top_up.state in payments.OPEN and "paid" in request.GET
    return render(request, template, {"top_up": top_up, "quote": quote, "waits": waits})


def has_script(workspace: Workspace) -> bool:
    """Whether there is anything in a workspace that could be run."""
    return bool(_scripts(workspace))


def _card(request: MemberRequest, quote: Quote, *, problem: str = "", stale: bool = False) -> HttpResponse:
    account = billing.wallet(request.membership.organization)
    available = account.available_minor if account else 0
    return render(
        request,
        "jobs/_quote.html",
        {
            "quote": quote,
            "available_minor": available,
            "remaining_minor": available - quote.ceiling_minor,
            "missing_minor": max(0, quote.ceiling_minor - available),
            "owed_minor": receivables.owed_minor(account) if account else 0,
            "to_pay_minor": payments.shortfall_minor(quote, account=account) if account else 0,
            "notes": terms_sentences(quote.purchase),
            "idempotency_key": uuid4(),
            "problem": problem,
            "stale": stale,
            "may_probe": probes.is_worthwhile(quote),
            "tax": tax_for(request.membership.organization),
            "errors": _slots({}, request.POST),
        },
    )


def _refusal(request: MemberRequest, error: CustomerError, faults: dict[str, Any]) -> HttpResponse:
    """What is wrong: at the fields the customer has been to, and as a list in the card for those still to come."""
    fields = dict(error.fields) | faults
    touched = set(request.POST.get("touched", "").split(","))
    shown = {name: sentence for name, sentence in fields.items() if name in touched}
    missing = {name: sentence for name, sentence in fields.items() if name not in touched}
    return render(
        request,
        "jobs/_quote_refused.html",
        {
            "message": "" if fields else error.message,
            "missing": missing,
            "wrong": shown,
            "errors": _slots(shown, request.POST),
        },
    )


def _slots(errors: dict[str, Any], sent: QueryDict) -> list[tuple[str, Any]]:
    """Every field's place for an error, empty where there is none; nothing when the order was sent, not the form."""
    return [(name, errors.get(name, "")) for name in (*FIELDS, *LIMITS)] if "touched" in sent else []


def _data(sent: QueryDict, currency: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The form as the API's fields, and what is wrong with the limits, which people type in hours and major units."""
    data: dict[str, Any] = {name: sent.get(name, "") for name in FIELDS}
    faults: dict[str, Any] = {}
    unit = UNITS.get(str(sent.get("max_time_unit")), 60)
    turns: dict[str, tuple[str, Callable[[str], int]]] = {
        "max_seconds": ("max_time", lambda text: seconds(text, unit)),
        "ceiling_minor": ("ceiling", lambda text: wording.typed_minor(text, currency)),
    }
    for name, (typed, turn) in turns.items():
        text = str(sent.get(typed, "")).strip()
        try:
            data[name] = turn(text) if text else ""
        except ValueError:
            faults[name] = _("Give a number, or leave it empty.")
    if (again := row_number(str(sent.get("rerun_of", "")))) is not None:
        data["rerun_of"] = again
    return data, faults


def _defaults(images: list[Image], workspaces: list[Workspace], specs: list[SpecChoice]) -> dict[str, Any]:
    """A form that is nearly right at once: two of the smallest nodes."""
    product = jobs.products().first()
    image = next((image for image in images if image.frameworks[:1] == ["pytorch"]), images[0] if images else None)
    return {
        "product": product.name if product else "",
        "framework": image.frameworks[0] if image else "",
        "image": image.name if image else "",
        "workspace": workspaces[0].name if workspaces else "",
        "code_path": "",
        "arguments": "",
        "datasets": "",
        "epochs": 5,
        "lr": "0.01",
        "batch_size": 64,
        "node_spec": specs[0].offer.spec.name if specs else "",
        "nodes": 2 if specs and (specs[0].most is None or specs[0].most >= 2) else 1,
        "workers_per_node": (specs[0].offer.spec.gpus or 1) if specs else 1,
        **ADVANCED,
        "max_time": "",
        "max_time_unit": "minutes",
        "ceiling": "",
        "rerun_of": "",
    }


def _rerun(organization: Organization, asked: str) -> dict[str, Any]:
    """The fields as an earlier job was bought."""
    if (earlier := row_number(asked)) is None:
        return {}
    job = jobs.job_for(organization, earlier)
    bought = dict(job.order.quote.purchase)
    ceiling, seconds = bought.get("ceiling_minor"), bought.get("max_seconds")
    # Nothing and 0 are the same there, and an earlier purchase may know nothing of it.
    advanced = {name: bought.get(name) or usual for name, usual in ADVANCED.items()}
    return (
        {name: bought[name] for name in FIELDS if name not in ADVANCED}
        | advanced
        | {
            "arguments": shlex.join(bought["arguments"]),
            "datasets": ",".join(bought["datasets"]),
            "ceiling": f"{wording.to_major(ceiling, job.order.quote.currency):f}" if ceiling else "",
            "max_time": f"{Decimal(seconds) / 60:f}" if seconds else "",
            "rerun_of": job.pk,
        }
    )


def _specs(currency: str) -> list[SpecChoice]:
    capacities = jobs.capacities_now()
    return [
        SpecChoice(
            offer,
            capacity.nodes_now(resources_of(offer.spec), offer.spec.name) if capacity else None,
            capacity.nodes_ever(resources_of(offer.spec), offer.spec.name) if capacity else None,
        )
        for offer in billing.offered_specs(currency)
        for known in [capacities.get(cluster_named(offer.spec.cluster))]
        for capacity in [known if known and not known.elastic else None]
    ]


def _scripts(workspace: Workspace) -> list[str]:
    """Python files of a workspace, nearest first; a large tree is not searched to its end."""
    root: Path = storage.workspace_folder(workspace)
    found: list[str] = []
    folders = [""]
    for folder in folders:
        if len(folders) > FOLDERS_SEARCHED or len(found) >= SCRIPTS_SHOWN:
            break
        try:
            entries = files.list_folder(root=root, path=folder).entries
        except CustomerError:
            continue  # gone, or closed to us, since it was listed
        for entry in entries:
            path = posixpath.join(folder, entry.name)
            if entry.kind == Kind.FILE and entry.name.endswith(".py"):
                found.append(path)
            elif entry.kind == Kind.FOLDER and not entry.name.startswith(".") and entry.name not in SKIPPED_FOLDERS:
                folders.append(path)
    return found[:SCRIPTS_SHOWN]
