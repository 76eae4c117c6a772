"""The *New training* form, its live quote and the order. Fields have the API's names; `jobs.orders` validates them."""

from __future__ import annotations

import itertools
import json
import math
import posixpath
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.views.decorators.gzip import gzip_page
from django.views.decorators.http import require_GET, require_POST
from django_htmx.http import HttpResponseClientRedirect

from billing import payments, receivables
from billing import selectors as billing
from billing.amounts import parse_amount, to_major
from billing.errors import BudgetExceeded, InsufficientFunds
from billing.models import Quote
from billing.quotes import quote_for, require_valid
from billing.taxes import tax_for
from console.accounts.roles import Capability
from console.accounts.services import is_active
from console.core.errors import CustomerError, NotFound
from console.web.access import MemberRequest, error_text, member
from console.web.amounts import parse_row_id, parse_seconds, time_text
from console.web.quote_cards import posted_key
from console.web.templatetags.trainyard import FRAMEWORK_TITLES
from jobs import checkout, comparison, free_estimates, orders, packages, reruns, script_data
from jobs import selectors as jobs
from jobs.clusters import resolve_cluster_name, resources_of
from jobs.environment import code_settings, lines_of
from jobs.errors import QuotaExceeded
from jobs.fault_tolerance import MAX_RETRIES
from jobs.images import any_cluster_pulls_images, default_image, problems
from jobs.launch_preview import launch_preview
from jobs.messages import terms_sentences
from jobs.models import Job, Product
from jobs.purchase import purchase_data
from storage import files, previews, secret_store, sharing
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
    "requirements",
    "environment",
    "secrets",
    "datasets",
    "models",
    "from_checkpoint",
    "epochs",
    "lr",
    "lr_scaling",
    "warmup_epochs",
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
    "local_rank_argument",
    "name",
    "tags",
    "notes",
)
"""Fields passed to the quote as they were sent. `secrets` and `models` may have several values."""
LIMIT_FIELDS = ("max_seconds", "ceiling_minor")
"""Fields that `_api_data` converts: they are typed in minutes or hours, and in major units."""
ADVANCED_DEFAULTS: dict[str, Any] = {
    "retries": 0,
    "retry_backoff_seconds": "",
    "on_hang": "stop",
    "min_nodes": "",
    "controller": "gloo",
    "collective_timeout_seconds": "",
    "stall_check_seconds": "",
    "local_rank_argument": "auto",
}
"""The fields of the form's advanced section, with their default values."""
TIME_UNITS = {"minutes": 60, "hours": 3600}
"""Seconds per unit of the time limit."""
MAX_SCRIPTS = 300
"""How many scripts the form offers: more than anybody reads. The path of any other script can be typed."""
MAX_CHECKPOINT_JOBS = 20
"""How many earlier jobs the form offers to start from. A link on a job's page opens the form with any other job."""
MAX_FOLDERS = 200
"""How many folders are searched for scripts: the form is shown only after the search."""
SKIPPED_FOLDERS = {"__pycache__", "node_modules"}
"""Folders that are not searched, because programs write them."""


@dataclass
class ScriptFolder:
    """A folder of a workspace with the scripts that the form offers. `path` is relative to the workspace."""

    path: str
    folders: list[ScriptFolder] = field(default_factory=list)
    scripts: list[tuple[str, str]] = field(default_factory=list)
    """The name and the path of each script."""

    @property
    def name(self) -> str:
        """Return the folder's own name."""
        return posixpath.basename(self.path)


@dataclass(frozen=True)
class SpecChoice:
    """A node spec on offer with its price per node-hour, its free nodes and its nodes in total.

    `free` and `total` are None if the cluster does not respond, or is elastic and can add nodes.
    """

    offer: billing.OfferedSpec
    free: int | None
    total: int | None


