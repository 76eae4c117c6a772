"""Pages of the organization's service accounts and their tokens."""

from __future__ import annotations

from django import forms
from django.contrib import messages
from django.db.models import Count, Q
from django.http import HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from console.accounts import selectors, service_accounts, services
from console.accounts.models import Membership, ServiceAccount
from console.accounts.roles import Capability
from console.web.access import MemberRequest, errors_in_form, member
from console.web.organization import TokenForm


class AccountForm(forms.Form):
    """The form of a service account."""

    name = forms.CharField(
        label=gettext_lazy("Name"), max_length=40, help_text=gettext_lazy("Small letters, digits and dashes.")
    )
    role = forms.ChoiceField(
        label=gettext_lazy("Role"),
        choices=[(value, label) for value, label in Membership.Roles.choices if value in service_accounts.ROLES],
        initial=Membership.Roles.MEMBER,
    )


def _account_or_404(request: MemberRequest, pk: int) -> ServiceAccount:
    """Return a service account of the organization. Raises Http404."""
    return get_object_or_404(selectors.service_accounts(organization=request.membership.organization), pk=pk)


@require_http_methods(["GET", "POST"])
@member(Capability.MANAGE)
def account_list(request: MemberRequest) -> HttpResponse:
    """List the service accounts. POST creates one."""
    form = AccountForm(request.POST if request.method == "POST" else None)
    if form.is_valid():
        with errors_in_form(form):
            account = service_accounts.create(actor=request.membership, **form.cleaned_data)
            messages.success(request, _("The service account was created. Create its first token."))
            return redirect("organization_service_account", account.pk)
    rows = selectors.service_accounts(organization=request.membership.organization)
    accounts = rows.annotate(token_count=Count("membership__tokens", filter=Q(membership__tokens__revoked_at=None)))
    return render(request, "accounts/service_account_list.html", {"accounts": accounts, "form": form})


@never_cache
@require_http_methods(["GET", "POST"])
@member(Capability.MANAGE)
def account(request: MemberRequest, pk: int) -> HttpResponse:
    """Show a service account. POST creates a token and shows its secret once."""
    row = _account_or_404(request, pk)
    form, secret = TokenForm(row.membership, request.POST if request.method == "POST" else None), ""
    if form.is_valid():
        with errors_in_form(form):
            _token, secret = service_accounts.create_token(account=row, actor=request.membership, **form.cleaned_data)
            form = TokenForm(row.membership)
    context = {
        "account": row,
        "form": form,
        "tokens": selectors.tokens(membership=row.membership),
        "secret": secret,
        "now": timezone.now(),
    }
    return render(request, "accounts/service_account.html", context)


@require_POST
@member(Capability.MANAGE)
def set_disabled(request: MemberRequest, pk: int) -> HttpResponse:
    """Disable or enable a service account."""
    is_disabled = "disabled" in request.POST
    row = _account_or_404(request, pk)
    service_accounts.set_disabled(account=row, actor=request.membership, is_disabled=is_disabled)
    text = (
        _("The service account is disabled. Its tokens are refused.")
        if is_disabled
        else _("The service account is enabled.")
    )
    messages.success(request, text)
    return redirect("organization_service_account", pk)


@require_POST
@member(Capability.MANAGE)
def delete(request: MemberRequest, pk: int) -> HttpResponse:
    """Delete a service account."""
    service_accounts.delete(account=_account_or_404(request, pk), actor=request.membership)
    messages.success(request, _("The service account was deleted."))
    return redirect("organization_service_accounts")


@require_POST
@member(Capability.MANAGE)
def revoke_token(request: MemberRequest, pk: int, token_pk: int) -> HttpResponse:
    """Revoke a token of a service account."""
    token = get_object_or_404(selectors.tokens(membership=_account_or_404(request, pk).membership), pk=token_pk)
    services.revoke_token(token=token, actor=request.membership.user)
    messages.success(request, _("The token was revoked."))
    return redirect("organization_service_account", pk)
