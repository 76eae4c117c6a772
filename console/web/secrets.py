"""The page of an organization's secrets. It shows names and never a value."""

from __future__ import annotations

from typing import Any

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
from storage import secret_store


class WriteOnlyTextarea(forms.Textarea):
    """A text field that is always shown empty, even after an error, so that a page never contains a secret."""

    def format_value(self, value: Any) -> str:
        """Return an empty text."""
        del value
        return ""


class SecretForm(forms.Form):
    """The form of a new secret, or of a new value for one."""

    name = forms.CharField(
        label=gettext_lazy("Name"),
        max_length=100,
        widget=forms.TextInput(attrs={"autocomplete": "off", "spellcheck": "false", "class": "font-monospace"}),
        help_text=gettext_lazy("The environment variable that your code reads, for example HF_TOKEN."),
    )
    value = forms.CharField(
        label=gettext_lazy("Value"),
        strip=False,
        widget=WriteOnlyTextarea(attrs={"rows": 3, "autocomplete": "off", "spellcheck": "false"}),
        help_text=gettext_lazy("Encrypted at rest. You can replace it, but nobody can read it here again."),
    )


@sensitive_post_parameters("value")
@require_http_methods(["GET", "POST"])
@member(Capability.VIEW)
def secret_list(request: MemberRequest) -> HttpResponse:
    """List the secrets. POST creates one or replaces its value."""
    if request.method == "POST" and not request.membership.allows(Capability.STORE):
        raise NotAllowed
    form = SecretForm(request.POST if request.method == "POST" else None)
    if form.is_valid():
        with errors_in_form(form):
            name = form.cleaned_data["name"]
            secret_store.save_secret(
                organization=request.membership.organization,
                name=name,
                # Browsers send a form's lines with CR LF.
                value=form.cleaned_data["value"].replace("\r\n", "\n"),
                user=request.membership.user,
            )
            messages.success(request, _("The secret %(name)s was saved.") % {"name": name})
            return redirect("secret_list")
    secrets = secret_store.secrets_for(request.membership.organization).select_related("updated_by")
    return render(request, "storage/secret_list.html", {"form": form, "secrets": secrets})


@require_POST
@member(Capability.STORE)
def secret_delete(request: MemberRequest, name: str) -> HttpResponse:
    """Delete a secret."""
    secret = secret_store.secret_named(request.membership.organization, name)
    with errors_as_message(request):
        secret_store.delete_secret(secret=secret, user=request.membership.user)
        messages.success(request, _("The secret %(name)s was deleted.") % {"name": name})
    return redirect("secret_list")