@require_GET
@gzip_page  # about 100 KB of HTML
@member(Capability.RUN)
def training_new(request: MemberRequest) -> HttpResponse:
    """Show the form. `?rerun=<job>` fills it in from a job; other parameters fill in fields by name.

    `&exact=1` repeats the job exactly: the form then disables the fields that must stay the same.
    """
    organization = request.membership.organization
    account = billing.wallet(organization)
    if account is None or not is_active(organization):
        return render(request, "jobs/training_inactive.html", {"heading": _("New training")})
    images = list(storage.images_for(organization))
    workspaces = list(storage.workspaces_for(organization).only("name", "folder"))
    specs = specs_on_offer(account.currency)
    problems_by_image = problems(images)
    usable_images = [image for image in images if image.pk not in problems_by_image]
    job_id = parse_row_id(request.GET.get("rerun", ""))
    earlier_job = None if job_id is None else jobs.job_for(organization, job_id)
    if earlier_job and earlier_job.builtin_script:  # an image check or a notebook has no script and values to repeat
        raise NotFound
    is_exact = earlier_job is not None and request.GET.get("exact") == "1"
    products = list(jobs.products())
    values = _defaults(products, usable_images, workspaces, specs) | _rerun_values(earlier_job)
    values |= {name: request.GET[name] for name in FIELDS if name in request.GET}
    # These two parameters may come several times, and `request.GET[name]` is only the last one.
    values["secrets"] = request.GET.getlist("secrets") or values["secrets"]
    values["models"] = request.GET.getlist("models") or values["models"]
    # A number, because the template looks for it in `checkpoint_job_ids`.
    values["from_checkpoint"] = parse_row_id(str(values["from_checkpoint"])) or ""
    checkpoint_jobs = list(jobs.jobs_with_files(organization, MAX_CHECKPOINT_JOBS))
    workspace = next((candidate for candidate in workspaces if candidate.name == values["workspace"]), None)
    scripts = _scripts(workspace) if workspace else []
    if len(scripts) == 1:  # no choice to make
        values["code_path"] = values["code_path"] or scripts[0]
    return render(
        request,
        "jobs/training_new.html",
        {
            "values": values,
            "earlier": earlier_job,
            "earlier_values": json.dumps(_earlier_values(earlier_job)),
            "is_exact": is_exact,
            # Sentences: how a rerun with the latest versions and prices would differ from the earlier job.
            "changes": reruns.changes(earlier_job) if earlier_job else [],
            "products": products,
            "framework_titles": FRAMEWORK_TITLES,
            "images": images,
            "not_ready": problems_by_image,
            "pulls_images": any_cluster_pulls_images(),
            "workspace_choices": [(each.name, each.name) for each in workspaces],
            "scripts": scripts,
            "script_tree": _script_tree(scripts),
            "datasets": sharing.datasets_to_choose(organization),
            "models": storage.models_to_choose(organization),
            "checkpoint_jobs": checkpoint_jobs,
            "checkpoint_job_ids": [job.pk for job in checkpoint_jobs],
            "secrets": secret_store.secrets_for(organization).values_list("name", flat=True),
            "specs": specs,
            "account": account,
            "wallet": account,  # its name in base.html, which would query the wallet again
            "units": TIME_UNITS,
            "lr_scalings": Job.LrScalings.choices,
            "retry_counts": [(0, _("none")), *((count, count) for count in range(1, MAX_RETRIES + 1))],
            "hang_policies": Job.HangPolicies.choices,
            "controllers": Job.Controllers.choices,
            "local_rank_arguments": Job.LocalRankArguments.choices,
            # The advanced section is open if one of its fields differs from the default. The fields are compared as
            # texts, because values from the URL are texts.
            "is_advanced_open": any(str(values[name]) != str(default) for name, default in ADVANCED_DEFAULTS.items()),
        },
    )


@require_GET
@member(Capability.RUN)
def training_scripts(request: MemberRequest) -> HttpResponse:
    """Return the scripts of a workspace as `<option>` elements and, out of band, as a tree."""
    try:
        workspace = storage.workspace_named(request.membership.organization, request.GET.get("workspace", ""))
    except NotFound:
        return HttpResponse("")  # no options
    scripts = _scripts(workspace)
    return render(
        request, "jobs/_scripts.html", {"scripts": scripts, "script_tree": _script_tree(scripts), "oob": True}
    )


