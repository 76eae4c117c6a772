"""An organization's quota of nodes that run at once, and the nodes that it runs."""

from __future__ import annotations

from django.db.models import Sum

from console.accounts.models import Organization, Quota
from jobs.models import Attempt, Job
from jobs.states import ACTIVE


def lock_quota(organization: Organization) -> Quota:
    """Return the organization's quota, locked until the transaction ends.

    Orders and claims of an organization take this lock first. So two requests cannot buy the same quote, and two claims
    cannot both take the last nodes of the quota.
    """
    return Quota.objects.select_for_update().get(organization=organization)


def running_nodes(organization: Organization | None = None) -> dict[int, int]:
    """Return how many nodes run on all clusters, by organization id. `organization` None: for all organizations."""
    attempts = Attempt.objects.filter(finished_at=None, job__state__in=ACTIVE).order_by()
    if organization is not None:
        attempts = attempts.filter(job__organization=organization)
    return dict(attempts.values_list("job__organization_id").annotate(total=Sum("granted_nodes")))


def free_nodes(job: Job, running: dict[int, int]) -> int:
    """Return how many more nodes the job's organization may run. `running` comes from `running_nodes`."""
    return job.organization.quota.max_running_nodes - running.get(job.organization_id, 0)
