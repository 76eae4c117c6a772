"""What every page's frame shows: the sections, the organization, the wallet.

The one rule: nothing here asks the database before a template needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from django.http import HttpRequest
from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _

from billing import selectors as billing
from billing.models import Account
from console.accounts import selectors as accounts
from console.accounts.models import Membership
from console.accounts.roles import Capability


@dataclass(frozen=True)
class Entry:
    """One line of the sidebar; `areas` are the URL names that it stands for."""

    title: str | Promise
    url_name: str
    icon: str
    areas: tuple[str, ...]
    is_active: bool = False


@dataclass(frozen=True)
class Section:
    """A group of the sidebar."""

    title: str | Promise
    entries: tuple[Entry, ...]


SECTIONS = (
    Section("", (Entry(_("Overview"), "overview", "layout-dashboard", ("overview",)),)),
    Section(
        _("Training"),
        (
            Entry(_("New training"), "training_new", "rocket", ("training_",)),
            Entry(_("Jobs"), "job_list", "list-details", ("job_",)),
            Entry(_("Status"), "status", "server-2", ("status",)),
        ),
    ),
    Section(
        _("Storage"),
        (
            Entry(_("Datasets"), "dataset_list", "database", ("dataset_",)),
            Entry(_("Workspaces"), "workspace_list", "folders", ("workspace_",)),
            Entry(_("Images"), "image_list", "package", ("image_",)),
        ),
    ),
    Section(
        _("Account"),
        (
            Entry(_("Wallet"), "wallet", "wallet", ("wallet", "receipt_", "credit_", "card_")),
            Entry(_("Costs"), "cost_list", "chart-line", ("cost_", "budget_")),
            Entry(_("Invoices"), "invoice_list", "file-text", ("invoice_", "billing_details")),
            Entry(_("Organization"), "organization", "building", ("organization",)),
            Entry(_("API tokens"), "tokens", "key", ("token",)),
            Entry(_("Service"), "activation", "shield-check", ("activation",)),
        ),
    ),
)

NEEDED = {"training_new": Capability.RUN, "invoice_list": Capability.PAY}
"""What an entry is of use for, where not every member may."""


def context(request: HttpRequest) -> dict[str, Any]:
    """For every template: `membership`, `may`, and as callables `sections`, `wallet`, `memberships`."""
    membership: Membership | None = getattr(request, "membership", None)
    if membership is None:
        return {"membership": None}
    match = request.resolver_match
    here = (match.url_name or "") if match else ""
    return {
        "membership": membership,
        "may": {capability.value: membership.allows(capability) for capability in Capability},
        "sections": lambda: _sections(membership, here),
        "wallet": _once(lambda: billing.wallet(membership.organization)),
        "memberships": _once(lambda: list(accounts.memberships(user=membership.user))),
    }


def _sections(membership: Membership, here: str) -> list[Section]:
    """The sections that this role has a use for, the present one marked."""
    hidden = {name for name, needed in NEEDED.items() if not membership.allows(needed)}
    return [
        Section(
            section.title,
            tuple(
                Entry(entry.title, entry.url_name, entry.icon, entry.areas, is_active=here.startswith(entry.areas))
                for entry in section.entries
                if entry.url_name not in hidden
            ),
        )
        for section in SECTIONS
    ]


def _once(load: Callable[[], Account | list[Membership] | None]) -> Callable[[], Account | list[Membership] | None]:
    """`load`, asked at most once for one page."""
    return cache(load)
