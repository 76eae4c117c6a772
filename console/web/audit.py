"""The page of the audit log, for owners."""

from __future__ import annotations

from typing import Any

from django import forms
from django.http import HttpResponse
from django.shortcuts import render
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy
from django.views.decorators.http import require_GET

from console.accounts import selectors
from console.accounts.models import Membership
from console.accounts.roles import Capability
from console.web.access import MemberRequest, member
from console.web.amounts import parse_row_id

PAGE_SIZE = 50
"""How many events one page shows."""
AREAS = {
    "account": _("Log-in and second factors"),
    "member": _("Members"),
    "invitation": _("Invitations"),
    "token": _("API tokens"),
    "service_account": _("Service accounts"),
    "organization": _("Organization"),
    "service": _("Activation of the service"),
    "secret": _("Secrets"),
    "registry": _("Registries"),
    "order": _("Orders"),
    "job": _("Jobs"),
    "sweep": _("Sweeps"),
    "notebook": _("Notebooks"),
    "shell": _("Shells"),
    "dataset": _("Datasets"),
    "model": _("Models"),
    "workspace": _("Workspaces"),
    "image": _("Images"),
    "budget": _("Budgets"),
    "debt": _("Debts"),
    "credit": _("Credit"),
    "refund": _("Refunds"),
    "webhook": _("Webhooks"),
}
"""The choices of the filter: the first word of an action, and its label."""


class FilterForm(forms.Form):
    """The filters of the audit log."""

    area = forms.ChoiceField(label=_("What"), required=False, choices=[("", _("Everything")), *AREAS.items()])
    member = forms.ChoiceField(label=_("Who"), required=False)
    address = forms.GenericIPAddressField(label=_("IP address"), required=False)
    since = forms.DateField(
        label=pgettext_lazy("first day", "From"), required=False, widget=forms.DateInput(attrs={"type": "date"})
    )
    until = forms.DateField(
        label=pgettext_lazy("last day", "To"), required=False, widget=forms.DateInput(attrs={"type": "date"})
    )

    def __init__(self, members: list[Membership], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        member_field = self.fields["member"]
        assert isinstance(member_field, forms.ChoiceField)  # noqa: S101  # for types
        member_choices = [(str(membership.user_id), membership.user.email) for membership in members]
        member_field.choices = [("", _("Everyone")), *member_choices]


@require_GET
@member(Capability.MANAGE)
def audit_log(request: MemberRequest) -> HttpResponse:
    """Show who did what, when and from which IP address, newest first."""
    organization = request.membership.organization
    form = FilterForm(list(organization.memberships.select_related("user").order_by("id")), request.GET)
    form.full_clean()
    filters = form.cleaned_data  # without invalid ones: the page shows their errors, and the others apply
    events = selectors.filtered_audit_events(
        organization=organization,
        area=filters.get("area", ""),
        actor=int(filters["member"]) if filters.get("member") else None,
        address=filters.get("address", ""),
        since=filters.get("since"),
        until=filters.get("until"),
        before=parse_row_id(request.GET.get("before", "")),
    )
    rows = list(events[: PAGE_SIZE + 1])  # one more shows whether there is a next page
    older_than = rows[PAGE_SIZE - 1].pk if len(rows) > PAGE_SIZE else None
    context = {"form": form, "events": rows[:PAGE_SIZE], "older": older_than, "is_filtered": any(filters.values())}
    return render(request, "accounts/audit_log.html", context)
