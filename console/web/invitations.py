"""Pages for invited people.

The link alone is enough to view and to decline an invitation. Accepting it needs an account with the invited address.
"""

from __future__ import annotations

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_POST

from console.accounts import invitations, selectors
from console.accounts.middleware import ORGANIZATION_SESSION_KEY
from console.accounts.models import User
from console.core.errors import CustomerError
from console.web.access import logged_in_user, require_log_in, show_error


@never_cache
@require_GET
def invitation(request: HttpRequest, token: str) -> HttpResponse:
    """Show the invitation with the possible actions: accept, log in, sign up or decline."""
    pending = invitations.find(token)
    if pending is None:
        return render(request, "accounts/invitation_ended.html", status=404)
    context = {
        "invitation": pending,
        "token": token,
        "has_account": selectors.has_account(email=pending.email),
        "is_for_me": isinstance(request.user, User) and request.user.email.lower() == pending.email,
    }
    return render(request, "accounts/invitation.html", context)


@require_POST
@require_log_in
def accept(request: HttpRequest, token: str) -> HttpResponse:
    """Accept the invitation and switch to the organization.

    `invitations.accept` refuses a user with another address.
    """
    pending = invitations.find(token)
    if pending is None:
        return render(request, "accounts/invitation_ended.html", status=404)
    try:
        membership = invitations.accept(invitation=pending, user=logged_in_user(request))
    except CustomerError as error:
        show_error(request, error)
        return redirect("invitation", token)
    request.session[ORGANIZATION_SESSION_KEY] = membership.organization_id
    messages.success(
        request, _("You are now a member of %(organization)s.") % {"organization": membership.organization}
    )
    return redirect("overview")


@require_POST
def decline(request: HttpRequest, token: str) -> HttpResponse:
    """Decline the invitation. The link is enough: no account is needed."""
    pending = invitations.find(token)
    if pending is not None:  # an invitation that has ended needs no decline
        # The audit log names the user only if the invitation was sent to their address.
        user = request.user if isinstance(request.user, User) else None
        actor = user if user and user.email.lower() == pending.email else None
        invitations.decline(invitation=pending, actor=actor)
        messages.success(request, _("The invitation was declined."))
    return redirect("overview")
