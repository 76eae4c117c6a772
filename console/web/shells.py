"""The page with a terminal in a job's node, and the view that admits its websocket (`console.serving.shells`)."""

from __future__ import annotations

from csp.constants import NONE, SELF, UNSAFE_INLINE
from csp.decorators import csp_replace
from django.conf import settings
from django.http import HttpRequest, HttpResponse, HttpResponseNotFound
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET

from console.accounts.access import membership_of_session
from console.accounts.models import Membership, Organization, User
from console.accounts.roles import Capability
from console.accounts.services import record_audit_event
from console.core.errors import NotFound
from console.serving.exchange import AdmittedShell, ShellEnd, exchange_of
from console.web.access import MemberRequest, member
from jobs import selectors, shells
from jobs.models import Job

POLICY = {
    "default-src": [NONE],
    "script-src": [SELF],
    # xterm.js writes the theme's colors and the size of a character into <style> elements.
    "style-src": [SELF, UNSAFE_INLINE],
    "img-src": [SELF, "data:"],
    "font-src": [SELF],
    # Some browsers do not count websockets among 'self'.
    "connect-src": [SELF, settings.TRAINYARD_URL.replace("http", "ws", 1)],
    "form-action": [SELF],
    "base-uri": [NONE],
    "frame-ancestors": [NONE],
}
"""The policy of the terminal's page, which shows text that customers' code decides."""


@never_cache
@csp_replace(POLICY)  # type: ignore[arg-type]  # its type knows views without arguments only
@require_GET
@member(Capability.RUN)
def job_shell(request: MemberRequest, pk: int, node: int) -> HttpResponse:
    """Show a terminal that opens a shell in a node, or the reason why none can be opened."""
    job = selectors.job_for(request.membership.organization, pk)
    if node >= job.nodes:
        raise NotFound
    context = {"job": job, "title": selectors.title_of(job), "node": node, "problem": shells.problem(job, node)}
    return render(request, "jobs/shell.html", context)


@never_cache
@require_GET
def admit(request: HttpRequest) -> HttpResponse:
    """Decide whether a shell may be open, and write its opening and end to the audit log.

    The server asks this view before it opens a shell, again once the node has answered (`is_new`), and every few
    seconds while the shell is open. Last it reports the end. Each question is in an `Exchange`. Only the server can
    put an Exchange into a request, so a browser that calls this view gets 404.

    The status is 403 if the person may not open shells, and 409 if no shell can be opened in the node now.
    """
    exchange = exchange_of(request)
    shell_request = exchange.shell if exchange else None
    if exchange is None or shell_request is None:
        return HttpResponseNotFound()
    if shell_request.end is not None:
        _record_end(shell_request.job_id, shell_request.node, shell_request.end)
        return HttpResponse()
    membership = _find_membership(request.session.session_key or "", shell_request.job_id)
    if membership is None:
        return HttpResponse(status=403)
    job = selectors.job_without_relations(membership.organization, shell_request.job_id)
    address = shells.address_of(job, shell_request.node)
    if address is None:
        return HttpResponse(status=409)
    if shell_request.is_new:
        data = {"node": shell_request.node}
        record_audit_event(
            organization=job.organization,
            actor=membership.user,
            action="shell.opened",
            target=f"job:{job.pk}",
            data=data,
        )
    exchange.admitted_shell = AdmittedShell(address, membership.organization_id, membership.user_id)
    return HttpResponse()


def _find_membership(session_key: str, job_pk: int) -> Membership | None:
    """Return the membership by which the session may open shells in a job's nodes."""
    organization_id = Job.objects.filter(pk=job_pk).values_list("organization_id", flat=True).first()
    if organization_id is None:
        return None
    membership = membership_of_session(session_key, organization_id=organization_id)
    return membership if membership is not None and membership.allows(Capability.RUN) else None


def _record_end(job_pk: int, node: int, end: ShellEnd) -> None:
    """Write the end of a shell to the audit log. Organization and user may have been deleted while it was open."""
    organization = Organization.objects.filter(pk=end.shell.organization_id).first()
    if organization is None:
        return
    record_audit_event(
        organization=organization,
        actor=User.objects.filter(pk=end.shell.user_id).first(),
        action="shell.closed",
        target=f"job:{job_pk}",
        data={"node": node, "why": end.reason, "seconds": end.seconds},
    )
