"""Pages of notebooks: the list, the form with its live quote, and the way into JupyterLab.

A notebook is served on a host name of its own (`console.serving.notebooks`), to which browsers send no cookie of the
console. So `notebook_open` sends the browser there with a ticket, and `admit` replaces the ticket by a cookie of that
host.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qs, urlencode

from django.contrib import messages
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse, HttpResponseNotFound, QueryDict
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_POST
from django_htmx.http import HttpResponseClientRedirect

from billing import selectors as billing
from billing.errors import BudgetExceeded, InsufficientFunds
from billing.models import Quote
from billing.quotes import quote_for
from console.accounts.access import membership_of_session
from console.accounts.models import Organization
from console.accounts.roles import Capability
from console.accounts.services import is_active, record_audit_event
from console.core import encryption
from console.core.errors import CustomerError, InvalidInput, NotFound
from console.serving.exchange import exchange_of
from console.serving.notebooks import COOKIE, origin_of
from console.web.access import MemberRequest, error_text, member
from console.web.amounts import parse_row_id, parse_seconds, time_text
from console.web.quote_cards import currency_of, posted_ceiling, posted_key, quote_card, refused_card
from console.web.training import specs_on_offer
from jobs import inspection, notebooks, rows, selectors
from jobs.errors import NotExtensible, QuotaExceeded
from jobs.images import default_image, problems
from jobs.inspection import NotInspectable
from jobs.models import NOTEBOOK_SCRIPT, Job
from jobs.purchase import DEFAULT_IDLE_SECONDS, DEFAULT_NOTEBOOK_SECONDS, EXTENSION_MARK
from jobs.results import INSPECTED_JOB
from jobs.run_specs import mounted_dataset_versions
from jobs.states import JobState
from storage import selectors as storage
from storage import sharing
from storage.models import DatasetVersion

PAGE_SIZE = 25
"""How many notebooks one page shows."""
EXTENSION_HOURS = 2
"""By how many hours the form extends a notebook unless the customer changes it."""
FIELDS = (
    "name", "workspace", "image", "node_spec", "datasets", "requirements", "inspected_job", "max_seconds",
    "idle_seconds", "ceiling_minor",
)  # fmt: skip
"""The API's fields whose errors the form of a new notebook shows beside its controls."""
EXTENSION_FIELDS = ("added_seconds",)
"""The API's fields whose errors the form that extends a notebook shows."""
ENTER_PATH = "/trainyard-enter"
"""The path on a notebook's host that takes the ticket."""
TICKET_SECONDS = 60
"""How long a ticket is valid. The redirect that carries it takes less than a second; 60 leaves room for a slow line."""
COOKIE_SECONDS = 14 * 24 * 3600
"""How long the cookie of a notebook's host is valid: as long as a session of the console (SESSION_COOKIE_AGE). `admit`
refuses the cookie earlier if the session has ended."""
TICKET_PURPOSE, COOKIE_PURPOSE = b"trainyard notebook ticket", b"trainyard notebook pass"
"""The purposes for which `console.core.encryption` encrypts. A text can be decrypted for its own purpose only, so a
ticket from a URL is refused as a cookie, and a cookie as a ticket."""


@dataclass(frozen=True)
class DatasetChoice:
    """A dataset in the form: the version that the notebook gets if the dataset is chosen, and whether it is chosen."""

    name: str
    version: DatasetVersion
    is_chosen: bool
    is_pinned: bool
    """Whether the notebook gets this version even if a newer one is published before the purchase."""


@require_GET
@member(Capability.VIEW)
def notebook_list(request: MemberRequest) -> HttpResponse:
    """List the notebooks, newest first. While one is open, htmx requests the rows again and again."""
    listed = rows.queryset(request.membership.organization).filter(builtin_script=NOTEBOOK_SCRIPT)
    page = Paginator(listed.only(*rows.FIELDS, "finished_at"), PAGE_SIZE).get_page(request.GET.get("page"))
    context = {
        "page": page,
        "rows": [rows.row(job) for job in page],
        "has_open": any(not job.is_ended for job in page),
        "is_offered": notebooks.is_offered(),
    }
    return render(request, "jobs/_notebook_rows.html" if request.htmx else "jobs/notebook_list.html", context)


