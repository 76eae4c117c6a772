"""Access control of pages, and how errors are shown.

Every view of an organization uses the decorator `member`, which checks a capability. Views in which administrators
read a customer's page use `operator`. Templates only hide actions that the role does not allow; `member` refuses them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec
from urllib.parse import urlsplit

from django import forms
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.http import url_has_allowed_host_and_scheme
from django.views import csrf
from django_htmx.http import HttpResponseClientRedirect
from django_htmx.middleware import HtmxDetails

from console.accounts import second_factors
from console.accounts.models import Membership, User
from console.accounts.roles import Capability
from console.core.errors import CustomerError, NotAllowed, NotFound

Arguments = ParamSpec("Arguments")


class MemberRequest(HttpRequest):
    """A request that `member` has admitted. The class exists for type checkers only."""

    membership: Membership
    htmx: HtmxDetails


View = Callable[Concatenate[Any, Arguments], HttpResponseBase]
"""A view. The type of its request is Any, because views behind `member` take a MemberRequest, others an HttpRequest."""


def require_log_in(view: View[Arguments]) -> View[Arguments]:
    """Require a log-in: Django's `login_required` for views that forms or htmx may call.

    Anonymous users are redirected to the log-in page. After the log-in they get the requested page, or the page with
    the form that they submitted. htmx would insert the log-in page into the current page. So it gets a 401 instead, and
    `app.js` shows that the session ended. For pages that browsers only open, `login_required` is enough.
    """
    login_view = login_required(view)

    @wraps(view)
    def wrapper(request: Any, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> HttpResponseBase:
        if is_htmx(request) and not request.user.is_authenticated:
            return HttpResponse(status=401)
        if request.method == "POST" and not request.user.is_authenticated:
            # The URL of a POST cannot be opened after the log-in.
            return redirect_to_login(_page_of_form(request))
        return login_view(request, *args, **kwargs)

    return wrapper


def _page_of_form(request: HttpRequest) -> str:
    """Return the path of the page that contains the submitted form (Referer); without one, the overview's path."""
    page = request.headers.get("Referer", "")
    is_ours = url_has_allowed_host_and_scheme(page, {request.get_host()}, require_https=request.is_secure())
    return urlsplit(page)._replace(scheme="", netloc="").geturl() if is_ours else reverse("overview")


def csrf_failure(request: HttpRequest, reason: str = "") -> HttpResponseBase:
    """Return the response to a failed CSRF check (CSRF_FAILURE_VIEW).

    htmx gets a 401, as in `require_log_in`: a log-in in another tab has made this page's token invalid.
    """
    return HttpResponse(status=401) if is_htmx(request) else csrf.csrf_failure(request, reason)


RETRY_AFTER_SECONDS = 60
"""The Retry-After of a 429: a minute is the shortest period that a limit of log-in or sign-up has."""


def too_many_requests(request: HttpRequest) -> HttpResponse:
    """Return the response above a limit of log-in or sign-up. allauth calls this as `handler429`."""
    response = render(request, "429.html", status=429)
    response["Retry-After"] = str(RETRY_AFTER_SECONDS)
    return response


def is_htmx(request: HttpRequest) -> bool:
    """Return whether htmx sent the request. Works before django-htmx's middleware has run."""
    return request.headers.get("HX-Request") == "true"


def logged_in_user(request: HttpRequest) -> User:
    """Return the user of a request that `require_log_in` or `login_required` has admitted."""
    assert isinstance(request.user, User)  # noqa: S101  # type checkers cannot know
    return request.user


def member(capability: Capability) -> Callable[[View[Arguments]], View[Arguments]]:
    """Require membership with a role that allows `capability`.

    Anonymous users must log in, and users without an organization must create one. Members who lack a second factor
    that the organization requires are led to the page that sets one up. Members without the capability get 403. The
    services' errors NotAllowed and NotFound become 403 and 404.
    """

    def decorate(view: View[Arguments]) -> View[Arguments]:
        @require_log_in
        @wraps(view)
        def wrapper(request: Any, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> HttpResponseBase:
            if request.membership is None or request.lacks_second_factor:
                page = reverse("organization_new" if request.membership is None else "security")
                return HttpResponseClientRedirect(page) if is_htmx(request) else redirect(page)
            if not request.membership.allows(capability):
                raise PermissionDenied(str(NotAllowed.message))
            try:
                return view(request, *args, **kwargs)
            except NotAllowed as error:
                raise PermissionDenied(str(error.message)) from error
            except NotFound as error:
                raise Http404(str(error.message)) from error
            # Views handle other errors themselves; one that they raise becomes a 500.

        return wrapper

    return decorate


def operator(permission: str) -> Callable[[View[Arguments]], View[Arguments]]:
    """Require an administrator with `permission`, for a page about a customer that is not part of Django's admin.

    Anonymous users must log in. Everybody else gets 404, as for a page that does not exist. Administrators who lack a
    second factor that the installation requires are redirected to *Security*, as from `/admin/`. The view gets a
    request without a membership, even if the administrator has one, so that nothing acts for an organization.
    """

    def decorate(view: View[Arguments]) -> View[Arguments]:
        @require_log_in
        @wraps(view)
        def wrapper(request: Any, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> HttpResponseBase:
            if not (request.user.is_staff and request.user.has_perm(permission)):
                raise Http404
            if second_factors.is_missing_for_staff(request.user):
                return redirect("security")
            request.membership = None
            return view(request, *args, **kwargs)

        return wrapper

    return decorate


def add_errors(form: forms.Form, error: CustomerError) -> None:
    """Add an error to the form fields that it names. If it names no field, show it above the form."""
    for name, message in error.fields.items():
        form.add_error(name if name in form.fields else None, str(message))
    if not error.fields:
        form.add_error(None, str(error.message))


@contextmanager
def errors_in_form(form: forms.Form) -> Iterator[None]:
    """Suppress an error of the block and add it to the form. The code after the block renders the form again."""
    try:
        yield
    except CustomerError as error:
        add_errors(form, error)


@contextmanager
def errors_as_message(request: HttpRequest) -> Iterator[None]:
    """Suppress an error of the block and show it as a message on the next page."""
    try:
        yield
    except CustomerError as error:
        show_error(request, error)


def show_error(request: HttpRequest, error: CustomerError) -> None:
    """Show an error as a message on the next page, for actions without a form."""
    messages.error(request, error_text(error))


def error_text(error: CustomerError) -> str:
    """Return the messages of the fields that an error names, or else its own message."""
    return " ".join(str(message) for message in error.fields.values()) or str(error.message)
