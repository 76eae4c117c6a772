"""Whether a request may reach a view: an active member whose role has the capability the view asks for.

The one rule: every API view names a capability for each method, and one that names none is refused to everybody.
Imports no `rest_framework.views`, which imports this module by the settings; the base of our views is in `permissions`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rest_framework.permissions import BasePermission
from rest_framework.request import Request

from console.accounts.models import Membership

if TYPE_CHECKING:
    from rest_framework.views import APIView


class HasCapability(BasePermission):
    """Asks the view's `capabilities` (HTTP method -> Capability) of the request's membership."""

    def has_permission(self, request: Request, view: APIView) -> bool:
        """Whether the member may use this method; HEAD and OPTIONS ask for what GET asks.

        A method that the view doesn't have is let through to its 405: it would do nothing for anybody.
        """
        membership = request_membership(request)
        if membership is None:
            return False
        method = "GET" if request.method in {"HEAD", "OPTIONS"} else str(request.method)
        capability = getattr(view, "capabilities", {}).get(method)
        if capability is None:
            return not hasattr(view, method.lower())
        return membership.allows(capability)


def request_membership(request: Request) -> Membership | None:
    """The membership a request acts with: its token's, or the one chosen in the session."""
    if isinstance(request.auth, object) and hasattr(request.auth, "membership"):
        return request.auth.membership  # type: ignore[no-any-return]  # an ApiToken, by TokenAuthentication
    return getattr(request._request, "membership", None)  # noqa: SLF001  # DRF offers the wrapped request nowhere else