@require_GET
@member(Capability.RUN)
def notebook_new(request: MemberRequest) -> HttpResponse:
    """Show the form.

    `?workspace=` chooses one. `?again=<job>` fills the form in from an earlier notebook, `?job=<job>` from a training
    whose files the notebook is to read.
    """
    organization = request.membership.organization
    account = billing.wallet(organization)
    if account is None or not is_active(organization):
        return render(request, "jobs/training_inactive.html", {"heading": _("New notebook")})
    images = list(storage.images_for(organization))
    not_ready = problems(images)
    image = default_image([candidate for candidate in images if candidate.pk not in not_ready])
    specs = specs_on_offer(account.currency)
    workspaces = list(storage.workspaces_for(organization))
    values = {
        "name": "",
        "workspace": request.GET.get("workspace") or (workspaces[0].name if workspaces else ""),
        "image": image.name if image else "",
        "node_spec": specs[0].offer.spec.name if specs else "",
        "requirements": "",
        "inspected_job": "",
        "hours": DEFAULT_NOTEBOOK_SECONDS // 3600,
        "idle_minutes": DEFAULT_IDLE_SECONDS // 60,
    }
    versions: dict[str, DatasetVersion | None] = {}  # of the chosen datasets, by their names; None: the latest
    inspected_job = None
    if (pk := parse_row_id(request.GET.get("again", ""))) is not None:
        notebook = notebooks.notebook_for(organization, pk)
        values |= _form_values_of_notebook(notebook)
        # The purchase names datasets as "name@version". The new notebook gets the latest versions, so none is pinned.
        versions = dict.fromkeys(dataset.partition("@")[0] for dataset in notebook.order.quote.purchase["datasets"])
    elif (pk := parse_row_id(request.GET.get("job", ""))) is not None:
        inspected_job = selectors.job_for(organization, pk)
        values |= _form_values_to_inspect(inspected_job)
        versions = {version.dataset.name: version for version in mounted_dataset_versions(inspected_job)}
    context = {
        "values": values,
        "inspected_job": inspected_job,
        "images": images,
        "not_ready": not_ready,
        "workspace_choices": [(each.name, each.name) for each in workspaces],
        "specs": specs,
        "datasets": _dataset_choices(organization, versions),
        "currency": account.currency,
        "is_offered": notebooks.is_offered(),
    }
    return render(request, "jobs/notebook_new.html", context)


@require_POST
@member(Capability.RUN)
def notebook_quote(request: MemberRequest) -> HttpResponse:
    """Return the quote card for the form's values, or their errors."""
    try:
        data = _api_data(request.POST, currency_of(request.membership.organization))
        quote = notebooks.quote_notebook(membership=request.membership, data=data)
    except CustomerError as error:
        return refused_card(request, error, FIELDS)
    return _quote_card(request, quote)


@require_GET
@member(Capability.RUN)
def notebook_extend(request: MemberRequest, pk: int) -> HttpResponse:
    """Show the form for more time."""
    job = notebooks.notebook_for(request.membership.organization, pk)
    if job.state != JobState.RUNNING:
        messages.info(request, NotExtensible.message)
        return redirect("job_detail", pk)
    return render(request, "jobs/notebook_extend.html", {"job": job, "hours": EXTENSION_HOURS})


@require_POST
@member(Capability.RUN)
def notebook_extend_quote(request: MemberRequest, pk: int) -> HttpResponse:
    """Return the quote card for more time, or the errors."""
    job = notebooks.notebook_for(request.membership.organization, pk)
    try:
        data = _parse_times(request.POST, {"added_seconds": ("hours", 3600)})
        quote = notebooks.quote_extension(membership=request.membership, job=job, data=data)
    except CustomerError as error:
        return refused_card(request, error, EXTENSION_FIELDS)
    return _quote_card(request, quote)


@require_POST
@member(Capability.RUN)
def notebook_order(request: MemberRequest) -> HttpResponse:
    """Buy the displayed quote, of a new notebook or of more time. Submitting it twice buys once."""
    quote = quote_for(organization=request.membership.organization, quote_id=request.POST.get("quote", ""))
    try:
        order = notebooks.place_notebook(
            membership=request.membership, quote=quote, idempotency_key=posted_key(request.POST)
        )
    except (InsufficientFunds, BudgetExceeded, QuotaExceeded) as error:  # the quote stays valid and can be bought later
        return _quote_card(request, quote, problem=str(error.message))
    except CustomerError as error:
        return _quote_card(request, quote, problem=error_text(error), stale=True)
    if EXTENSION_MARK in quote.purchase:
        messages.success(request, _("The notebook has more time. The added amount is held in your wallet."))
    else:
        messages.success(request, _("The notebook starts. Its ceiling is held in your wallet."))
    return HttpResponseClientRedirect(reverse("job_detail", args=[order.job.pk]))


