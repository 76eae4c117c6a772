"""Who may see a page, and what a refused act looks like in the browser.

The one rule: every view of an organization goes through `member`, which asks for a capability; templates hide what the
role does not allow, and this refuses it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec

from django import forms
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponseBase
from django.shortcuts import redirect
from django_htmx.middleware import HtmxDetails

from console.accounts.errors import CustomerError, NotAllowed
from console.accounts.models import Membership
from console.accounts.roles import Capability

Arguments = ParamSpec("Arguments")


class MemberRequest(HttpRequest):
    """A request of a signed-in member; for types alone."""

    membership: Membership
    htmx: HtmxDetails


View = Callable[Concatenate[Any, Arguments], HttpResponseBase]


def member(capability: Capability) -> Callable[[View[Arguments]], View[Arguments]]:
    """Let members in whose role allows `capability`.

    Strangers log in, people without an organization make one, other members get 403.
    """

    def decorate(view: View[Arguments]) -> View[Arguments]:
        @login_required
        @wraps(view)
        def guarded(request: Any, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> HttpResponseBase:
            if request.membership is None:
                return redirect("organization_new")
            if not request.membership.allows(capability):
                raise PermissionDenied(str(NotAllowed.message))
            try:
                return view(request, *args, **kwargs)
            except NotAllowed as error:
                raise PermissionDenied(str(error.message)) from error
            except CustomerError as error:
                if error.code == "not_found":
                    raise Http404(str(error.message)) from error
                raise

        return guarded

    return decorate


def refuse(form: forms.Form, error: CustomerError) -> None:
    """Put an error at the fields of a form that it names, and what it does not name above the form."""
    for name, sentence in error.fields.items():
        form.add_error(name if name in form.fields else None, str(sentence))
    if not error.fields:
        form.add_error(None, str(error.message))


def tell(request: HttpRequest, error: CustomerError) -> None:
    """Show an error as a message on the next page, for acts that have no form of their own."""
    sentences = [str(sentence) for sentence in error.fields.values()] or [str(error.message)]
    messages.error(request, " ".join(sentences))
