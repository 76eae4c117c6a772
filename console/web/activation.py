"""Taking up the service, and giving it up."""

from __future__ import annotations

from django import forms
from django.conf import settings
from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_http_methods, require_POST

from console.accounts import selectors
from console.accounts.errors import CustomerError
from console.accounts.roles import Capability
from console.web.access import MemberRequest, member, refuse
from jobs import activation as service
from jobs import selectors as jobs


class TermsForm(forms.Form):
    """The customer's yes."""

    accept_terms = forms.BooleanField(
        label=gettext_lazy("I have read these terms and accept them for my organization."),
        required=False,
    )


@require_http_methods(["GET", "POST"])
@member(Capability.VIEW)
def activation(request: MemberRequest) -> HttpResponse:
    """The terms, and whether the service is active. POST activates."""
    form = TermsForm(request.POST if request.method == "POST" else None)
    if request.method == "POST" and form.is_valid():
        try:
            service.activate(membership=request.membership, accept_terms=form.cleaned_data["accept_terms"])
        except CustomerError as error:
            if error.code == "not_allowed":
                raise
            refuse(form, error)
        else:
            messages.success(request, _("The service is active. Your wallet and a first workspace are ready."))
            return redirect("overview")
    organization = request.membership.organization
    current = selectors.activation(organization=organization)
    return render(
        request,
        "accounts/activation.html",
        {
            "form": form,
            "activation": current,
            "terms_version": settings.TERMS_VERSION,
            "open_jobs": jobs.open_jobs(organization).count() if current and current.is_active else 0,
        },
    )


@require_POST
@member(Capability.MANAGE)
def deactivate(request: MemberRequest) -> HttpResponse:
    """Stop new orders."""
    service.deactivate(membership=request.membership)
    messages.success(request, _("The service takes no new orders now. What runs goes on."))
    return redirect("activation")