@never_cache
@require_GET
@member(Capability.VIEW)  # in the chosen organization; `_notebook_of_session` requires RUN in the notebook's
def notebook_open(request: MemberRequest, pk: int) -> HttpResponse:
    """Send the browser to the notebook's own host, with a ticket.

    The notebook may belong to another of the person's organizations than the chosen one, because the link may come from
    another service (`deploy/jupyterhub`).
    """
    job = _notebook_of_session(request.session.session_key or "", pk)
    if job is None:
        raise NotFound
    if notebooks.socket_of(job) is None:
        messages.info(request, _("This notebook does not run now."))
        is_shown = job.organization_id == request.membership.organization_id  # pages show only the chosen organization
        return redirect("job_detail", pk) if is_shown else redirect("overview")
    record_audit_event(
        organization=job.organization, actor=request.membership.user, action="notebook.opened", target=f"job:{job.pk}"
    )
    ticket = _seal(job.pk, request.session.session_key or "", seconds=TICKET_SECONDS, purpose=TICKET_PURPOSE)
    response = redirect(f"{origin_of(job.pk)}{ENTER_PATH}?{urlencode({'ticket': ticket})}")
    response["Referrer-Policy"] = "no-referrer"  # customers' code on that host never sees addresses of the console
    return response


@never_cache
@require_GET
def admit(request: HttpRequest) -> HttpResponse:
    """Decide whether the server forwards a request to a notebook.

    The server passes the request in an `Exchange`. This view writes the notebook's socket into the Exchange, and
    the server forwards the request to this socket. Only the server can put an Exchange into a request, so a browser
    that calls this view gets 404.
    """
    exchange = exchange_of(request)
    notebook_request = exchange.notebook if exchange else None
    if exchange is None or notebook_request is None:
        return HttpResponseNotFound()
    if notebook_request.path == ENTER_PATH:
        ticket = parse_qs(notebook_request.query).get("ticket", [""])[0]
        session_key = _unseal(ticket, notebook_request.job_id, purpose=TICKET_PURPOSE)
        if session_key is None or _notebook_of_session(session_key, notebook_request.job_id) is None:
            return _refuse(request, notebook_request.job_id)
        # `/lab` is JupyterLab's page on the notebook's host.
        response = HttpResponse(status=303, headers={"Location": "/lab", "Referrer-Policy": "no-referrer"})
        response.set_cookie(
            COOKIE,
            _seal(notebook_request.job_id, session_key, seconds=COOKIE_SECONDS, purpose=COOKIE_PURPOSE),
            secure=COOKIE.startswith("__Host-"),  # it has this prefix if the console is served over HTTPS
            httponly=True,
            samesite="Lax",
        )
        return response
    session_key = _unseal(request.COOKIES.get(COOKIE, ""), notebook_request.job_id, purpose=COOKIE_PURPOSE)
    job = None if session_key is None else _notebook_of_session(session_key, notebook_request.job_id)
    exchange.notebook_socket = notebooks.socket_of(job) if job else None
    return HttpResponse() if exchange.notebook_socket else _refuse(request, notebook_request.job_id)


def _refuse(request: HttpRequest, pk: int) -> HttpResponse:
    """Return the page for a browser that may not use the notebook, or whose notebook has ended.

    The page does not say which of the two is the case. It uses no file of the console, because it is shown on the
    notebook's host.
    """
    # The server calls `admit` with the console's host name, so this is an address of the console.
    address = request.build_absolute_uri(reverse("job_detail", args=[pk]))
    return render(request, "jobs/notebook_closed.html", {"address": address}, status=403)


def _notebook_of_session(session_key: str, pk: int) -> Job | None:
    """Return the notebook if the session belongs to a member who may use it."""
    notebook = Job.objects.filter(pk=pk, builtin_script=NOTEBOOK_SCRIPT)
    organization_id = notebook.values_list("organization_id", flat=True).first()
    if organization_id is None:
        return None
    membership = membership_of_session(session_key, organization_id=organization_id)
    if membership is None or not membership.allows(Capability.RUN):
        return None
    return selectors.job_without_relations(membership.organization, pk)


