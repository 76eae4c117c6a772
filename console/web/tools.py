"""TensorBoard: opened from pages of jobs, and served below `/tools/` by `console.serving.proxy`."""

from __future__ import annotations

import re
from typing import Any

from django.http import HttpResponse, HttpResponseForbidden
from django.shortcuts import redirect
from django.utils.translation import gettext_lazy as _
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_http_methods, require_POST

from console.accounts.roles import Capability
from console.core.errors import CustomerError, NotFound
from console.serving.exchange import Upstream, exchange_of
from console.web.access import MemberRequest, member, show_error
from console.web.amounts import parse_row_id
from jobs import selectors, tensorboards
from jobs.models import Job

_UNSAFE_PATH = re.compile(rb"[^!-~]|%(?:2f|5c|00|2e)|//|\\|(?:^|/)\.\.?(?:/|$)", re.IGNORECASE)
"""Matches paths that a tool may interpret differently from the console: with bytes that should be encoded, with encoded
slashes, backslashes, NUL or dots, with backslashes, empty segments, `.` or `..`."""


@require_POST
@member(Capability.VIEW)
def job_tensorboard(request: MemberRequest, pk: int) -> HttpResponse:
    """Open TensorBoard on a job."""
    job = selectors.job_without_relations(request.membership.organization, pk)
    return _open_tensorboard(request, [job], "job_detail", pk)


@require_POST
@member(Capability.VIEW)
def jobs_tensorboard(request: MemberRequest) -> HttpResponse:
    """Open TensorBoard on the selected jobs. Jobs of other organizations are ignored."""
    # One job more than allowed, so that `open_session` refuses a selection that is too large.
    selected_pks = [pk for pk in map(parse_row_id, request.POST.getlist("job")[: tensorboards.MAX_JOBS + 1]) if pk]
    jobs = Job.objects.filter(organization=request.membership.organization, pk__in=selected_pks).order_by("pk")
    return _open_tensorboard(request, list(jobs), "job_list")


@csrf_exempt  # a tool's pages have no CSRF token, so `_is_cross_site` refuses requests of other sites
@require_http_methods(["GET", "HEAD", "POST"])
@member(Capability.VIEW)
def tool(request: MemberRequest, key: str, rest: str) -> HttpResponse:
    """Let the server forward the request to the TensorBoard with this key, if the member opened it.

    The view writes the address into the request's `Exchange`, from which the server reads it.
    """
    session = tensorboards.find_session(membership=request.membership, key=key)
    if session is None:
        raise NotFound(_("This TensorBoard has ended. Open it again from the page of the job."))
    exchange = exchange_of(request)
    scope: dict[str, Any] = getattr(request, "scope", None) or {}
    if exchange is None or _UNSAFE_PATH.search(scope["raw_path"]) or not scope["query_string"].isascii():
        raise NotFound
    if request.method == "POST" and _is_cross_site(request):
        return HttpResponseForbidden()
    session.mark_used()
    root = request.build_absolute_uri(f"{tensorboards.url_path(key)}/")  # the URL of TensorBoard's own page
    exchange.upstream = Upstream(session.socket, root)
    return HttpResponse()  # the server sends the tool's response instead


def _is_cross_site(request: MemberRequest) -> bool:
    """Return whether another site's page sent the request. Every supported browser sends the header."""
    return request.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin"


def _open_tensorboard(request: MemberRequest, jobs: list[Job], error_page: str, *arguments: Any) -> HttpResponse:
    """Redirect to a new TensorBoard on the jobs, or after an error to `error_page`, which shows the error."""
    try:
        return redirect(tensorboards.open_session(membership=request.membership, jobs=jobs))
    except CustomerError as error:
        show_error(request, error)
        return redirect(error_page, *arguments)
