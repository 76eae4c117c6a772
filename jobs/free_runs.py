"""Daily limits of free runs (free estimates and checks), per organization and per person.

A person's limit applies to all their organizations together, even if requests are concurrent.
"""

from __future__ import annotations

from datetime import timedelta

from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext as _

from console.accounts.models import Organization, User
from jobs.models import CHECK_SCRIPT, Job

FREE_ESTIMATES = Q(order__quote__purchase__has_key="probe")
CHECKS = Q(builtin_script=CHECK_SCRIPT)
"""The filters for the jobs of each kind of free run."""


def title(job: Job, *, is_free_estimate: bool | None = None) -> str:
    """Return a job's name as pages show it. Names of checks and free estimates are in the reader's language.

    `is_free_estimate` None: read it from the quote, which may cost a query.
    """
    if job.is_check:
        return _("Check of %(image)s") % {"image": job.image.name}
    if is_free_estimate or (is_free_estimate is None and "probe" in job.order.quote.purchase):
        return _("Probe of %(script)s") % {"script": job.code_path.rsplit("/", 1)[-1]}
    return job.name


def lock_user(user: User) -> None:
    """Lock the user until the transaction ends, so that two requests cannot take the same last free run."""
    User.objects.select_for_update(no_key=True).get(pk=user.pk)


def left_today(kind: Q, *, organization: Organization, user: User | None, limit: int) -> int:
    """Return how many free runs of a kind are left, if organization and user may each order `limit` in 24 hours."""
    recent = Job.objects.filter(kind, queued_at__gt=timezone.now() - timedelta(days=1))
    used_count = recent.filter(organization=organization).count()
    if user is not None:
        used_count = max(used_count, recent.filter(order__placed_by=user).count())
    return max(0, limit - used_count)
