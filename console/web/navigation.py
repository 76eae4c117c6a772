"""The context of `base.html`: sidebar, organization, wallet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from django.http import HttpRequest
from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _

from billing import selectors as billing
from console.accounts.models import Membership
from console.accounts.roles import Capability


@dataclass(frozen=True)
class Entry:
    """An entry of the sidebar. It is active on pages whose URL names start with one of `areas`."""

    title: str | Promise
    url_name: str
    icon: str
    areas: tuple[str, ...]
    is_active: bool = False


@dataclass(frozen=True)
class Section:
    """A group of entries in the sidebar; the first group has no title."""

    title: str | Promise
    entries: tuple[Entry, ...]


SECTIONS = (
    Section("", (Entry(_("Overview"), "overview", "layout-dashboard", ("overview",)),)),
    Section(
        _("Training"),
        (
            Entry(_("New training"), "training_new", "rocket", ("training_",)),
            Entry(_("Jobs"), "job_list", "list-details", ("job_",)),
            Entry(_("Sweeps"), "sweep_list", "adjustments-horizontal", ("sweep_",)),
            Entry(_("Notebooks"), "notebook_list", "notebook", ("notebook_",)),
            Entry(_("Status"), "status", "server-2", ("status",)),
        ),
    ),
    Section(
        _("Storage"),
        (
            Entry(_("Datasets"), "dataset_list", "database", ("dataset_",)),
            Entry(_("Models"), "model_list", "cube", ("model_",)),
            Entry(_("Workspaces"), "workspace_list", "folders", ("workspace_",)),
            Entry(_("Images"), "image_list", "package", ("image_", "registry_")),
            Entry(_("Secrets"), "secret_list", "lock", ("secret_",)),
            Entry(_("Usage"), "storage_usage", "chart-pie", ("storage_",)),
        ),
    ),
    Section(
        _("Account"),
        (
            Entry(_("Wallet"), "wallet", "wallet", ("wallet", "receipt_", "credit_", "card_")),
            Entry(_("Costs"), "cost_list", "chart-line", ("cost_", "budget_")),
            Entry(_("Invoices"), "invoice_list", "file-text", ("invoice_", "billing_details")),
            Entry(_("Organization"), "organization", "building", ("organization", "audit_log")),
            Entry(_("Notifications"), "notification_list", "info-circle", ("notification_", "webhook_")),
            Entry(_("API tokens"), "tokens", "key", ("token",)),
            Entry(_("Service"), "activation", "shield-check", ("activation",)),
        ),
    ),
    Section(_("Help"), (Entry(_("Documentation"), "docs", "book", ("docs",)),)),
)
"""The sidebar for members with every capability."""
REQUIRED_CAPABILITIES = {"training_new": Capability.RUN, "invoice_list": Capability.PAY}
"""The capability that an entry needs, if not every member has it."""
HELP = {
    "overview": ("user-guide", "get-started"),
    "training_new": ("user-guide", "understand-the-price"),
    "job_list": ("user-guide", "find-and-compare-jobs"),
    "sweep_list": ("user-guide", "search-for-good-parameters"),
    "notebook_list": ("user-guide", "use-a-notebook"),
    "dataset_list": ("user-guide", "use-datasets"),
    "model_list": ("user-guide", "publish-and-use-models"),
    "workspace_list": ("user-guide", "work-in-a-workspace"),
    "image_list": ("user-guide", "use-your-own-image"),
    "secret_list": ("user-guide", "set-variables-and-secrets"),
    "storage_usage": ("user-guide", "manage-storage"),
    "wallet": ("user-guide", "pay"),
    "cost_list": ("pricing", ""),
    "tokens": ("user-guide", "use-the-api"),
    "activation": ("user-guide", "leave"),
}
"""The guide and section that the help button on the pages of an entry opens."""


def context(request: HttpRequest) -> dict[str, Any]:
    """Return the variables of `base.html`. `may` says whether the member has each capability.

    `sections` and `wallet` are functions, so that only templates that use them cause queries.

    A member who lacks a second factor that the organization requires gets only `locked_membership` and `memberships`,
    for the menu that switches to another organization.
    """
    membership: Membership | None = getattr(request, "membership", None)
    if membership is None:
        return {"membership": None}
    if getattr(request, "lacks_second_factor", False):
        return {"membership": None, "locked_membership": membership, "memberships": getattr(request, "memberships", [])}
    match = request.resolver_match
    url_name = (match.url_name or "") if match else ""
    active = _active_entry(url_name)
    return {
        "membership": membership,
        "may": {capability.value: membership.allows(capability) for capability in Capability},
        "active_entry": active,
        "help": HELP.get(active),
        "sections": lambda: _sections(membership, active),
        # Cached for this request: a template may call it several times.
        "wallet": cache(lambda: billing.wallet(membership.organization)),
        "memberships": getattr(request, "memberships", []),
    }


def _active_entry(url_name: str) -> str:
    """Return the URL name of the entry that a page belongs to, or an empty string."""
    entries = (entry for section in SECTIONS for entry in section.entries)
    return next((entry.url_name for entry in entries if url_name.startswith(entry.areas)), "")


def _sections(membership: Membership, active: str) -> list[Section]:
    """Return the sections with the entries that the member's role allows, and the active entry marked."""
    hidden = {name for name, capability in REQUIRED_CAPABILITIES.items() if not membership.allows(capability)}
    return [
        Section(
            section.title,
            tuple(
                replace(entry, is_active=entry.url_name == active)
                for entry in section.entries
                if entry.url_name not in hidden
            ),
        )
        for section in SECTIONS
    ]
