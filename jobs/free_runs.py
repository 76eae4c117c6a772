"""Daily limits of free runs (probes and checks), per organization and per person.

A person's limit counts over all their organizations, also for concurrent requests.
"""

from __future__ import annotations

from datetime import timedelta

from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext as _

from console.accounts.models import Organization, User
from jobs.models import CHECK_SCRIPT, Job

PROBES = Q(order__quote__purchase__has_key="probe")
CHECKS = Q(builtin_script=CHECK_SCRIPT)
"""Filters of jobs by kind of free run."""


def title(job: Job, *, is_probe: bool | None = None) -> str:
    """Return a job's display name; that of a check or probe is in the reader's language."""
    if job.is_check:
        return _("Check of %(image)s") % {"image": job.image.name}
    if is_probe or (is_probe is None and "probe" in job.order.quote.purchase):
        return _("Probe of %(script)s") % {"script": job.code_path.rsplit("/", 1)[-1]}
    return job.name


def lock_user(user: User) -> None:
    """Lock the user until the transaction ends, so that two requests cannot take the same last free run."""
    User.objects.select_for_update(no_key=True).get(pk=user.pk)


def left_today(kind: Q, *, organization: Organization, user: User | None, limit: int) -> int:
    """Return how many free runs of the kind are left of `limit` in 24 hours, for the organization and for the user."""
    recent = Job.objects.filter(kind, queued_at__gt=timezone.now() - timedelta(days=1))
    used = recent.filter(organization=organization).count()
    if user is not None:
        used = max(used, recent.filter(order__placed_by=user).count())
    return max(0, limit - used)
