"""For which organization a page is asked, and what no request may ask. Hides the session's choice.

The one rule: the membership is read anew at every request, so a member who was removed loses access at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property

from django.core.exceptions import BadRequest
from django.http import HttpRequest, HttpResponseBase

from console.accounts import selectors
from console.accounts.models import Membership
from console.operations import context

SESSION_KEY = "organization"
"""Where the session keeps the id of the organization that the person chose."""


class QueryMiddleware:
    """Refuses a query with a NUL byte: nothing has such a name, and the database can't even be asked for it.

    Forms, paths and the fields of the API refuse it where they are read; queries are read by the admin too.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        """A 400, or what the others make of the request."""
        query = request.META.get("QUERY_STRING", "")
        if "%00" in query or "\0" in query:
            raise BadRequest("The query has a NUL byte in it.")
        return self.get_response(request)


class TenantRequest(HttpRequest):
    """A request that knows its membership: None for a stranger, or for a person without an organization."""

    @cached_property
    def membership(self) -> Membership | None:
        """The chosen membership, or else the first one. One query, at first use."""
        if not self.user.is_authenticated:
            return None
        chosen = selectors.membership_of(user=self.user, preferred_organization_id=self.session.get(SESSION_KEY))
        context.add(user=self.user.pk)
        if chosen:
            context.add(organization=chosen.organization_id)
        return chosen


class OrganizationMiddleware:
    """Gives every request its `membership`.

    The class of the request is widened because an attribute must be lazy (health checks and token requests need no
    session) and yet be None for nobody: a lazy object around None is not None.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        """Pass the request on, widened."""
        request.__class__ = _tenant_class(type(request))  # type: ignore[arg-type]  # HttpRequest is hashable
        return self.get_response(request)


@cache
def _tenant_class(base: type[HttpRequest]) -> type[HttpRequest]:
    return type(base.__name__, (base, TenantRequest), {})
