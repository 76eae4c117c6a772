"""Pages of the container images that runs use: built-in ones, and the organization's own.

`jobs.images` knows which of them the clusters can run; `storage.images` stores the organization's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django import forms
from django.contrib import messages
from django.db import transaction
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_GET, require_http_methods, require_POST
from django_htmx.http import HttpResponseClientRedirect

from billing import selectors as billing
from console.accounts.models import Membership
from console.accounts.roles import Capability
from console.accounts.services import is_active
from console.core.errors import CustomerError, NotFound
from console.web.access import MemberRequest, errors_as_message, errors_in_form, member, show_error
from console.web.templatetags.trainyard import FRAMEWORK_TITLES
from jobs import checks, images
from storage import images as image_store
from storage import registries, selectors
from storage.models import Image, Registry

CHECK_FIELDS = ("image", "framework", "workspace", "datasets", "node_spec", "nodes", "workers_per_node")
"""Names of the fields in the form of an image check, as `jobs.checks.place_check` reads them."""


class ImageForm(forms.Form):
    """The form of an image from the customer's registry."""

    name = forms.CharField(label=gettext_lazy("Name"), max_length=Image.name.field.max_length)
    title = forms.CharField(label=gettext_lazy("Title"), max_length=Image.title.field.max_length)
    reference = forms.CharField(
        label=gettext_lazy("Registry reference"),
        max_length=Image.reference.field.max_length,
        help_text=gettext_lazy("Registry host, image name and tag, for example registry.example.com/team/train:1.2."),
    )
    username = forms.CharField(
        label=gettext_lazy("User name at the registry"),
        max_length=Registry.username.field.max_length,
        required=False,
        widget=forms.TextInput(attrs={"autocomplete": "off"}),
        help_text=gettext_lazy(
            "Leave empty for public images. Used for all your images in this registry; the latest entry applies."
        ),
    )
    password = forms.CharField(
        label=gettext_lazy("Password or access token"),
        max_length=registries.MAX_PASSWORD_LENGTH,
        required=False,
        strip=False,
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
        help_text=gettext_lazy("Encrypted at rest. Shared only with the cluster that pulls the image."),
    )
    frameworks = forms.MultipleChoiceField(
        label=gettext_lazy("Included frameworks"),
        choices=list(FRAMEWORK_TITLES.items()),
        widget=forms.CheckboxSelectMultiple,
    )
    description = forms.CharField(
        label=gettext_lazy("Description"), required=False, widget=forms.Textarea(attrs={"rows": 3})
    )


@require_GET
@member(Capability.VIEW)
def image_list(request: MemberRequest) -> HttpResponse:
    """List the images, and why some of them cannot run."""
    organization = request.membership.organization
    all_images = list(selectors.images_for(organization))
    account = billing.wallet(organization)
    return render(
        request,
        "storage/image_list.html",
        {
            "builtin": [image for image in all_images if image.is_builtin],
            "own": [image for image in all_images if not image.is_builtin],
            "problems": images.problems(all_images),
            "contents": {image.pk: images.contents_of(image) for image in all_images},
            "pulls_images": images.any_cluster_pulls_images(),
            "framework_titles": FRAMEWORK_TITLES,
            # For the form of an image check, which only organizations that have activated the service may order.
            "specs": billing.offered_specs(account.currency) if account and is_active(organization) else [],
        },
    )


@require_POST
@member(Capability.RUN)
def image_check(request: MemberRequest) -> HttpResponse:
    """Start a free run that checks an image on the requested nodes. htmx gets errors as a fragment of the page."""
    try:
        order = checks.place_check(
            membership=request.membership, data={name: request.POST.get(name) for name in CHECK_FIELDS}
        )
    except CustomerError as error:
        if request.htmx:
            return render(
                request, "jobs/_check_refused.html", {"errors": list(error.fields.values()) or [error.message]}
            )
        show_error(request, error)
        return redirect("image_list")
    messages.success(request, _("The check is queued. It is free and starts when nodes are available."))
    url = reverse("job_detail", args=[order.job.pk])
    return HttpResponseClientRedirect(url) if request.htmx else redirect(url)


