"""The page of the registries from which an organization's images are pulled. It never shows a password."""

from __future__ import annotations

from django import forms
from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods, require_POST

from console.accounts.roles import Capability
from console.core.errors import NotAllowed
from console.web.access import MemberRequest, errors_as_message, errors_in_form, member
from storage import registries


class RegistryForm(forms.Form):
    """The form of a registry's credentials."""

    host = forms.CharField(
        label=gettext_lazy("Registry host"),
        max_length=255,
        widget=forms.TextInput(attrs={"autocomplete": "off", "spellcheck": "false"}),
        help_text=gettext_lazy("For example registry.example.com or docker.io."),
    )
    username = forms.CharField(
        label=gettext_lazy("User name"), max_length=255, widget=forms.TextInput(attrs={"autocomplete": "off"})
    )
    password = forms.CharField(
        label=gettext_lazy("Password or access token"),
        max_length=registries.MAX_PASSWORD_LENGTH,
        required=False,
        strip=False,
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
        help_text=gettext_lazy("Leave empty to keep the stored one. Encrypted at rest."),
    )


@sensitive_post_parameters("password")
@require_http_methods(["GET", "POST"])
@member(Capability.VIEW)
def registry_list(request: MemberRequest) -> HttpResponse:
    """List the registries. POST checks and saves the credentials of one; `?host=` fills the form with a stored one."""
    organization = request.membership.organization
    if request.method == "POST" and not request.membership.allows(Capability.STORE):
        raise NotAllowed
    rows = registries.registries_for(organization)
    edited = next((row for row in rows if row.host == request.GET.get("host", "")), None)
    initial = {"host": edited.host, "username": edited.username} if edited else {}
    form = RegistryForm(request.POST if request.method == "POST" else None, initial=initial)
    if form.is_valid():
        with errors_in_form(form):
            # A password of None keeps the stored one.
            values = form.cleaned_data | {"password": form.cleaned_data["password"] or None}
            check = registries.check_registry(organization=organization, **values)
            registry = registries.save_registry(organization=organization, user=request.membership.user, **values)
            messages.success(request, _("The credentials for %(host)s were saved.") % {"host": registry.host})
            if check.warning:
                messages.warning(request, str(check.warning))
            return redirect("registry_list")
    return render(request, "storage/registry_list.html", {"form": form, "registries": rows, "edited": edited})


@require_POST
@member(Capability.STORE)
def registry_delete(request: MemberRequest, host: str) -> HttpResponse:
    """Delete the credentials of a registry."""
    registry = registries.registry_named(request.membership.organization, host)
    with errors_as_message(request):
        registries.delete_registry(registry=registry, user=request.membership.user)
        messages.success(request, _("The credentials for %(host)s were deleted.") % {"host": host})
    return redirect("registry_list")