@require_GET
@member(Capability.RUN)
def training_script(request: MemberRequest) -> HttpResponse:
    """Return the beginning of a workspace's script, and which variables of the environment contract it reads."""
    name, path = request.GET.get("workspace", ""), request.GET.get("code_path", "").strip()
    if not path:
        return render(request, "jobs/_script_preview.html", {})
    try:
        workspace = storage.workspace_named(request.membership.organization, name)
        file = files.read(root=storage.workspace_folder(workspace), path=path)
    except CustomerError as error:
        return render(request, "jobs/_script_preview.html", {"path": path, "problem": error.message})
    with file.stream:
        preview = previews.preview(file, name="script.py")  # this name makes the preview a text
    return render(
        request,
        "jobs/_script_preview.html",
        {
            "path": path,
            "workspace": workspace,
            "text": preview.text,
            "is_complete": preview.is_complete,
            "size_bytes": file.size,
            "variables": script_data.contract_variables(preview.text or ""),
        },
    )


@require_POST
@member(Capability.RUN)
def training_quote(request: MemberRequest) -> HttpResponse:
    """Return the quote card for the current values, or their errors."""
    account = billing.wallet(request.membership.organization)
    currency = account.currency if account else billing.default_currency()
    data, limit_errors = _api_data(request.POST, currency)
    # Quote even if a limit is invalid: the response then shows the errors of all fields together.
    try:
        quote = orders.quote_order(membership=request.membership, data=data)
    except CustomerError as error:
        return _quote_errors(request, error, limit_errors)
    if limit_errors:
        return _quote_errors(request, CustomerError(), limit_errors)
    return _quote_card(request, quote)


@require_GET
@member(Capability.RUN)
def training_comparison(request: MemberRequest, quote_id: UUID) -> HttpResponse:
    """Return a quote's alternatives; nothing if the quote names something that no longer exists."""
    quote = quote_for(organization=request.membership.organization, quote_id=quote_id)
    try:
        compared = comparison.compare(quote)
    except CustomerError:
        return HttpResponse("")  # an order of the quote shows the error
    return render(request, "jobs/_comparison.html", {"comparison": compared})


@require_GET
@member(Capability.RUN)
def training_environment(request: MemberRequest, quote_id: UUID) -> HttpResponse:
    """Return the command and variables of rank 0 of a quoted run; nothing if the quote names something deleted."""
    quote = quote_for(organization=request.membership.organization, quote_id=quote_id)
    try:
        preview = launch_preview(quote)
    except CustomerError:
        return HttpResponse("")
    command = shlex.join(["python", str(quote.purchase["code_path"]), *preview.arguments])
    return render(request, "jobs/_launch_preview.html", {"environment": preview.environment, "command": command})


@require_POST
@member(Capability.RUN)
def training_order(request: MemberRequest) -> HttpResponse:
    """Buy the displayed quote. Submitting it twice buys once."""
    quote = quote_for(organization=request.membership.organization, quote_id=request.POST.get("quote", ""))
    try:
        order = orders.place_order(
            membership=request.membership,
            quote=quote,
            idempotency_key=posted_key(request.POST),
        )
    except (InsufficientFunds, BudgetExceeded, QuotaExceeded) as error:  # the quote stays valid and can be bought later
        return _quote_card(request, quote, problem=str(error.message))
    except CustomerError as error:
        return _quote_card(request, quote, problem=error_text(error), stale=True)
    messages.success(
        request, _("Order placed. The ceiling is held in your wallet. The run starts when nodes are available.")
    )
    return HttpResponseClientRedirect(reverse("job_detail", args=[order.job.pk]))


@require_POST
@member(Capability.RUN)
def training_free_estimate(request: MemberRequest) -> HttpResponse:
    """Start a free estimate: at most a minute on one node. The next quote then has a measured estimate.

    The idempotency key contains the quote, so a second click starts no second run.
    """
    quote = quote_for(organization=request.membership.organization, quote_id=request.POST.get("quote", ""))
    try:
        order = free_estimates.order_free_estimate(
            membership=request.membership, data=purchase_data(quote.purchase), idempotency_key=f"probe:{quote.pk}"
        )
    except CustomerError as error:
        return _quote_card(request, quote, problem=error_text(error))
    messages.success(
        request,
        _("The free estimate is queued. It runs for at most one minute. Its page then links to the new price."),
    )
    return HttpResponseClientRedirect(reverse("job_detail", args=[order.job.pk]))