@sensitive_post_parameters("password")
@require_http_methods(["GET", "POST"])
@member(Capability.STORE)
def image_new(request: MemberRequest) -> HttpResponse:
    """Register an image."""
    form = ImageForm(request.POST if request.method == "POST" else None)
    if form.is_valid():
        with errors_in_form(form):
            warning = _check_registry(request.membership, form.cleaned_data)
            image = _save(request.membership, dict(form.cleaned_data))
            if warning:
                messages.warning(request, warning)
            if problem := images.problem(image):  # the image is registered, but no cluster can run it
                messages.warning(request, problem)
            else:
                messages.success(
                    request, _("The image %(name)s was registered. You can now use it in runs.") % {"name": image.name}
                )
            return redirect("image_list")
    context = {"form": form, "pulls_images": images.any_cluster_pulls_images()}
    return render(request, "storage/image_form.html", context)


@sensitive_post_parameters("password")
@require_http_methods(["GET", "POST"])
@member(Capability.STORE)
def image_edit(request: MemberRequest, name: str) -> HttpResponse:
    """Edit one of the organization's images."""
    image = _own_image(request, name)
    current = {field: getattr(image, field) for field in ("name", "title", "reference", "frameworks", "description")}
    form = ImageForm(request.POST if request.method == "POST" else None, initial=current)
    form.fields["name"].disabled = True  # the name identifies the image; Django then ignores the submitted value
    if form.is_valid():
        with errors_in_form(form):
            if warning := _check_registry(request.membership, form.cleaned_data):
                messages.warning(request, warning)
            # No warning here if no cluster can run the image: the list of images, which comes next, says so.
            _save(request.membership, dict(form.cleaned_data), image)
            messages.success(request, _("The changes to the image %(name)s were saved.") % {"name": image.name})
            return redirect("image_list")
    context = {"form": form, "image": image, "pulls_images": images.any_cluster_pulls_images()}
    return render(request, "storage/image_form.html", context)


@require_POST
@member(Capability.STORE)
def image_delete(request: MemberRequest, name: str) -> HttpResponse:
    """Delete one of the organization's images."""
    image = _own_image(request, name)
    with errors_as_message(request):
        image_store.delete_image(image=image, user=request.membership.user)
        messages.success(request, _("The image %(name)s was deleted.") % {"name": image.name})
    return redirect("image_list")


def _own_image(request: MemberRequest, name: str) -> Image:
    """Return an image of the organization. Raises NotFound also for built-in ones, which customers cannot change."""
    image = selectors.image_named(request.membership.organization, name)
    if image.is_builtin:
        raise NotFound
    return image


def _check_registry(membership: Membership, fields: Mapping[str, Any]) -> str:
    """Check that the registry has the image. Return a warning if the registry does not answer, or an empty string.

    Raises InvalidInput if the registry has no such image or refuses the credentials.
    """
    values = {name: fields[name] for name in ("reference", "username", "password")}
    return str(registries.check_image(organization=membership.organization, **values).warning)


@transaction.atomic  # the image is not saved if the credentials are invalid
def _save(membership: Membership, fields: dict[str, Any], image: Image | None = None) -> Image:
    """Create an image or update `image`, and save the credentials of its registry if the form has any."""
    username, password = fields.pop("username"), fields.pop("password")
    organization = membership.organization
    if image is None:
        image = image_store.create_image(organization=organization, user=membership.user, **fields)
    else:
        fields.pop("name")
        image = image_store.update_image(image=image, user=membership.user, **fields)
    if username:  # without a user name, the credentials that are stored for the registry stay as they are
        host = image.reference.partition("/")[0]
        registries.save_registry(
            organization=organization, host=host, username=username, password=password, user=membership.user
        )
    return image
