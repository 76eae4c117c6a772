"""Actions of operators, the administrators of the installation: drain and resume a cluster, move a job's run.

`orders.stop_job_as_operator` stops a job.
"""

from __future__ import annotations

from django.db import transaction
from django.utils import timezone

from console.accounts.models import User
from console.accounts.services import record_audit_event
from console.core.enqueue import send_on_commit
from jobs import lifecycle
from jobs.dispatch import dispatch
from jobs.errors import AlreadyEnded, NotStarted
from jobs.models import ClusterStatus, Job
from jobs.orders import normalize_reason
from jobs.tasks import stop_job


def drain(*, cluster_name: str, actor: User, why: str) -> None:
    """Start no more runs on a cluster; started runs continue. Customers whose jobs wait see the reason `why`.

    Safe to repeat. Raises InvalidInput (`why`).
    """
    reason = normalize_reason(why)
    with transaction.atomic():
        status = ClusterStatus.objects.select_for_update().get(name=cluster_name)
        status.drained_since, status.drain_reason = status.drained_since or timezone.now(), reason
        status.save(update_fields=["drained_since", "drain_reason"])
        record_audit_event(
            organization=None, actor=actor, action="cluster.drained", target=cluster_name, data={"why": reason}
        )
        send_on_commit(dispatch, cluster_name)  # its scheduling pass stores the reason, which waiting jobs' pages show


def resume(*, cluster_name: str, actor: User) -> None:
    """Start runs on a drained cluster again. Safe to repeat."""
    with transaction.atomic():
        status = ClusterStatus.objects.select_for_update().get(name=cluster_name)
        if status.drained_since is None:
            return
        status.drained_since, status.drain_reason = None, ""
        status.save(update_fields=["drained_since", "drain_reason"])
        record_audit_event(organization=None, actor=actor, action="cluster.resumed", target=cluster_name)
        send_on_commit(dispatch, cluster_name)


def move_job(*, actor: User, job: Job, why: str) -> None:
    """End the job's run, free of charge, and start another attempt, which resumes from the last checkpoint.

    Safe to repeat. Raises InvalidInput (`why`), AlreadyEnded, and NotStarted if the job is queued.
    """
    reason = normalize_reason(why)
    with transaction.atomic():
        job = Job.objects.select_for_update().get(pk=job.pk)
        if job.is_ended:
            raise AlreadyEnded
        if lifecycle.request_move(job=job, why=reason) is None:
            raise NotStarted
        target = f"job:{job.pk}"
        record_audit_event(
            organization=job.organization,
            actor=actor,
            action="job.moved_by_operator",
            target=target,
            data={"why": reason},
        )
        # This ends only the run. `request_move` has marked the attempt as moved, so the job then gets another one.
        send_on_commit(stop_job, job.pk)
