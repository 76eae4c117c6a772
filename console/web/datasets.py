"""Datasets and their versions. Uploads go from the browser straight to the API, which `static/js/upload.js` calls."""

from __future__ import annotations

from django import forms
from django.contrib import messages
from django.core.paginator import Paginator
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from console.accounts.errors import CustomerError
from console.accounts.roles import Capability
from console.web.access import MemberRequest, member, refuse, tell
from storage import catalog, selectors

PAGE = 50


class NamedForm(forms.Form):
    """What datasets and workspaces are made from. The services say what a good name is."""

    name = forms.CharField(
        label=gettext_lazy("Name"),
        max_length=63,
        help_text=gettext_lazy("Lower-case letters, digits, dashes and underscores."),
        widget=forms.TextInput(attrs={"autocomplete": "off", "autocapitalize": "none", "spellcheck": "false"}),
    )
    description = forms.CharField(
        label=gettext_lazy("Description"), required=False, widget=forms.Textarea(attrs={"rows": 3})
    )


@require_GET
@member(Capability.VIEW)
def dataset_list(request: MemberRequest) -> HttpResponse:
    """Every dataset with its latest version."""
    page = Paginator(selectors.datasets_for(request.membership.organization), PAGE).get_page(request.GET.get("page"))
    return render(request, "storage/dataset_list.html", {"page": page})


@require_http_methods(["GET", "POST"])
@member(Capability.STORE)
def dataset_new(request: MemberRequest) -> HttpResponse:
    """Name a dataset; its files come on its own page."""
    form = NamedForm(request.POST if request.method == "POST" else None)
    if request.method == "POST" and form.is_valid():
        try:
            made = catalog.create_dataset(
                organization=request.membership.organization, user=request.membership.user, **form.cleaned_data
            )
        except CustomerError as error:
            refuse(form, error)
        else:
            return redirect("dataset_detail", made.name)
    return render(request, "storage/dataset_new.html", {"form": form})


@require_GET
@member(Capability.VIEW)
def dataset_detail(request: MemberRequest, name: str) -> HttpResponse:
    """One dataset: its versions, and where to send the next."""
    dataset = selectors.dataset_named(request.membership.organization, name)
    return render(
        request, "storage/dataset_detail.html", {"dataset": dataset, "versions": selectors.versions_of(dataset)}
    )


@require_POST
@member(Capability.STORE)
def dataset_delete(request: MemberRequest, name: str) -> HttpResponse:
    """Delete a dataset with all its versions."""
    dataset = selectors.dataset_named(request.membership.organization, name)
    try:
        catalog.delete_dataset(dataset=dataset, user=request.membership.user)
    except CustomerError as error:
        tell(request, error)
        return redirect("dataset_detail", name)
    messages.success(request, _("The dataset %(name)s was deleted.") % {"name": name})
    return redirect("dataset_list")
