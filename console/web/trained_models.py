"""Pages of models, their versions and lineage, and the form that publishes files of a job. Downloads use the API."""

from __future__ import annotations

from django import forms
from django.contrib import messages
from django.core.paginator import Paginator
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from console.accounts.roles import Capability
from console.core.errors import CustomerError
from console.web.access import MemberRequest, errors_as_message, errors_in_form, member, show_error
from console.web.amounts import parse_row_id
from console.web.searching import search_and_sort
from jobs import job_files, model_publishing
from jobs import selectors as jobs
from jobs.models import Job
from storage import retention, selectors

PAGE_SIZE = 50
"""How many models one page of the list shows."""
MAX_PATHS = 50
"""How many paths below each of outputs and checkpoints the form offers. Other paths can be typed."""


class PublishForm(forms.Form):
    """The form that publishes files of a job. The service validates the values."""

    path = forms.CharField(
        label=gettext_lazy("Files of the job"),
        help_text=gettext_lazy("A file or folder below outputs or checkpoints. It is copied."),
        widget=forms.TextInput(attrs={"list": "paths", "autocomplete": "off", "spellcheck": "false"}),
    )
    name = forms.CharField(
        label=gettext_lazy("Model"),
        max_length=63,
        help_text=gettext_lazy("An existing name gets a new version. Lowercase letters, digits, hyphens, underscores."),
        widget=forms.TextInput(
            attrs={"list": "names", "autocomplete": "off", "autocapitalize": "none", "spellcheck": "false"}
        ),
    )
    description = forms.CharField(
        label=gettext_lazy("Description"), required=False, widget=forms.Textarea(attrs={"rows": 3})
    )


@require_GET
@member(Capability.VIEW)
def model_list(request: MemberRequest) -> HttpResponse:
    """List the models of a search with their latest versions."""
    models, search = search_and_sort(request, selectors.models_for(request.membership.organization))
    page = Paginator(models, PAGE_SIZE).get_page(request.GET.get("page"))
    return render(request, "storage/model_list.html", {"page": page, **search})


@require_GET
@member(Capability.VIEW)
def model_detail(request: MemberRequest, name: str) -> HttpResponse:
    """Show a model's versions, and the lineage of the latest or of `?version=`."""
    model = selectors.model_named(request.membership.organization, name)
    number = parse_row_id(request.GET.get("version", ""))  # None: the latest version
    version = selectors.model_version(model, number)
    return render(
        request,
        "storage/model_detail.html",
        {"model": model, "versions": selectors.model_versions_of(model), "version": version},
    )


@require_POST
@member(Capability.STORE)
def model_delete(request: MemberRequest, name: str) -> HttpResponse:
    """Delete a model with all its versions."""
    model = selectors.model_named(request.membership.organization, name)
    try:
        retention.delete_model(model=model, user=request.membership.user)
    except CustomerError as error:
        show_error(request, error)
        return redirect("model_detail", name)
    messages.success(request, _("The model %(name)s was deleted.") % {"name": name})
    return redirect("model_list")


@require_POST
@member(Capability.STORE)
def model_version_delete(request: MemberRequest, name: str, number: int) -> HttpResponse:
    """Delete one version of a model."""
    model = selectors.model_named(request.membership.organization, name)
    version = selectors.model_version(model, number)
    with errors_as_message(request):
        retention.delete_model_version(version=version, user=request.membership.user)
        messages.success(request, _("%(version)s was deleted.") % {"version": version})
    if selectors.model_versions_of(model).exists():
        return redirect("model_detail", name)
    return redirect("model_list")  # a model without versions has no page


@require_http_methods(["GET", "POST"])
@member(Capability.STORE)
def job_publish(request: MemberRequest, pk: int) -> HttpResponse:
    """Publish outputs or checkpoints of a job as a model. `?path=` fills in the path."""
    organization = request.membership.organization
    job = jobs.job_for(organization, pk)
    paths = _offered_paths(job)
    initial = {"path": request.GET.get("path", "").strip("/") or (paths[0] if paths else "")}
    form = PublishForm(request.POST if request.method == "POST" else None, initial=initial)
    if form.is_valid():
        with errors_in_form(form):
            version = model_publishing.publish_model(job=job, user=request.membership.user, **form.cleaned_data)
            messages.success(request, _("%(version)s was published.") % {"version": version})
            return redirect("model_detail", version.model.name)
    # Suggestions only: any other name can be typed.
    names = selectors.models_for(organization).values_list("name", flat=True)[:PAGE_SIZE]
    return render(request, "storage/model_new.html", {"form": form, "job": job, "paths": paths, "names": names})


def _offered_paths(job: Job) -> list[str]:
    """Return the paths that the form offers: outputs, checkpoints, and the entries directly in them."""
    paths: list[str] = []
    for top in job_files.RESULTS:
        try:
            entries = job_files.list_files(job, top, limit=MAX_PATHS).entries
        except CustomerError:
            continue  # the folder does not exist, or the cluster does not respond
        if entries:
            paths += [top, *(entry.path for entry in entries)]
    return paths
