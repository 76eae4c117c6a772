"""Celery tasks: most of those that Celery beat sends, and `stop_job` and `extend_job`, which requests send.

The task that starts jobs is `dispatch.dispatch`. Periodic tasks are also in `checkout`, `notebook_endings` and
`sweeps.progress`.
"""

from __future__ import annotations

from celery import shared_task

from console.core.enqueue import send
from jobs import closure, clusters, expiry, packages, reconciliation, run_mails, storage_billing
from jobs.dispatch import dispatch


@shared_task
def reconcile(cluster_name: str = "") -> None:
    """Reconcile a cluster. Without a name, send one task per cluster, so that a slow cluster delays no other."""
    names = [cluster_name] if cluster_name else clusters.clusters_to_reconcile()
    if len(names) == 1:
        reconciliation.reconcile(names[0])
        return
    for name in names:
        send(reconcile, name)


@shared_task
def forget_runs() -> None:
    """Delete the files of ended runs that are no longer kept, and runs that belong to no job.

    Also send `telemetry.read_rest` again where output of an ended run is still unread, and measure the storage of jobs
    that `results.count_storage` missed.
    """
    reconciliation.delete_old_runs()


@shared_task
def announce_deletions() -> None:
    """Mail the members of organizations whose job files are deleted soon."""
    expiry.announce()


@shared_task
def install_packages() -> None:
    """Start and finish installations of packages, and start the jobs that waited for them."""
    for cluster_name in packages.advance():
        send(dispatch, cluster_name)


@shared_task
def remove_unused_packages() -> None:
    """Remove installed packages that no order has used for `packages.LAYER_RETENTION`."""
    packages.remove_unused()


@shared_task
def charge_storage() -> None:
    """Charge today's storage where that is still to do, and act where storage stays unpaid: see `storage_billing`."""
    storage_billing.charge_all()


@shared_task
def complete_closures() -> None:
    """Announce closures of organizations, and carry out those whose notice is over."""
    closure.announce()
    closure.complete_due()


@shared_task
def mail_run_ends() -> None:
    """Mail the ends of runs and sweeps to the members who ordered them."""
    run_mails.send_due()


@shared_task
def stop_job(job_pk: int) -> None:
    """Stop the run of a job that is cancelled, or whose attempt an operator ends so that another one starts."""
    reconciliation.stop(job_pk=job_pk)


@shared_task
def extend_job(job_pk: int) -> None:
    """Pass the new deadline of an extended job to the backend of its run."""
    reconciliation.reconcile_job(job_pk=job_pk)
