"""Pages that export and close an organization, and that export and delete a person's account."""

from __future__ import annotations

from allauth.account.decorators import reauthentication_required
from django import forms
from django.conf import settings
from django.contrib import messages
from django.contrib.auth import logout
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from billing import selectors as billing
from console.accounts import services
from console.accounts.models import User
from console.accounts.roles import Capability
from console.web.access import MemberRequest, errors_as_message, errors_in_form, logged_in_user, member
from jobs import account_exports, closure
from storage.downloads import download_archive


class ConfirmationForm(forms.Form):
    """The form that confirms the closure: the short name of the organization, typed again."""

    confirmation = forms.CharField(label=gettext_lazy("Short name of the organization"), max_length=60)


class EmailForm(forms.Form):
    """The form that confirms the deletion of an account: the person's own address, typed again."""

    email = forms.CharField(label=gettext_lazy("Your email address"), max_length=254)

    def __init__(self, user: User, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]  # the data of the form
        self.user = user

    def clean_email(self) -> str:
        """Return the address. Raises ValidationError unless it is the person's own."""
        email: str = self.cleaned_data["email"]
        if email.strip().lower() != self.user.email:
            raise forms.ValidationError(_("Enter %(name)s to confirm.") % {"name": self.user.email})
        return email


@require_http_methods(["GET", "POST"])
@member(Capability.MANAGE)
def close_organization(request: MemberRequest) -> HttpResponse:
    """Show the consequences of closing the organization. POST begins the notice period.

    The page asks for no password, because every member gets an email, and owners can withdraw the closure until the
    notice period ends.
    """
    organization = request.membership.organization
    form = ConfirmationForm(request.POST if request.method == "POST" else None)
    if form.is_valid():
        with errors_in_form(form):
            closure.request(membership=request.membership, **form.cleaned_data)
            messages.success(request, _("The organization will be closed. Every member gets an email."))
            return redirect("organization_close")
    context = {
        "form": form,
        "organization": organization,
        "closure": closure.closure_of(organization),
        "obstacles": closure.obstacles(organization),
        "payable_minor": closure.payable_minor(organization),  # what the customer gets back
        "account": billing.wallet(organization),
        "notice_days": settings.CLOSURE_NOTICE_DAYS,
    }
    return render(request, "accounts/close.html", context)


@require_POST
@member(Capability.MANAGE)
def withdraw(request: MemberRequest) -> HttpResponse:
    """Withdraw the closure of the organization."""
    with errors_as_message(request):
        closure.withdraw(membership=request.membership)
        messages.success(request, _("The organization stays open. Activate the service to order again."))
    return redirect("organization_close")


@never_cache
@require_http_methods(["GET", "POST"])
@login_required
@reauthentication_required  # type: ignore[untyped-decorator]  # allauth publishes no types
def delete_account(request: HttpRequest) -> HttpResponse:
    """Show the consequences of deleting one's own account. POST deletes it."""
    user = logged_in_user(request)
    form = EmailForm(user, request.POST if request.method == "POST" else None)
    if form.is_valid():
        with errors_in_form(form):
            services.close_account(user=user)
            logout(request)
            messages.success(request, _("Your account was deleted."))
            return redirect("account_login")
    return render(request, "accounts/delete.html", {"form": form})


@require_GET
@member(Capability.MANAGE)
def export_organization(request: MemberRequest) -> HttpResponseBase:
    """Download all data about the organization, except its files.

    Unlike the export of a person's own account, this one asks for no password. A password would protect nothing here:
    the API gives the same archive to the same session, and to the member's tokens.
    """
    chunks = account_exports.export_organization(membership=request.membership)
    name = f"trainyard-{request.membership.organization.slug}.zip"
    return download_archive(request, chunks, name=name, content_type="application/zip")


@never_cache
@require_GET
@login_required
@reauthentication_required  # type: ignore[untyped-decorator]  # allauth publishes no types
def export_account(request: HttpRequest) -> HttpResponseBase:
    """Download all data about the person."""
    chunks = account_exports.export_person(user=logged_in_user(request))
    return download_archive(request, chunks, name="trainyard-account.zip", content_type="application/zip")
