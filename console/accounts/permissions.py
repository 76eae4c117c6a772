"""Whether a request may reach a view: an active member whose role has the capability the view asks for.

The one rule: every API view names a capability for each method, and one that names none is refused to everybody.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from rest_framework.permissions import BasePermission
from rest_framework.request import Request
from rest_framework.views import APIView

from console.accounts.models import Membership, Organization
from console.accounts.roles import Capability


class HasCapability(BasePermission):
    """Asks the view's `capabilities` (HTTP method -> Capability) of the request's membership."""

    def has_permission(self, request: Request, view: APIView) -> bool:
        """Whether the member may use this method; HEAD and OPTIONS ask for what GET asks."""
        method = "GET" if request.method in {"HEAD", "OPTIONS"} else request.method
        capability = getattr(view, "capabilities", {}).get(method)
        membership = request_membership(request)
        return bool(capability and membership and membership.allows(capability))


def request_membership(request: Request) -> Membership | None:
    """The membership a request acts with: its token's, or the one chosen in the session."""
    if isinstance(request.auth, object) and hasattr(request.auth, "membership"):
        return request.auth.membership  # type: ignore[no-any-return]  # an ApiToken, by TokenAuthentication
    return getattr(request._request, "membership", None)  # noqa: SLF001  # DRF offers the wrapped request nowhere else


class TenantView(APIView):
    """Base of every API view that acts for an organization."""

    capabilities: ClassVar[Mapping[str, Capability]] = {}

    @property
    def membership(self) -> Membership:
        """Who asks. Only to be used after the permission check, which leaves none without."""
        membership = request_membership(self.request)
        if membership is None:
            raise PermissionError("The permission check let a request without a membership through.")
        return membership

    @property
    def organization(self) -> Organization:
        """Whose objects the request may see."""
        return self.membership.organization