@require_POST
@member(Capability.RUN)
def training_pay(request: MemberRequest) -> HttpResponse:
    """Redirect to the payment of the amount that the wallet lacks. `jobs.checkout` buys the quote after the payment."""
    organization = request.membership.organization
    quote = quote_for(organization=organization, quote_id=request.POST.get("quote", ""))
    account = billing.wallet(organization)
    if account is None or not request.membership.allows(Capability.PAY):
        raise PermissionDenied
    try:
        require_valid(quote)
        top_up = payments.pay_for(
            quote=quote,
            account=account,
            user=request.membership.user,
            return_path=reverse("training_paid", args=[quote.pk]),
        )
    except CustomerError as error:
        return _quote_card(request, quote, problem=str(error.message), stale=quote.is_expired)
    return HttpResponseClientRedirect(top_up.checkout_url)


@require_GET
@member(Capability.RUN)
def training_paid(request: MemberRequest, quote_id: UUID) -> HttpResponse:
    """Show the page after a payment for a quote. htmx polls it until the payment arrives; then it opens the job."""
    quote = quote_for(organization=request.membership.organization, quote_id=str(quote_id))
    top_up = quote.top_ups.select_related("quote", "created_by").order_by("-created_at").first()
    if top_up is None:
        raise Http404
    order = checkout.buy(top_up=top_up)  # None if the top-up is unpaid, or the quote cannot be bought
    if order is not None:
        messages.success(request, _("Payment received and order placed. The run starts when nodes are available."))
        url = reverse("job_detail", args=[order.job.pk])
        return HttpResponseClientRedirect(url) if request.htmx else redirect(url)
    template = "jobs/_training_paid.html" if request.htmx else "jobs/training_paid.html"
    is_waiting = top_up.state in payments.OPEN_STATES and "paid" in request.GET  # the payment page returns to `?paid`
    return render(request, template, {"top_up": top_up, "quote": quote, "is_waiting": is_waiting})


def has_script(workspace: Workspace) -> bool:
    """Return whether a workspace contains a script."""
    return bool(_scripts(workspace))


def _quote_card(request: MemberRequest, quote: Quote, *, problem: str = "", stale: bool = False) -> HttpResponse:
    """Render the quote card. `problem` says why the last attempt to buy the quote failed.

    A `stale` quote cannot be bought any more, so the card offers a new quote.
    """
    account = billing.wallet(request.membership.organization)
    available = account.available_minor if account else 0
    refusal = orders.refusal(quote, request.membership.user)  # why a budget or the storage quota prevents a purchase
    return render(
        request,
        "jobs/_quote.html",
        {
            "quote": quote,
            "code": code_settings(quote.purchase),  # what the script receives: learning rate, batch size and so on
            "available_minor": available,
            "remaining_minor": available - quote.ceiling_minor,
            "missing_minor": max(0, quote.ceiling_minor - available),
            "owed_minor": receivables.owed_minor(account) if account else 0,
            # The top-up that the card offers: the missing amount and debts, rounded up to an amount that can be paid.
            "to_pay_minor": payments.shortfall_minor(quote, account=account) if account else 0,
            "notes": terms_sentences(quote.purchase),
            "warnings": script_data.warnings(request.membership.organization, quote.purchase),
            # The path of a requirements.txt beside the script; the card offers to install its packages.
            "unchosen_requirements": packages.unchosen_file(request.membership.organization, quote.purchase),
            "idempotency_key": uuid4(),
            "problem": problem or refusal,
            "is_refused": bool(refusal),
            "is_storage_full": bool(refusal) and refusal == orders.storage_refusal(request.membership.organization),
            "stale": stale,
            "seconds_left": max(0, math.ceil((quote.expires_at - timezone.now()).total_seconds())),
            # An exact rerun runs the script that is stored with the earlier job. A free estimate would run the one in
            # the workspace.
            "may_order_free_estimate": not quote.purchase.get("exact") and free_estimates.is_worthwhile(quote),
            "tax": tax_for(request.membership.organization),
            "errors": _error_slots({}, request.POST),
        },
    )


