"""Daily limits of free runs (free estimates and image checks), per organization and per person.

A person's limit applies to all their organizations together, even if requests are concurrent.
"""

from __future__ import annotations

from datetime import timedelta

from django.db.models import Q
from django.utils import timezone

from console.accounts.models import Organization, User
from jobs.models import CHECK_SCRIPT, Job
from jobs.purchase import FREE_ESTIMATE_MARK

FREE_ESTIMATES = Q(order__quote__purchase__has_key=FREE_ESTIMATE_MARK)
CHECKS = Q(builtin_script=CHECK_SCRIPT)
"""The filters for the jobs of each kind of free run."""


def lock_user(user: User) -> None:
    """Lock the user until the transaction ends, so that two requests cannot take the same last free run.

    With `no_key`, other transactions can still write rows that refer to the user.
    """
    User.objects.select_for_update(no_key=True).get(pk=user.pk)


def left_today(kind: Q, *, organization: Organization, user: User | None, limit: int) -> int:
    """Return how many free runs of a kind are left, if organization and user may each order `limit` in 24 hours."""
    recent = Job.objects.filter(kind, queued_at__gt=timezone.now() - timedelta(days=1))
    used_count = recent.filter(organization=organization).count()
    if user is not None:
        used_count = max(used_count, recent.filter(order__placed_by=user).count())
    return max(0, limit - used_count)
