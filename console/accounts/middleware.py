"""Middleware: a check of the query string, the reader's time zone, the request's organization, administrators' factors.

The membership is read at each request, so a removed member loses access at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, cached_property
from operator import attrgetter
from urllib.parse import unquote

from django.conf import settings
from django.core.exceptions import BadRequest
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import redirect
from django.utils import timezone

from console.accounts import second_factors, selectors, services, zones
from console.accounts.models import Membership, User
from console.observability import context

ORGANIZATION_SESSION_KEY = "organization"
"""Session key of the chosen organization's id. A cookie of the same name survives the session."""
COOKIE_SECONDS = 365 * 86400
"""How long a browser remembers the chosen organization after a log-out: a year."""
MONITORING_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})
"""Paths that must be served without a session: reading it needs the database, which may be down."""


class NulByteMiddleware:
    """Refuses NUL bytes in query strings and in paths of `/admin/`, because PostgreSQL rejects that byte.

    Forms, API fields and other paths are checked where they are parsed. The admin would use such a path unchecked.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        """Return a 400, or pass the request on."""
        query = request.META.get("QUERY_STRING", "")
        if "%00" in query or "\0" in query or ("\0" in request.path and request.path.startswith("/admin/")):
            raise BadRequest("The address has a NUL byte.")
        return self.get_response(request)


class TimeZoneMiddleware:
    """Activates the reader's time zone: the chosen one, otherwise the browser's or the installation's."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        """Pass the request on in the reader's time zone."""
        browser_zone = unquote(request.COOKIES.get(zones.COOKIE, ""))
        # `request.user` reads the session. Without the session's cookie nobody is logged in, so skip reading it.
        has_session = settings.SESSION_COOKIE_NAME in request.COOKIES and request.path_info not in MONITORING_PATHS
        user = request.user if has_session else None
        if not isinstance(user, User) or not user.is_authenticated:
            candidates = [browser_zone]
        else:
            if browser_zone:
                services.store_browser_time_zone(user=user, name=browser_zone)
            candidates = [user.time_zone, browser_zone, user.browser_time_zone]
        zone = zones.zone(*candidates)
        if zone == timezone.get_default_timezone():
            return self.get_response(request)
        with timezone.override(zone):
            return self.get_response(request)


class TenantRequest(HttpRequest):
    """A request with its membership; None without a log-in or an organization."""

    @cached_property
    def memberships(self) -> list[Membership]:
        """Return the user's memberships, oldest first. One query, on first use."""
        if not self.user.is_authenticated:
            return []
        # Every page reads them. Python sorts the few rows faster than Django writes an ORDER BY.
        return sorted(selectors.memberships(user=self.user).order_by(), key=attrgetter("pk"))

    @cached_property
    def membership(self) -> Membership | None:
        """Return the membership chosen in this session, or else in the last one (a cookie), or else the oldest."""
        if not self.user.is_authenticated:
            return None
        cookie = self.COOKIES.get(ORGANIZATION_SESSION_KEY, "")
        last_organization_id = int(cookie) if re.fullmatch(r"[0-9]{1,18}", cookie) else None  # no id has more digits
        preferred_id = self.session.get(ORGANIZATION_SESSION_KEY, last_organization_id)
        oldest = next(iter(self.memberships), None)
        matching = (membership for membership in self.memberships if membership.organization_id == preferred_id)
        chosen = next(matching, oldest)
        context.add(user=self.user.pk)
        if chosen:
            context.add(organization=chosen.organization_id)
        return chosen

    @cached_property
    def lacks_second_factor(self) -> bool:
        """Return whether the chosen organization requires a second factor that the person has not set up."""
        return self.membership is not None and second_factors.is_missing(self.membership)


class StaffMiddleware:
    """Redirects administrators who lack a required second factor from `/admin/` to the page where they set one up."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        """Pass the request on."""
        return self.get_response(request)

    def process_view(self, request: HttpRequest, *_view: object) -> HttpResponseBase | None:
        """Return a redirect, or None to continue. Logging out is always possible."""
        match = request.resolver_match
        if match is None or match.app_name != "admin" or match.url_name == "logout":
            return None
        is_missing = isinstance(request.user, User) and second_factors.is_missing_for_staff(request.user)
        return redirect("security") if is_missing else None


class OrganizationMiddleware:
    """Gives every request the attributes of TenantRequest, by replacing the request's class.

    `membership` is read on first use, because health checks and token requests need no session. Django's
    SimpleLazyObject would not do: without a membership it would wrap None, and `request.membership is None` would be
    False.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        """Pass the request on with its membership, and store the choice in a cookie."""
        request.__class__ = _tenant_class(type(request))  # type: ignore[arg-type]  # HttpRequest is hashable
        response = self.get_response(request)
        if request.session.modified and ORGANIZATION_SESSION_KEY in request.session:
            response.set_cookie(
                ORGANIZATION_SESSION_KEY,
                str(request.session[ORGANIZATION_SESSION_KEY]),
                max_age=COOKIE_SECONDS,
                secure=settings.SESSION_COOKIE_SECURE,
                httponly=True,
                samesite="Lax",
            )
        return response


@cache
def _tenant_class(base: type[HttpRequest]) -> type[HttpRequest]:
    """Return a subclass of `base`, such as ASGIRequest, with the attributes of TenantRequest."""
    return type(base.__name__, (base, TenantRequest), {})
