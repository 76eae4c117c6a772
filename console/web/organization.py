"""Pages of the organization: name, members, roles, switching, API tokens."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views import i18n
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from console.accounts import invitations, second_factors, selectors, services
from console.accounts.middleware import ORGANIZATION_SESSION_KEY
from console.accounts.models import Membership, User
from console.accounts.roles import Capability
from console.web.access import MemberRequest, errors_as_message, errors_in_form, logged_in_user, member, require_log_in
from console.web.amounts import parse_row_id

RECENT_EVENTS = 15
"""How many audit events the page lists under *Recent activity*, which is about one screen."""


class NameForm(forms.Form):
    """The form of an organization's name, and the base of forms that have a name."""

    name = forms.CharField(label=gettext_lazy("Name"), max_length=100)


class TokenForm(NameForm):
    """The form of an API token. Every token may read, so LABELS has no choice for VIEW."""

    LABELS = {
        Capability.STORE: gettext_lazy("Change datasets, workspaces, models, images and secrets"),
        Capability.RUN: gettext_lazy("Quote, buy, cancel and rerun"),
        Capability.PAY: gettext_lazy("Top up, see payments and invoices"),
        Capability.MANAGE: gettext_lazy("Manage members and the organization"),
    }
    INITIAL_SCOPES = (Capability.STORE, Capability.RUN)
    """The scopes that are ticked at first: those that training needs, without payments and members."""
    scopes = forms.MultipleChoiceField(
        label=gettext_lazy("Besides reading, the token may"), required=False, widget=forms.CheckboxSelectMultiple
    )
    days = forms.TypedChoiceField(
        label=gettext_lazy("Expires"),
        coerce=int,
        empty_value=None,
        required=False,
        choices=[
            (30, gettext_lazy("in 30 days")),
            (90, gettext_lazy("in 90 days")),
            (365, gettext_lazy("in a year")),
            ("", gettext_lazy("never")),
        ],
        initial=90,
    )

    def __init__(self, membership: Membership, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        allowed = [capability for capability in self.LABELS if membership.allows(capability)]
        scopes = self.fields["scopes"]
        assert isinstance(scopes, forms.MultipleChoiceField)  # noqa: S101  # for types
        scopes.choices = [(capability.value, self.LABELS[capability]) for capability in allowed]
        scopes.initial = [capability.value for capability in allowed if capability in self.INITIAL_SCOPES]


class InvitationForm(forms.Form):
    """The form of an invitation."""

    email = forms.EmailField(label=gettext_lazy("Email address"))
    role = forms.ChoiceField(
        label=gettext_lazy("Role"), choices=Membership.Roles.choices, initial=Membership.Roles.MEMBER
    )


@require_POST
def set_language(request: HttpRequest) -> HttpResponse:
    """Set the language of pages, and of emails if the person is logged in."""
    if isinstance(request.user, User):
        services.set_mail_language(user=request.user, language=request.POST.get("language"))
    response: HttpResponse = i18n.set_language(request)
    return response


def _render_page(request: MemberRequest, *, name_form: NameForm, invitation_form: InvitationForm) -> HttpResponse:
    """Render the page of the organization. A form that was refused shows its errors."""
    organization = request.membership.organization
    members = list(selectors.members(organization=organization))
    return render(
        request,
        "accounts/organization.html",
        {
            "name_form": name_form,
            "invitation_form": invitation_form,
            "invitations": selectors.open_invitations(organization=organization),
            "members": members,
            "roles": Membership.Roles,
            # The ids of the users who have a second factor.
            "protected": second_factors.protected_users(membership.user_id for membership in members),
            "quota": organization.quota,
            "audit_events": selectors.activity(organization=organization)[:RECENT_EVENTS],
        },
    )


@require_GET
@member(Capability.VIEW)
def organization(request: MemberRequest) -> HttpResponse:
    """Show the members and quotas of the organization."""
    return _render_page(
        request,
        name_form=NameForm(initial={"name": request.membership.organization.name}),
        invitation_form=InvitationForm(),
    )


@require_POST
@member(Capability.MANAGE)
def rename(request: MemberRequest) -> HttpResponse:
    """Rename the organization."""
    form = NameForm(request.POST)
    if form.is_valid():
        with errors_in_form(form):
            services.rename_organization(
                organization=request.membership.organization, actor=request.membership.user, **form.cleaned_data
            )
            messages.success(request, _("The organization was renamed."))
            return redirect("organization")
    return _render_page(request, name_form=form, invitation_form=InvitationForm())


@require_POST
@member(Capability.MANAGE)
def set_second_factor_required(request: MemberRequest) -> HttpResponse:
    """Set whether all members need a second factor."""
    is_required = request.POST.get("required") == "1"
    with errors_as_message(request):
        services.set_second_factor_required(
            organization=request.membership.organization, is_required=is_required, actor=request.membership.user
        )
        messages.success(
            request,
            _("All members now need a second factor.") if is_required else _("A second factor is optional again."),
        )
    return redirect("organization")


@require_POST
@member(Capability.MANAGE)
def set_shells_enabled(request: MemberRequest) -> HttpResponse:
    """Set whether members may open shells in nodes."""
    is_enabled = request.POST.get("enabled") == "1"
    services.set_shells_enabled(
        organization=request.membership.organization, is_enabled=is_enabled, actor=request.membership.user
    )
    messages.success(
        request, _("Members can now open shells.") if is_enabled else _("Members can no longer open shells.")
    )
    return redirect("organization")


@require_POST
@member(Capability.MANAGE)
def invite(request: MemberRequest) -> HttpResponse:
    """Invite a person by email."""
    form = InvitationForm(request.POST)
    if form.is_valid():
        with errors_in_form(form):
            invitation = invitations.invite(
                organization=request.membership.organization, actor=request.membership.user, **form.cleaned_data
            )
            messages.success(request, _("An invitation was sent to %(email)s.") % {"email": invitation.email})
            return redirect("organization")
    return _render_page(
        request, name_form=NameForm(initial={"name": request.membership.organization.name}), invitation_form=form
    )


@require_POST
@member(Capability.MANAGE)
def revoke_invitation(request: MemberRequest, pk: int) -> HttpResponse:
    """Revoke an invitation."""
    open_invitations = selectors.open_invitations(organization=request.membership.organization)
    invitations.revoke(invitation=get_object_or_404(open_invitations, pk=pk), actor=request.membership.user)
    messages.success(request, _("The invitation was revoked. Its link no longer works."))
    return redirect("organization")


def _member_of_organization(request: MemberRequest, pk: int) -> Membership:
    """Return a membership of the same organization. Raises Http404."""
    return get_object_or_404(selectors.members(organization=request.membership.organization), pk=pk)


@require_POST
@member(Capability.MANAGE)
def change_role(request: MemberRequest, pk: int) -> HttpResponse:
    """Change a member's role."""
    with errors_as_message(request):
        services.change_role(
            membership=_member_of_organization(request, pk),
            role=request.POST.get("role", ""),
            actor=request.membership.user,
        )
        messages.success(request, _("The role was changed."))
    return redirect("organization")


@require_POST
@member(Capability.MANAGE)
def remove_member(request: MemberRequest, pk: int) -> HttpResponse:
    """Remove a member."""
    with errors_as_message(request):
        services.remove_member(membership=_member_of_organization(request, pk), actor=request.membership.user)
        messages.success(request, _("The member was removed. Their API tokens no longer work."))
    return redirect("organization")


@require_POST
@require_log_in
def switch(request: HttpRequest) -> HttpResponse:
    """Switch to another of the person's organizations."""
    organization_id = parse_row_id(request.POST.get("organization", ""))
    if organization_id is None:
        raise Http404
    if not selectors.memberships(user=logged_in_user(request)).filter(organization=organization_id).exists():
        raise Http404
    request.session[ORGANIZATION_SESSION_KEY] = organization_id
    return redirect("overview")


@require_http_methods(["GET", "POST"])
@login_required
def new(request: HttpRequest) -> HttpResponse:
    """Create an organization."""
    form = NameForm(request.POST if request.method == "POST" else None)
    if form.is_valid():
        with errors_in_form(form):
            membership = services.create_organization(user=logged_in_user(request), **form.cleaned_data)
            request.session[ORGANIZATION_SESSION_KEY] = membership.organization_id
            return redirect("overview")
    return render(request, "accounts/organization_new.html", {"form": form})


@never_cache
@require_http_methods(["GET", "POST"])
@member(Capability.VIEW)
def tokens(request: MemberRequest) -> HttpResponse:
    """List the member's API tokens. POST creates one and shows its secret once, because only a hash is stored."""
    form, secret = TokenForm(request.membership, request.POST if request.method == "POST" else None), ""
    if form.is_valid():
        with errors_in_form(form):
            _token, secret = services.create_token(membership=request.membership, **form.cleaned_data)
            form = TokenForm(request.membership)
    rows = selectors.tokens(membership=request.membership)
    context = {"form": form, "tokens": rows, "secret": secret, "now": timezone.now()}
    return render(request, "accounts/tokens.html", context)


@require_POST
@member(Capability.VIEW)
def revoke_token(request: MemberRequest, pk: int) -> HttpResponse:
    """Revoke one of the member's tokens."""
    token = get_object_or_404(selectors.tokens(membership=request.membership), pk=pk)
    services.revoke_token(token=token, actor=request.membership.user)
    messages.success(request, _("The token was revoked."))
    return redirect("tokens")
