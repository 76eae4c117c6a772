"""The base class of API views that act for an organization and access only its objects."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any, ClassVar

from django.http import StreamingHttpResponse
from rest_framework.views import APIView

from console.accounts.access import is_still_allowed, request_membership
from console.accounts.models import Membership, Organization
from console.accounts.roles import Capability
from console.core import sse


class TenantView(APIView):
    """Base class of API views that act for an organization."""

    capabilities: ClassVar[Mapping[str, Capability]] = {}
    """The capability that each HTTP method needs. `access.HasCapability`, the default permission class in the settings,
    refuses a method that is missing here."""

    @property
    def membership(self) -> Membership:
        """Return the request's membership. Use it after the permission check, which refuses requests without one.

        Raises Python's PermissionError if a view left out that check: a bug, so it becomes a 500 and no 403.
        """
        membership = request_membership(self.request)
        if membership is None:
            raise PermissionError("The permission check let a request without a membership through.")
        return membership

    @property
    def organization(self) -> Organization:
        """Return the organization whose objects the request may access."""
        return self.membership.organization

    def event_stream(self, events: AsyncIterator[sse.Event | tuple[str, Any]]) -> StreamingHttpResponse:
        """Return a response that streams `events` until they end or the member loses access."""
        return sse.event_stream(events, is_allowed=partial(is_still_allowed, self.request, self.capabilities["GET"]))
