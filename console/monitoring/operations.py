"""The figures on the first page of /admin/: revenue, utilization, the queue, failures, and what needs attention.

Sums over past rows are cached for some minutes; open work is counted each time, through partial indexes.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import redis
from django.db.models import Count, F, Max, Min, Q, Sum
from django.urls import reverse
from django.utils import timezone
from django.utils.timesince import timesince
from django.utils.translation import gettext as _

from billing.amounts import money
from billing.models import Receipt, StripeEvent
from console.accounts.reports import Table
from console.core import optional_cache
from console.observability import heartbeats
from jobs import closure
from jobs.models import Attempt, Job
from jobs.states import ACTIVE, JobState

REVENUE_DAYS, FAILURE_DAYS = 30, 7
"""How many days back the page sums charges and failures."""
SUMS_CACHE_SECONDS = 300
"""How long these sums are cached, because computing them reads many rows."""
STUCK_AFTER = timedelta(minutes=30)
"""A job counts as stuck if it starts or stops for longer than this. Pulling an image and writing a last checkpoint take
less time."""


@dataclass(frozen=True)
class Figure:
    """A figure on the page, as text. `href` is the admin page of the rows that it counts, if there is one.

    `is_bad` marks a problem.
    """

    title: str
    value: str
    href: str = ""
    is_bad: bool = False


def figures() -> list[Figure]:
    """Return the figures, in the order of the page."""
    return [*_revenue_figures(), *_open_work(), *_problems()]


def tables() -> list[Table]:
    """Return the tables: utilization by cluster, and failures by reason."""
    return [_utilization(), _failures()]


def _revenue_figures() -> list[Figure]:
    """Return what was charged in each currency."""
    title = _("Charged in %(days)d days") % {"days": REVENUE_DAYS}
    href = reverse("admin:billing_receipt_changelist")
    sums = optional_cache.get_or_compute("operations:revenue", _sum_revenue, SUMS_CACHE_SECONDS)
    return [Figure(title, money(total, currency), href) for currency, total in sums] or [Figure(title, "0", href)]


def _sum_revenue() -> list[tuple[str, int]]:
    """Return the sum of the last REVENUE_DAYS' receipts by currency, in minor units."""
    since = timezone.now() - timedelta(days=REVENUE_DAYS)
    sums = Receipt.objects.filter(created_at__gte=since).order_by("currency").values_list("currency")
    return list(sums.annotate(total=Sum("total_minor")))


def _open_work() -> list[Figure]:
    """Return the numbers of running jobs, of the nodes that they use and of waiting jobs, and the longest wait."""
    jobs_url = reverse("admin:jobs_job_changelist")
    queued = Job.objects.filter(state=JobState.QUEUED).aggregate(count=Count("pk"), since=Min("queued_at"))
    open_attempts = Attempt.objects.filter(finished_at=None, job__state__in=ACTIVE)
    running = open_attempts.aggregate(count=Count("pk"), nodes=Sum("granted_nodes"))
    return [
        Figure(_("Runs on the clusters"), str(running["count"]), f"{jobs_url}?state__in={','.join(sorted(ACTIVE))}"),
        Figure(_("Nodes in use"), str(running["nodes"] or 0)),
        Figure(_("Waiting jobs"), str(queued["count"]), f"{jobs_url}?state__exact={JobState.QUEUED}"),
        Figure(_("Longest wait"), timesince(queued["since"]) if queued["since"] else "–"),
    ]


def _problems() -> list[Figure]:
    """Return the numbers of things that an administrator must look after; 0 is good."""
    jobs_url = reverse("admin:jobs_job_changelist")
    stuck_before = timezone.now() - STUCK_AFTER
    active = Job.objects.filter(state__in=ACTIVE).annotate(claimed=Max("attempts__claimed_at"))
    stuck = active.filter(
        Q(state=JobState.STARTING, claimed__lt=stuck_before)
        | Q(state=JobState.STOPPING, cancel_requested_at__lt=stuck_before)
    )
    stuck_count = stuck.count()
    quarantined_count = StripeEvent.objects.filter(state=StripeEvent.States.QUARANTINED).count()
    unpaid_count = len(closure.accounts_to_pay_back())
    return [
        Figure(
            _("Stuck jobs"),
            str(stuck_count),
            f"{jobs_url}?state__in={JobState.STARTING},{JobState.STOPPING}",
            is_bad=stuck_count > 0,
        ),
        Figure(
            _("Quarantined payment events"),
            str(quarantined_count),
            reverse("admin:billing_stripeevent_changelist") + "?state__exact=quarantined",
            is_bad=quarantined_count > 0,
        ),
        Figure(
            _("Closed organizations with money left"),
            str(unpaid_count),
            reverse("admin:accounts_closure_changelist"),
            is_bad=unpaid_count > 0,
        ),
    ]


def _utilization() -> Table:
    """Return each cluster's resources and their use, as a reconciliation last reported them. Without Redis, no rows."""
    try:
        reports = heartbeats.latest(heartbeats.recent(), heartbeats.CLUSTER)
    except redis.RedisError:
        reports = {}
    names = {"cpus": _("CPUs"), "memory_mib": _("Memory"), "gpus": _("GPUs")}
    rows = []
    for cluster, report in sorted(reports.items()):
        free_amounts = {(resource, gpu_type): amount for resource, gpu_type, amount in report.details.get("free", ())}
        for resource, gpu_type, total in report.details.get("total", ()):
            used_share = (total - free_amounts.get((resource, gpu_type), 0)) / total if total else 0
            total_text = f"{total / 1024:.0f} GiB" if resource == "memory_mib" else f"{total:g}"
            label = f"{names.get(resource, resource)} {gpu_type}".strip()
            rows.append((cluster, label, total_text, f"{used_share:.0%}"))
    return Table(_("Utilization"), (_("Cluster"), _("Resource"), _("Total"), _("In use")), rows)


def _failures() -> Table:
    """Return how many jobs ended by which reason in the last FAILURE_DAYS, the most frequent first."""
    counts = optional_cache.get_or_compute("operations:ends", _count_by_reason, SUMS_CACHE_SECONDS)
    total = sum(count for _reason, count in counts)
    labels = dict(Job.Reasons.choices)
    rows = [(str(labels.get(reason, reason)), str(count), f"{count / total:.1%}") for reason, count in counts]
    title = _("Ended jobs by reason, %(days)d days") % {"days": FAILURE_DAYS}
    return Table(title, (_("Reason"), _("Jobs"), _("Share")), rows)


def _count_by_reason() -> list[tuple[str, int]]:
    """Return (reason, number of jobs) of the last FAILURE_DAYS, the most frequent first."""
    since = timezone.now() - timedelta(days=FAILURE_DAYS)
    ended = Job.objects.filter(finished_at__gte=since).order_by().values_list("reason")
    return list(ended.annotate(count=Count("pk")).order_by(F("count").desc(), "reason"))
