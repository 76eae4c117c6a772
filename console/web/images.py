"""Images: what runs can run in, built-in and the organization's own."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import messages
from django.db import transaction
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_GET, require_http_methods, require_POST
from django_htmx.http import HttpResponseClientRedirect

from billing import selectors as billing
from console.accounts.errors import CustomerError
from console.accounts.models import Membership
from console.accounts.roles import Capability
from console.accounts.services import is_active
from console.web.access import MemberRequest, member, refuse, tell
from jobs import checks
from jobs import selectors as jobs
from runtime.specs import Framework
from storage import catalog, registries, selectors
from storage.models import Image

FRAMEWORK_TITLES = {
    Framework.PYTORCH.value: "PyTorch",
    Framework.HOROVOD.value: "Horovod",
    Framework.TENSORFLOW.value: "TensorFlow",
}
"""Names of products: the same in every language."""
CHOICES = ("image", "framework", "workspace", "datasets", "node_spec", "nodes", "workers_per_node")
"""What a check takes of the order's form; of the image page, what is there."""


class ImageForm(forms.Form):
    """An image of the customer's own registry."""

    name = forms.CharField(label=gettext_lazy("Name"), max_length=63)
    title = forms.CharField(label=gettext_lazy("Title"), max_length=100)
    reference = forms.CharField(
        label=gettext_lazy("Registry reference"),
        max_length=500,
        help_text=gettext_lazy("Host, name and tag, such as registry.example.com/team/train:1.2."),
    )
    username = forms.CharField(
        label=gettext_lazy("User name at the registry"),
        max_length=255,
        required=False,
        widget=forms.TextInput(attrs={"autocomplete": "off"}),
        help_text=gettext_lazy("Empty: anybody may pull it. Kept for all images of this registry; the newest counts."),
    )
    password = forms.CharField(
        label=gettext_lazy("Password or access token"),
        max_length=4096,
        required=False,
        strip=False,
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
        help_text=gettext_lazy("Stored encrypted, shown to nobody, and told to the cluster that pulls alone."),
    )
    frameworks = forms.MultipleChoiceField(
        label=gettext_lazy("Frameworks it carries"),
        choices=list(FRAMEWORK_TITLES.items()),
        widget=forms.CheckboxSelectMultiple,
    )
    description = forms.CharField(
        label=gettext_lazy("Description"), required=False, widget=forms.Textarea(attrs={"rows": 3})
    )


@require_GET
@member(Capability.VIEW)
def image_list(request: MemberRequest) -> HttpResponse:
    """Every image on offer."""
    organization = request.membership.organization
    found = list(selectors.images_for(organization))
    account = billing.wallet(organization)
    return render(
        request,
        "storage/image_list.html",
        {
            "builtin": [image for image in found if image.is_builtin],
            "own": [image for image in found if not image.is_builtin],
            "runnable": [image for image in found if jobs.is_runnable(image)],
            "framework_titles": FRAMEWORK_TITLES,
            "specs": billing.offered_specs(account.currency) if account and is_active(organization) else [],
        },
    )


@require_POST
@member(Capability.RUN)
def image_check(request: MemberRequest) -> HttpResponse:
    """Start a free run that checks an image on the nodes chosen; htmx is told what is wrong where it asked."""
    try:
        order = checks.place_check(
            membership=request.membership, data={name: request.POST.get(name) for name in CHOICES}
        )
    except CustomerError as error:
        if request.htmx:
            return render(
                request, "jobs/_check_refused.html", {"sentences": list(error.fields.values()) or [error.message]}
            )
        tell(request, error)
        return redirect("image_list")
    messages.success(request, _("The check is free. It starts as soon as there is room."))
    address = reverse("job_detail", args=[order.job.pk])
    return HttpResponseClientRedirect(address) if request.htmx else redirect(address)


@require_http_methods(["GET", "POST"])
@member(Capability.STORE)
def image_new(request: MemberRequest) -> HttpResponse:
    """Register an image."""
    form = ImageForm(request.POST if request.method == "POST" else None)
    if request.method == "POST" and form.is_valid():
        try:
            made = _register(request.membership, dict(form.cleaned_data))
        except CustomerError as error:
            refuse(form, error)
        else:
            messages.success(request, _("The image %(name)s can be chosen now.") % {"name": made.name})
            return redirect("image_list")
    return render(request, "storage/image_new.html", {"form": form})


@transaction.atomic
def _register(membership: Membership, fields: dict[str, Any]) -> Image:
    """The image, and what it takes to pull it where that was given."""
    username, password = fields.pop("username"), fields.pop("password")
    organization = membership.organization
    made = catalog.create_image(organization=organization, user=membership.user, **fields)
    if username:
        host = made.reference.partition("/")[0]
        registries.save_registry(organization=organization, host=host, username=username, password=password)
    return made
