"""The files that runs write on their clusters: logs, results (RUN_DIR), checkpoints and outputs.

They count against the storage quota from the end of each attempt until they are deleted. `reconciliation` deletes them
at their `deletion_time`, and the customer may delete them earlier.
"""

from __future__ import annotations

import logging
from datetime import datetime, timedelta
from pathlib import Path

from celery import shared_task
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from console.accounts.models import User
from console.accounts.services import record_audit_event
from console.core.errors import CustomerError
from jobs.clusters import cluster
from jobs.errors import JobsError
from jobs.models import NOTEBOOK_SCRIPT, Attempt, Job
from jobs.states import ENDED
from runtime.errors import BackendUnavailable, RuntimeFault
from storage import catalog, quota, trees
from storage.errors import FileMissing, InUse
from storage.models import Allocation

DEFAULT_RETENTION = timedelta(days=30)
"""How long the files of an ended job are kept, unless the customer chooses another time (`Job.keep_until`). Customers
read this figure before they buy. A month is enough to evaluate a training and to start another one from it."""
MIN_RETENTION = timedelta(days=1)
"""How long the files are kept at least, even if `Job.keep_until` is earlier, so that there is time to read the log."""
MIN_MEASURE_INTERVAL = timedelta(minutes=1)
"""Minimum interval between measurements of a workspace that other open jobs use, because each lists all its files."""

INSPECTED_JOB = "inspected_job"
"""Key of the stored purchase of a notebook. Its value is the id of the ended job whose files the notebook reads, or
None: see `inspection`."""

logger = logging.getLogger(__name__)


class ClusterUnavailable(JobsError):
    """The cluster that has the files does not answer."""

    code = "cluster_away"
    message = _("The cluster that stores these files is not responding. Try again later.")


def checkpoint_key(job_pk: int) -> str:
    """Return the key by which backends know a job's checkpoints and outputs, which all its attempts share."""
    return f"job-{job_pk}"


def allocation_key(job_pk: int) -> str:
    """Return the key under which `storage.quota` counts a job's files."""
    return f"job:{job_pk}"


def deletion_time(job: Job) -> datetime | None:
    """Return when a job's files are deleted; None for a job that has not ended, because the time depends on its end."""
    if job.finished_at is None:
        return None
    if job.keep_until is None:
        return job.finished_at + DEFAULT_RETENTION
    return max(job.keep_until, job.finished_at + MIN_RETENTION)


def is_expired(job: Job) -> bool:
    """Whether the job's files should be deleted by now."""
    deletion_at = deletion_time(job)
    return deletion_at is not None and deletion_at <= timezone.now()


@shared_task
def count_storage(job_pk: int) -> None:
    """Measure the files of a job and of its workspace. Sent whenever an attempt of the job has ended."""
    job = Job.objects.select_related("workspace", "organization").get(pk=job_pk)
    measure(job)
    measured_at = job.workspace.measured_at
    is_fresh = measured_at is not None and timezone.now() - measured_at < MIN_MEASURE_INTERVAL
    # While other jobs use the workspace, a fresh measurement is enough: the last job to end measures it anyway.
    if not (is_fresh and Job.objects.filter(workspace=job.workspace_id).exclude(state__in=ENDED).exists()):
        catalog.measure_workspace(workspace=job.workspace)


def measure(job: Job, *, without: Attempt | None = None) -> None:
    """Measure the files of a job's ended attempts, except `without`, and count them against the quota.

    Safe to repeat.
    """
    nothing = total = trees.Measurement(trees.Usage())
    attempts = [attempt for attempt in job.attempts.exclude(finished_at=None) if attempt != without]
    for attempt in attempts:
        total += _run_usage(attempt)
    # `delete_run` deletes the job's checkpoints and outputs too. So if no attempt has files, only checkpoints that were
    # copied for an attempt can be left.
    if total != nothing or (attempts and job.checkpoints_copied_at):
        total += _shared_usage(attempts[-1])
    job.refresh_from_db(fields=["finished_at", "keep_until"])  # they may have changed while the files were measured
    key = allocation_key(job.pk)
    last_count = Allocation.objects.filter(key=key).first() or Allocation()
    quota.count_results(
        organization=job.organization,
        key=key,
        label=f"#{job.pk} {job.name}",
        # A folder that cannot be read now must not make the job look smaller than it was.
        usage=total.at_least(trees.Usage(last_count.size_bytes, last_count.entry_count)),
        kept_until=deletion_time(job),
    )


def is_counted(job_pk: int) -> bool:
    """Whether files of the job count against the storage quota."""
    return Allocation.objects.filter(key=allocation_key(job_pk)).exists()


