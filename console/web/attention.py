"""Notices of the overview: money, failed jobs, files that will be deleted, storage and clusters.

Notices that the operator writes to everyone are not among them (`console.installation.models.Notice`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from billing.amounts import money
from billing.budgets import BudgetState, Runway
from billing.models import Account
from console.accounts.models import Membership, Organization
from console.accounts.roles import Capability
from jobs import expiry, job_search
from jobs.job_search import JobSearch
from storage.models import Allocation
from storage.trees import Usage

FAILED_JOB_PERIOD = timedelta(days=7)
"""How long a failed job is shown: a week, so that nobody misses one over a weekend."""
STORAGE_WARNING_SHARE = 0.9
"""The used share of the storage quota from which a notice is shown, while uploads still work."""
BUDGET_WARNING_PERCENT = 80
"""The used percentage of a budget from which a notice is shown; it is one of `budgets.THRESHOLDS`."""


@dataclass(frozen=True)
class Notice:
    """A notice, with a link (`action`, `url`) to the page where the reader can act."""

    kind: str
    """Identifies the notice in the page's HTML and in tests: `low_balance`, `failed_jobs` and so on."""
    text: str
    action: str
    url: str
    is_urgent: bool = False


@dataclass(frozen=True)
class OverviewData:
    """Data that the overview has already read, so that the notices need not read it again."""

    membership: Membership
    account: Account | None
    """The wallet, from `billing.selectors.wallet_with_settings`."""
    runway: Runway | None
    """How long the wallet lasts at its recent daily spend; None without a wallet."""
    budgets: list[BudgetState]
    usage: Usage
    silent_clusters: list[str]
    """The names of the clusters that do not respond."""


def notices(data: OverviewData) -> list[Notice]:
    """Return the notices, the urgent ones first."""
    organization = data.membership.organization
    all_notices = [
        *_money_notices(data),
        *_failed_job_notices(organization),
        *_file_notices(organization, data.usage),
        *_cluster_notices(data.silent_clusters),
    ]
    return sorted(all_notices, key=lambda notice: not notice.is_urgent)


def _money_notices(data: OverviewData) -> Iterator[Notice]:
    account, may_pay = data.account, data.membership.allows(Capability.PAY)
    if account is None:
        return
    action = _("Top up") if may_pay else _("Wallet")
    url = f"{reverse('wallet')}#top-up" if may_pay else reverse("wallet")
    runway = data.runway
    if runway and runway.is_low:
        text = _("The wallet balance is low: %(available)s is available, and the average daily spend is %(daily)s.") % {
            "available": money(account.available_minor, account.currency),
            "daily": money(runway.daily_minor, account.currency),
        }
        yield Notice("low_balance", text, action, url, is_urgent=True)
    top_up = getattr(account, "auto_top_up", None)  # a one-to-one relation: without a row there is no attribute
    if top_up is not None and top_up.failures:
        card = {"card": top_up.method_label}
        if top_up.is_on:
            text = _("The last automatic top-up from %(card)s failed.") % card
        else:
            text = _("Automatic top-ups from %(card)s failed and were switched off.") % card
        yield Notice("card", text, _("Cards"), reverse("card_list" if may_pay else "wallet"), is_urgent=True)
    storage = getattr(account, "storage_balance", None)
    if storage is not None and storage.unpaid_minor:
        text = _("%(amount)s for storage is unpaid. Top up before uploads stop.") % {
            "amount": money(storage.unpaid_minor, account.currency)
        }
        yield Notice("unpaid_storage", text, action, url, is_urgent=True)
    for state in data.budgets:
        if state.reached_threshold >= BUDGET_WARNING_PERCENT:
            yield _budget_notice(state)


def _budget_notice(state: BudgetState) -> Notice:
    percent = round(state.fraction * 100)
    if state.budget.user:
        text = _("%(percent)d%% of the budget of %(member)s is charged or held this month.") % {
            "percent": percent,
            "member": state.budget.user.email,
        }
    else:
        text = _("%(percent)d%% of the organization's budget is charged or held this month.") % {"percent": percent}
    is_exceeded = state.reached_threshold >= 100
    if is_exceeded:
        text = f"{text} {_('New orders are refused. Runs continue.')}"
    return Notice("budget", text, _("Budgets"), f"{reverse('cost_list')}#budgets", is_urgent=is_exceeded)


def _failed_job_notices(organization: Organization) -> Iterator[Notice]:
    search = JobSearch(state="failed", since=str(timezone.localdate() - FAILED_JOB_PERIOD))
    count = job_search.count(organization, search)
    if count:
        text = ngettext("%(count)d job of the last 7 days failed.", "%(count)d jobs of the last 7 days failed.", count)
        url = f"{reverse('job_list')}?{search.query_string}"
        yield Notice("failed_jobs", text % {"count": count}, _("Failed jobs"), url)


def _file_notices(organization: Organization, usage: Usage) -> Iterator[Notice]:
    runs = Allocation.objects.filter(organization=organization, kind=Allocation.Kinds.RUN)
    count = runs.filter(kept_until__lte=timezone.now() + expiry.NOTICE).count()
    usage_url = reverse("storage_usage")
    if count:
        text = ngettext(
            "Files of %(count)d job will be deleted within 7 days.",
            "Files of %(count)d jobs will be deleted within 7 days.",
            count,
        )
        yield Notice("deletion", text % {"count": count}, _("Usage"), usage_url)
    share = usage.counted_bytes / max(organization.quota.max_storage_bytes, 1)
    if share >= STORAGE_WARNING_SHARE:
        text = _("%(percent)d%% of the storage quota is used.") % {"percent": round(share * 100)}
        if share >= 1:
            text = f"{text} {_('Uploads are refused.')}"
        yield Notice("storage", text, _("Usage"), usage_url, is_urgent=share >= 1)


def _cluster_notices(silent_clusters: list[str]) -> Iterator[Notice]:
    for name in silent_clusters:
        text = _("The cluster %(name)s is not responding. You can still order; runs start when it responds again.")
        yield Notice("cluster", text % {"name": name}, _("Status"), reverse("status"))
