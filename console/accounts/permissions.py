"""The base of every API view that acts for an organization. The one rule: it sees that organization alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from rest_framework.views import APIView

from console.accounts.access import HasCapability, request_membership
from console.accounts.models import Membership, Organization
from console.accounts.roles import Capability

__all__ = ["HasCapability", "TenantView", "request_membership"]


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
