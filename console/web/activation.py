"""Pages that activate and deactivate the service."""

from __future__ import annotations

from django import forms
from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_http_methods, require_POST

from console.accounts import selectors
from console.accounts.roles import Capability
from console.core.errors import CustomerError
from console.installation import selectors as installation
from console.installation.models import LegalText
from console.web.access import MemberRequest, add_errors, member
from jobs import activation as activation_service
from jobs import selectors as jobs


class TermsForm(forms.Form):
    """The form with the customer's consent."""

    accept_terms = forms.BooleanField(
        label=gettext_lazy("I have read these terms and accept them for my organization."),
        required=False,  # `jobs.activation`, which the API calls too, refuses a missing consent
    )


@require_http_methods(["GET", "POST"])
@member(Capability.VIEW)
def activation(request: MemberRequest) -> HttpResponse:
    """Show the terms, and whether the service is active. POST activates it; `jobs.activation` checks the role."""
    form = TermsForm(request.POST if request.method == "POST" else None)
    if form.is_valid():
        try:
            activation_service.activate(membership=request.membership, accept_terms=form.cleaned_data["accept_terms"])
        except CustomerError as error:
            if error.code == "not_allowed":  # `member` turns it into a 403
                raise
            add_errors(form, error)
        else:
            messages.success(request, _("The service is active. Your wallet and a first workspace are ready."))
            return redirect("overview")
    organization = request.membership.organization
    current_activation = selectors.activation(organization=organization)
    is_active = current_activation is not None and current_activation.is_active
    return render(
        request,
        "accounts/activation.html",
        {
            "form": form,
            "activation": current_activation,
            "terms": installation.current_text(LegalText.Kinds.TERMS),
            "terms_version": installation.terms_version(),
            "open_jobs": jobs.open_jobs(organization).count() if is_active else 0,
        },
    )


@require_POST
@member(Capability.MANAGE)
def deactivate(request: MemberRequest) -> HttpResponse:
    """Deactivate the service: it accepts no new orders."""
    activation_service.deactivate(membership=request.membership)
    messages.success(request, _("The service is deactivated. Queued and running jobs continue."))
    return redirect("activation")
