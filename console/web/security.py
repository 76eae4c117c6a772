"""The page of a person's own log-in: password, second factors, sessions, and the access of other services.

Other services are clients of the console's OpenID provider (`console.accounts.openid`).
The forms of second factors are allauth's pages.
"""

from __future__ import annotations

from allauth.idp.oidc.models import Client
from allauth.mfa.models import Authenticator
from allauth.usersessions.adapter import get_adapter
from allauth.usersessions.models import UserSession
from django.conf import settings
from django.contrib import messages
from django.contrib.auth import logout
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils.translation import gettext as _
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_POST

from console.accounts import audit, openid, second_factors, user_agents
from console.web.access import logged_in_user, require_log_in


@never_cache
@require_GET
@login_required
def security(request: HttpRequest) -> HttpResponse:
    """Show the person's ways to log in, their sessions, and the services that may act for them."""
    user = logged_in_user(request)
    factors = list(Authenticator.objects.filter(user=user).order_by("id"))
    sessions = UserSession.objects.purge_and_list(user)
    return render(
        request,
        "accounts/security.html",
        {
            "totp": next((factor for factor in factors if factor.type == Authenticator.Type.TOTP), None),
            "passkeys": [factor for factor in factors if factor.type == Authenticator.Type.WEBAUTHN],
            "unused_codes": second_factors.count_unused_codes(factors),
            "lacks_staff_factor": second_factors.is_missing_for_staff(user),
            "has_providers": bool(settings.OIDC_PROVIDERS or settings.SAML_PROVIDERS),
            "services": openid.clients_of(user),
            "sessions": [
                {"row": session, "browser": user_agents.name(session.user_agent), "is_current": session.is_current()}
                for session in sorted(sessions, key=lambda session: session.created_at, reverse=True)
            ],
        },
    )


@require_POST
@require_log_in
def end_session(request: HttpRequest, pk: int) -> HttpResponse:
    """Log out one session of the person."""
    session = get_object_or_404(UserSession, pk=pk, user=request.user)
    get_adapter().end_sessions([session])
    if session.is_current():
        logout(request)  # this request still holds the ended session, and would save it again
    audit.record_for_person(user=session.user, action="session_ended")
    messages.success(request, _("The session was ended."))
    return redirect("security")


@require_POST
@require_log_in
def end_other_sessions(request: HttpRequest) -> HttpResponse:
    """Log out all other sessions of the person."""
    user = logged_in_user(request)
    sessions = UserSession.objects.filter(user=user)
    get_adapter().end_sessions([session for session in sessions if not session.is_current()])
    audit.record_for_person(user=user, action="session_ended")
    messages.success(request, _("All other sessions were ended."))
    return redirect("security")


@require_POST
@require_log_in
def end_client_access(request: HttpRequest, client_id: str) -> HttpResponse:
    """Revoke another service's access to the account. The person's next log-in to it gives it access again."""
    user = logged_in_user(request)
    service = get_object_or_404(Client, pk=client_id)
    openid.revoke_client_tokens(user=user, client=service)
    audit.record_for_person(user=user, action="client_ended", target=service.name)
    messages.success(request, _("The access was ended."))
    return redirect("security")