def _quote_errors(request: MemberRequest, error: CustomerError, limit_errors: dict[str, Any]) -> HttpResponse:
    """Return the errors: beside fields that the user has visited, and as a list in the card for all other fields.

    `limit_errors` are errors of the limits, from `_api_data`.
    """
    fields = dict(error.fields) | limit_errors
    visited = set(request.POST.get("touched", "").split(","))
    field_errors = {name: message for name, message in fields.items() if name in visited}
    card_errors = {name: message for name, message in fields.items() if name not in visited}
    return render(
        request,
        "jobs/_quote_refused.html",
        {
            "message": "" if fields else error.message,
            "card_errors": card_errors,
            "field_errors": field_errors,
            "errors": _error_slots(field_errors, request.POST),
        },
    )


def _error_slots(errors: dict[str, Any], posted: QueryDict) -> list[tuple[str, Any]]:
    """Return (field, error) for every field, to update its error element; "" clears it.

    Only the form sends `touched`. For requests of the card, such as an order, the list is empty.
    """
    if "touched" not in posted:
        return []
    return [(name, errors.get(name, "")) for name in (*FIELDS, *LIMIT_FIELDS)]


def _api_data(posted: QueryDict, currency: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the form as fields of the API, and the errors of LIMIT_FIELDS by field."""
    data: dict[str, Any] = {name: posted.get(name, "") for name in FIELDS}
    data["secrets"] = posted.getlist("secrets")
    data["models"] = [model for model in posted.getlist("models") if model]  # a control without a choice sends ""
    limit_errors: dict[str, Any] = {}
    unit_seconds = TIME_UNITS.get(str(posted.get("max_time_unit")), TIME_UNITS["minutes"])
    # By the API's field: the form's control, and the function that parses its text.
    parsers: dict[str, tuple[str, Callable[[str], int]]] = {
        "max_seconds": ("max_time", lambda text: parse_seconds(text, unit_seconds)),
        "ceiling_minor": ("ceiling", lambda text: parse_amount(text, currency)),
    }
    for name, (input_name, parse) in parsers.items():
        text = str(posted.get(input_name, "")).strip()
        try:
            data[name] = parse(text) if text else ""
        except ValueError:
            limit_errors[name] = _("Enter a number or leave the field empty.")
    if (rerun_of := parse_row_id(str(posted.get("rerun_of", "")))) is not None:
        data |= {"rerun_of": rerun_of, "exact": "exact" in posted}
    return data, limit_errors


def _defaults(
    products: list[Product], images: list[Image], workspaces: list[Workspace], specs: list[SpecChoice]
) -> dict[str, Any]:
    """Return the default of each field. `images` are those that a cluster can run.

    The default is two nodes of the first node spec, or one node if its cluster has only one.
    """
    image = default_image(images)
    spec = specs[0] if specs else None
    has_two_nodes = spec is not None and (spec.total is None or spec.total >= 2)
    return {
        "product": products[0].name if products else "",
        "framework": image.frameworks[0] if image else "",
        "image": image.name if image else "",
        "workspace": workspaces[0].name if workspaces else "",
        "code_path": "",
        "arguments": "",
        "requirements": "",
        "environment": "",
        "secrets": [],
        "datasets": "",
        "models": [],
        "from_checkpoint": "",
        "epochs": 5,
        "lr": "0.01",
        "lr_scaling": "none",
        "warmup_epochs": "",
        "batch_size": 64,
        "node_spec": spec.offer.spec.name if spec else "",
        "nodes": 2 if has_two_nodes else 1,
        "workers_per_node": (spec.offer.spec.gpus or 1) if spec else 1,
        **ADVANCED_DEFAULTS,
        "max_time": "",
        "max_time_unit": "minutes",
        "ceiling": "",
        "rerun_of": "",
        "name": "",
        "tags": "",
        "notes": "",
    }


def _rerun_values(job: Job | None) -> dict[str, Any]:
    """Return the values of the form's fields for an earlier job; none without a job."""
    if job is None:
        return {}
    # Older purchases lack newer fields.
    purchase = {"environment": {}, "secrets": []} | purchase_data(job.order.quote.purchase)
    ceiling, max_seconds = purchase.get("ceiling_minor"), purchase.get("max_seconds")
    # A 0 in an advanced field means the default.
    advanced = {name: purchase.get(name) or default for name, default in ADVANCED_DEFAULTS.items()}
    return (
        {name: purchase[name] for name in FIELDS if name not in ADVANCED_DEFAULTS and name in purchase}
        | advanced
        | {
            "arguments": shlex.join(purchase["arguments"]),
            "environment": lines_of(purchase["environment"]),
            "lr_scaling": purchase.get("lr_scaling", "none"),
            "warmup_epochs": purchase.get("warmup_epochs") or "",
            "notes": purchase.get("notes", ""),
            "datasets": ",".join(purchase["datasets"]),
            "models": purchase.get("models", []),
            "from_checkpoint": purchase.get("from_checkpoint") or "",
            "ceiling": f"{to_major(ceiling, job.order.quote.currency):f}" if ceiling else "",
            "max_time": time_text(max_seconds, 60) if max_seconds else "",
            "rerun_of": job.pk,
            "tags": ", ".join(job.tags),
        }
    )


def _earlier_values(job: Job | None) -> dict[str, list[str]]:
    """Return the values of the form's controls for an earlier job, each as a list of texts.

    The page's JavaScript marks the fields that differ from them.
    """
    earlier_values: dict[str, list[str]] = {}
    for name, value in _rerun_values(job).items():
        values = value if isinstance(value, list) else [value]
        if name != "rerun_of":
            earlier_values[name] = [str(part) for part in values if part != ""]
    return earlier_values


def specs_on_offer(currency: str) -> list[SpecChoice]:
    """Return the node specs on offer, each with its free and total nodes."""
    capacities = jobs.capacities_now()
    choices = []
    for offer in billing.offered_specs(currency):
        capacity = capacities.get(resolve_cluster_name(offer.spec.cluster))
        if capacity is None or capacity.elastic:
            choices.append(SpecChoice(offer, free=None, total=None))
            continue
        resources, name = resources_of(offer.spec), offer.spec.name
        free, total = capacity.nodes_now(resources, name), capacity.nodes_ever(resources, name)
        choices.append(SpecChoice(offer, free, total))
    return choices


def _scripts(workspace: Workspace) -> list[str]:
    """Return the paths of a workspace's Python files, breadth first: at most MAX_SCRIPTS, of MAX_FOLDERS folders."""
    root: Path = storage.workspace_folder(workspace)
    scripts: list[str] = []
    folders = [""]
    for folder in itertools.islice(folders, MAX_FOLDERS):  # the loop also visits the folders that it appends
        if len(scripts) >= MAX_SCRIPTS:
            break
        try:
            entries = files.list_folder(root=root, path=folder).entries
        except CustomerError:
            continue  # the folder was deleted or made unreadable since it was listed
        for entry in entries:
            path = posixpath.join(folder, entry.name)
            if entry.kind == Kind.FILE and entry.name.endswith(".py"):
                scripts.append(path)
            elif entry.kind == Kind.FOLDER and not entry.name.startswith(".") and entry.name not in SKIPPED_FOLDERS:
                folders.append(path)
    return scripts[:MAX_SCRIPTS]


def _script_tree(scripts: Iterable[str]) -> ScriptFolder:
    """Return the scripts by folder, folders and scripts sorted by name."""
    folders = {"": ScriptFolder("")}

    def folder_at(path: str) -> ScriptFolder:
        """Return the folder at a path; add it and missing parents to the tree."""
        if path not in folders:
            folders[path] = ScriptFolder(path)
            folder_at(posixpath.dirname(path)).folders.append(folders[path])
        return folders[path]

    for script in sorted(scripts, key=lambda path: path.split("/")):  # name by name: a text sort has `a-b` before `a/`
        folder_at(posixpath.dirname(script)).scripts.append((posixpath.basename(script), script))
    return folders[""]
