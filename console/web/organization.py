"""The organization: its name, members and roles, which one is shown, and API tokens."""

from __future__ import annotations

from django import forms
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views import i18n
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from console.accounts import selectors, services
from console.accounts.errors import CustomerError
from console.accounts.middleware import SESSION_KEY
from console.accounts.models import Membership, User
from console.accounts.roles import Capability
from console.web.access import MemberRequest, member, refuse, tell
from console.web.amounts import row_number


class NameForm(forms.Form):
    """A name for an organization or a token."""

    name = forms.CharField(label=gettext_lazy("Name"), max_length=100)


class MemberForm(forms.Form):
    """A person to add, with a role."""

    email = forms.EmailField(label=gettext_lazy("E-mail address"))
    role = forms.ChoiceField(
        label=gettext_lazy("Role"), choices=Membership.Roles.choices, initial=Membership.Roles.MEMBER
    )


@require_POST
def set_language(request: HttpRequest) -> HttpResponse:
    """Show pages in another language; whoever is logged in gets mail in it, too."""
    if isinstance(request.user, User):
        services.remember_language(user=request.user, language=request.POST.get("language"))
    answer: HttpResponse = i18n.set_language(request)
    return answer


def _page(request: MemberRequest, *, name: NameForm, person: MemberForm) -> HttpResponse:
    organization = request.membership.organization
    return render(
        request,
        "accounts/organization.html",
        {
            "name_form": name,
            "member_form": person,
            "members": selectors.members(organization=organization),
            "roles": Membership.Roles,
            "quota": organization.quota,
            "audit_events": selectors.audit_events(organization=organization)[:15],
        },
    )


@require_GET
@member(Capability.VIEW)
def organization(request: MemberRequest) -> HttpResponse:
    """Who belongs to the organization, and what it may use."""
    return _page(request, name=NameForm(initial={"name": request.membership.organization.name}), person=MemberForm())


@require_POST
@member(Capability.MANAGE)
def rename(request: MemberRequest) -> HttpResponse:
    """Change the organization's name."""
    form = NameForm(request.POST)
    if form.is_valid():
        try:
            services.rename_organization(
                organization=request.membership.organization, actor=request.membership.user, **form.cleaned_data
            )
            messages.success(request, _("The name was changed."))
            return redirect("organization")
        except CustomerError as error:
            refuse(form, error)
    return _page(request, name=form, person=MemberForm())


@require_POST
@member(Capability.MANAGE)
def add_member(request: MemberRequest) -> HttpResponse:
    """Add a person who has signed up."""
    form = MemberForm(request.POST)
    if form.is_valid():
        try:
            added = services.add_member(
                organization=request.membership.organization, actor=request.membership.user, **form.cleaned_data
            )
            messages.success(request, _("%(email)s is a member now.") % {"email": added.user.email})
            return redirect("organization")
        except CustomerError as error:
            refuse(form, error)
    return _page(request, name=NameForm(initial={"name": request.membership.organization.name}), person=form)


def _other(request: MemberRequest, pk: int) -> Membership:
    return get_object_or_404(selectors.members(organization=request.membership.organization), pk=pk)


@require_POST
@member(Capability.MANAGE)
def change_role(request: MemberRequest, pk: int) -> HttpResponse:
    """Give a member another role."""
    try:
        services.change_role(
            membership=_other(request, pk), role=request.POST.get("role", ""), actor=request.membership.user
        )
        messages.success(request, _("The role was changed."))
    except CustomerError as error:
        tell(request, error)
    return redirect("organization")


@require_POST
@member(Capability.MANAGE)
def remove_member(request: MemberRequest, pk: int) -> HttpResponse:
    """End a membership."""
    try:
        services.remove_member(membership=_other(request, pk), actor=request.membership.user)
        messages.success(request, _("The member was removed; their API tokens no longer work."))
    except CustomerError as error:
        tell(request, error)
    return redirect("organization")


@require_POST
@login_required
def switch(request: HttpRequest) -> HttpResponse:
    """Show the pages of another organization of this person's."""
    assert isinstance(request.user, User)  # noqa: S101  # login_required; for types
    wanted = row_number(request.POST.get("organization", ""))
    if wanted is None or not selectors.memberships(user=request.user).filter(organization=wanted).exists():
        raise Http404
    request.session[SESSION_KEY] = wanted
    return redirect("overview")


@require_http_methods(["GET", "POST"])
@login_required
def new(request: HttpRequest) -> HttpResponse:
    """Make an organization: for people who have none, or want another."""
    assert isinstance(request.user, User)  # noqa: S101  # login_required; for types
    form = NameForm(request.POST if request.method == "POST" else None)
    if request.method == "POST" and form.is_valid():
        try:
            made = services.create_organization(user=request.user, **form.cleaned_data)
        except CustomerError as error:
            refuse(form, error)
        else:
            request.session[SESSION_KEY] = made.organization_id
            return redirect("overview")
    return render(request, "accounts/organization_new.html", {"form": form})


@never_cache
@require_http_methods(["GET", "POST"])
@member(Capability.VIEW)
def tokens(request: MemberRequest) -> HttpResponse:
    """This member's API tokens. POST makes one and shows its secret, this once."""
    form, secret = NameForm(request.POST if request.method == "POST" else None), ""
    if request.method == "POST" and form.is_valid():
        try:
            secret = services.create_token(membership=request.membership, **form.cleaned_data)[1]
            form = NameForm()
        except CustomerError as error:
            refuse(form, error)
    found = selectors.tokens(membership=request.membership)
    return render(request, "accounts/tokens.html", {"form": form, "tokens": found, "secret": secret})


@require_POST
@member(Capability.VIEW)
def revoke_token(request: MemberRequest, pk: int) -> HttpResponse:
    """End one of this member's tokens."""
    token = get_object_or_404(selectors.tokens(membership=request.membership), pk=pk)
    services.revoke_token(token=token, actor=request.membership.user)
    messages.success(request, _("The token no longer works."))
    return redirect("tokens")
