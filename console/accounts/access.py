"""Access control of API views: the request's membership must have the capability that the view names for its method.

A view that names no capability refuses everyone. This module must not import `rest_framework.views`: that module
imports this one, by DEFAULT_PERMISSION_CLASSES. Therefore the base class of views is in `permissions`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from django.conf import settings
from django.contrib.auth import get_user
from django.http import HttpRequest
from rest_framework.permissions import BasePermission
from rest_framework.request import Request

from console.accounts import second_factors, selectors
from console.accounts.authentication import ClientAccess
from console.accounts.models import ApiToken, Membership, User
from console.accounts.roles import Capability
from console.core.errors import SecondFactorRequired

if TYPE_CHECKING:
    from rest_framework.views import APIView


class HasCapability(BasePermission):
    """Checks the view's `capabilities` (HTTP method to Capability) against the request's membership."""

    def has_permission(self, request: Request, view: APIView) -> bool:
        """Return whether the member may use this method; HEAD and OPTIONS need the capability of GET.

        A method that the view does not implement is allowed here, so that DRF answers with 405.
        Raises SecondFactorRequired, for sessions and tokens alike, but not for service accounts.
        """
        membership = request_membership(request)
        if membership is None:
            return False
        method = "GET" if request.method in {"HEAD", "OPTIONS"} else str(request.method)
        capability = getattr(view, "capabilities", {}).get(method)
        if capability is None:
            return not hasattr(view, method.lower())
        if second_factors.is_missing(membership):
            raise SecondFactorRequired
        return membership.allows(capability)


def request_membership(request: Request) -> Membership | None:
    """Return the request's membership: its token's, or the one chosen in the session."""
    if isinstance(request.auth, ApiToken | ClientAccess):
        return request.auth.membership
    return getattr(request._request, "membership", None)  # noqa: SLF001  # DRF offers the wrapped request nowhere else


def is_still_allowed(request: Request, capability: Capability) -> bool:
    """Return whether a request that was allowed when it began still has `capability`; reads the database.

    Return False if the API token was revoked or has expired, if the session has ended, or if the password was changed.
    Return False too if the member was removed, was deactivated, lacks a second factor that became required, or has a
    new role without the capability. Requests of OpenID clients are not handled, because their views stream nothing.
    """
    membership = request_membership(request)
    if membership is None:
        return False
    if isinstance(request.auth, ApiToken):
        if not selectors.valid_tokens().filter(pk=request.auth.pk).exists():
            return False
    elif not _is_session_valid(request._request):  # noqa: SLF001  # as above
        return False
    usable = selectors.usable_memberships().select_related("organization", "user")
    current = usable.filter(pk=membership.pk).first()
    if current is None or second_factors.is_missing(current):
        return False
    current.scopes = membership.scopes  # the token's limits, which are not stored with the membership
    return current.allows(capability)


def membership_of_session(session_key: str, *, organization_id: int) -> Membership | None:
    """Return the membership in this organization of the user who is logged in with this session.

    None after a log-out or a changed password, if the user is not an active member, or if the user lacks a second
    factor that the organization requires.
    """
    user = user_of_session(session_key)
    usable = selectors.usable_memberships().select_related("organization", "user")
    membership = usable.filter(user=user.pk, organization=organization_id).first() if user else None
    return None if membership is None or second_factors.is_missing(membership) else membership


def user_of_session(session_key: str) -> User | None:
    """Return the user to whom a stored session belongs, if it is still valid."""
    request = HttpRequest()
    request.session = import_module(settings.SESSION_ENGINE).SessionStore(session_key)
    user = get_user(request)
    return user if isinstance(user, User) else None


def _is_session_valid(request: HttpRequest) -> bool:
    """Return whether the stored session still belongs to the request's user."""
    return user_of_session(request.session.session_key or "") == request.user