def discard_count(job_pk: int) -> None:
    """Stop counting the files of a job against the storage quota."""
    Allocation.objects.filter(key=allocation_key(job_pk)).delete()


def is_needed(job: Job) -> bool:
    """Whether an open job still has to copy this job's checkpoints, or an open notebook reads its files."""
    dependents = Job.objects.filter(from_checkpoint=job, checkpoints_copied_at=None)
    return dependents.exclude(state__in=ENDED).exists() or _is_read_by_notebook(job)


def _is_read_by_notebook(job: Job) -> bool:
    """Whether an open notebook reads the job's files."""
    notebooks = Job.objects.filter(organization=job.organization_id, builtin_script=NOTEBOOK_SCRIPT)
    readers = notebooks.filter(**{f"order__quote__purchase__{INSPECTED_JOB}": job.pk})
    return readers.exclude(state__in=ENDED).exists()


def delete_unused_copy(attempt: Attempt) -> None:
    """Delete the copy of checkpoints that was made for a run which was never submitted, if it has expired.

    A cluster does not list such runs. Raises BackendUnavailable.
    """
    if is_expired(attempt.job):
        delete_run(attempt)
        Job.objects.filter(pk=attempt.job_id).update(checkpoints_copied_at=None)


def measure_uncounted(attempts: list[Attempt]) -> None:
    """Measure jobs that `count_storage` missed: they have no count, or have ended and have no deletion time."""
    job_ids = {attempt.job_id for attempt in attempts if attempt.finished_at}
    keys = [allocation_key(pk) for pk in job_ids]
    kept_until_by_key = dict(Allocation.objects.filter(key__in=keys).values_list("key", "kept_until"))
    for job in Job.objects.filter(pk__in=job_ids).select_related("organization").iterator():
        key = allocation_key(job.pk)
        if key not in kept_until_by_key or (job.is_ended and kept_until_by_key[key] is None):
            measure(job)


def delete_run(attempt: Attempt) -> None:
    """Delete the files of an ended attempt, and its job's checkpoints and outputs. Raises BackendUnavailable.

    Safe to repeat. Reconciliation repeats it as long as the cluster lists the run. So the run is deleted after the
    checkpoints and outputs, which all attempts of the job share.
    """
    backend, key = cluster(attempt.backend), checkpoint_key(attempt.job_id)
    backend.delete_shared(key)
    measure(attempt.job, without=attempt)
    backend.delete(attempt.run_name)
    backend.delete_shared(key)  # what processes on a lost machine have written until `delete` ended them


def remove(*, job: Job, user: User | None) -> None:
    """Delete all files of an ended job, but not its workspace. Safe to repeat. Raises InUse, ClusterUnavailable."""
    if not job.is_ended:
        raise InUse(_("This job has not ended. Wait for it to end, or cancel it first."))
    if _is_read_by_notebook(job):
        raise InUse(_("An open notebook reads the files of this job. Wait for it to end, or stop it first."))
    if is_needed(job):
        raise InUse(
            _("A queued job starts from the checkpoints of this job. Wait for it to start, or cancel it first.")
        )
    try:
        for attempt in job.attempts.all():
            delete_run(attempt)
    except BackendUnavailable:
        raise ClusterUnavailable from None
    record_audit_event(organization=job.organization, actor=user, action="job.results_removed", target=f"job:{job.pk}")


def _run_usage(attempt: Attempt) -> trees.Measurement:
    """Measure an attempt's own files: its logs and results."""
    try:
        return _usage_of(cluster(attempt.backend).run_folder(attempt.run_name))
    except RuntimeFault:  # the settings no longer name the cluster
        return trees.Measurement(trees.Usage())


def _shared_usage(attempt: Attempt) -> trees.Measurement:
    """Measure the checkpoints and outputs of the attempt's job, which all its attempts share."""
    try:
        backend, key = cluster(attempt.backend), checkpoint_key(attempt.job_id)
        return _usage_of(backend.checkpoint_folder(key)) + _usage_of(backend.output_folder(key))
    except RuntimeFault:  # the settings no longer name the cluster
        return trees.Measurement(trees.Usage())


def _usage_of(folder: Path) -> trees.Measurement:
    """Measure a folder. The measurement is incomplete if the console cannot read it."""
    try:
        return trees.measure(root=folder)
    except CustomerError as error:
        # A missing folder is empty: it was deleted, or the cluster's storage is not shared with the console.
        return trees.Measurement(trees.Usage(), is_complete=isinstance(error, FileMissing))