def _seal(pk: int, session_key: str, *, seconds: int, purpose: bytes) -> str:
    """Return an encrypted text from which `_unseal` reads the key of a session, for `seconds`."""
    data = {"job": pk, "session": session_key, "until": time.time() + seconds}
    return encryption.encrypt(json.dumps(data), purpose=purpose).decode()


def _unseal(text: str, pk: int, *, purpose: bytes) -> str | None:
    """Return the session key in a text of `_seal`. None if the text is for another notebook, expired or forged."""
    data = encryption.decrypt(text.encode(), purpose=purpose) if text.isascii() else None
    sealed = json.loads(data) if data else {}
    return str(sealed["session"]) if sealed.get("job") == pk and time.time() < sealed["until"] else None


def _dataset_choices(organization: Organization, versions: Mapping[str, DatasetVersion | None]) -> list[DatasetChoice]:
    """Return the datasets to choose from. Those in `versions` are chosen, in this version or else the latest one."""
    choices = []
    for dataset in sharing.datasets_to_choose(organization):
        pinned = versions.get(dataset.name)
        if version := pinned or dataset.latest:
            choices.append(DatasetChoice(dataset.name, version, dataset.name in versions, pinned is not None))
    return choices


def _form_values_to_inspect(job: Job) -> dict[str, object]:
    """Return the values of the form's fields for a new notebook that reads a job's files in addition to its own."""
    attempt = job.attempts.last()
    try:
        inspection.find_job(organization=job.organization, pk=job.pk, cluster_name=attempt.backend if attempt else "")
        inspected: int | str = job.pk
    except NotInspectable:  # the job has no files or has not ended: the form still takes its other choices
        inspected = ""
    return {
        "workspace": job.workspace.name,
        "image": job.image.name,
        "node_spec": job.node_spec.name,
        "requirements": job.requirements_path,
        "inspected_job": inspected,
    }


def _form_values_of_notebook(job: Job) -> dict[str, object]:
    """Return the values of the form's fields with which an earlier notebook was bought."""
    purchase = job.order.quote.purchase
    return {name: purchase[name] for name in ("name", "workspace", "image", "node_spec")} | {
        "requirements": purchase.get("requirements", ""),
        "inspected_job": purchase.get(INSPECTED_JOB) or "",
        "hours": time_text(purchase["max_seconds"], 3600),
        "idle_minutes": time_text(purchase["idle_seconds"], 60),
    }


def _api_data(posted: QueryDict, currency: str) -> dict[str, object]:
    """Return the API's fields of a posted form. Raises InvalidInput."""
    seconds = _parse_times(posted, {"max_seconds": ("hours", 3600), "idle_seconds": ("idle_minutes", 60)})
    fields = ("name", "workspace", "image", "node_spec", "requirements", "inspected_job")
    chosen = {name: posted.get(name, "") for name in fields}
    return chosen | seconds | {"datasets": posted.getlist("datasets")} | posted_ceiling(posted, currency)


def _parse_times(posted: QueryDict, controls: Mapping[str, tuple[str, int]]) -> dict[str, int]:
    """Return the form's times in seconds by API name. Raises InvalidInput.

    `controls` maps each API name to the name of its form control, and to the seconds in one unit of that control.
    """
    errors, seconds = {}, {}
    for name, (control, unit) in controls.items():
        try:
            seconds[name] = parse_seconds(posted.get(control, ""), unit)
        except ValueError:
            errors[name] = _("Enter a number above 0.")
    if errors:
        raise InvalidInput(fields=errors)
    return seconds


def _quote_card(request: MemberRequest, quote: Quote, *, problem: str = "", stale: bool = False) -> HttpResponse:
    """Render the card of a quote for a new notebook or for more time."""
    is_extension = EXTENSION_MARK in quote.purchase
    return quote_card(
        request,
        quote,
        template="jobs/_notebook_extension_quote.html" if is_extension else "jobs/_notebook_quote.html",
        order_url=reverse("notebook_order"),
        fields=EXTENSION_FIELDS if is_extension else FIELDS,
        problem=problem,
        stale=stale,
    )
