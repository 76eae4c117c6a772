"""Start a job from the checkpoints of an earlier one.

A Celery task copies them into the job's own checkpoint folder before the first attempt is submitted. So the code finds
them in CHECKPOINT_DIR, as after a retry. The earlier job keeps its checkpoints.
"""

from __future__ import annotations

from django.conf import settings
from django.db import transaction
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from console.accounts.models import Organization
from console.core.errors import CustomerError
from jobs import job_files, results
from jobs.clusters import cluster
from jobs.errors import JobsError
from jobs.models import Attempt, Job
from runtime.errors import InvalidSpec, RuntimeFault
from storage import files, quota
from storage.errors import FileMissing
from storage.quota import Reservation
from storage.tree_copy import CopyResult, copy_tree


class NoCheckpoints(JobsError):
    """A job cannot start from the checkpoints of another one."""

    code = "no_checkpoints"
    message = _("The run cannot start from these checkpoints. Choose another job.")


def find_source(*, organization: Organization, pk: int, cluster_name: str) -> Job:
    """Return the ended job whose checkpoints a run on the cluster can start from. Raises NoCheckpoints."""
    job = Job.objects.filter(organization=organization, pk=pk).first()
    if job is None:
        raise NoCheckpoints(_("This job does not exist. Choose one of your own jobs."))
    if not job.is_ended:
        raise NoCheckpoints(
            _("Job #%(job)d has not ended. Wait for it to end, or choose another job.") % {"job": job.pk}
        )
    attempt = job.attempts.last()
    if attempt is not None and not _shares_storage(attempt.backend):
        sentence = _(
            "The cluster of job #%(job)d does not share its storage with the console, so its checkpoints can't be "
            "copied. Choose another job."
        )
        raise NoCheckpoints(sentence % {"job": job.pk})
    if not _shares_storage(cluster_name):
        raise NoCheckpoints(
            _("The cluster of this node spec can't get the files of job #%(job)d. Choose another node spec.")
            % {"job": job.pk}
        )
    if not _has_checkpoints(job):
        raise NoCheckpoints(
            _("Job #%(job)d has no checkpoints. It wrote none, or they were deleted.") % {"job": job.pk}
        )
    return job


def awaits_copy(attempt: Attempt) -> bool:
    """Whether the attempt's job starts from checkpoints that are not copied yet."""
    # Read from the database, because another process may have copied since `attempt.job` was read.
    return Job.objects.filter(pk=attempt.job_id, from_checkpoint__isnull=False, checkpoints_copied_at=None).exists()


def copy_for(attempt: Attempt) -> None:
    """Copy the checkpoints that the attempt's job starts from, and count them against the quota.

    Does nothing if they are already copied. The caller holds `locks.copies_lock`, because two copies for one job would
    write the same folder. Raises InvalidSpec (with the field `from_checkpoint`) and BackendUnavailable.
    """
    job = Job.objects.select_related("organization", "from_checkpoint").get(pk=attempt.job_id)
    source = job.from_checkpoint
    if source is None or job.checkpoints_copied_at is not None:
        return
    # Holds the result of `copy_tree`, since `fill_checkpoints` ignores what its function returns.
    copies: list[CopyResult] = []
    with Reservation(job.organization, label=f"#{job.pk} {job.name}") as reservation:
        try:
            root, path = job_files.resolve(source, "checkpoints")
            cluster(attempt.backend).fill_checkpoints(
                results.checkpoint_key(job.pk),
                lambda folder: copies.append(
                    copy_tree(
                        root=root,
                        path=path,
                        target=folder,
                        counter=reservation,
                        max_entries=settings.MAX_ARCHIVE_FILES,
                        keep_links=True,  # only the run follows them, inside its sandbox
                    )
                ),
            )
        except CustomerError as error:
            # Another try would rarely succeed. After an InvalidSpec, `dispatch` ends the attempt without a retry.
            raise InvalidSpec(f"The checkpoints can't be copied: {error}", field="from_checkpoint") from error
        # In one transaction, so that at any moment either the reservation or the count holds the quota, and a copy that
        # is marked as done is counted.
        with transaction.atomic():
            quota.count_results(
                organization=job.organization,
                key=results.allocation_key(job.pk),
                label=f"#{job.pk} {job.name}",
                usage=copies[0].usage,
                kept_until=None,  # set by `results.measure` once the job has ended
            )
            reservation.release()
            Job.objects.filter(pk=job.pk).update(checkpoints_copied_at=timezone.now())


def discard_copy(attempt: Attempt) -> None:
    """Delete the copied checkpoints because the first attempt could not be started.

    The job may wait for long or never run, and the copy counts against the quota. The next attempt copies them again.
    Does nothing for later attempts, whose folder may have checkpoints of the job itself.
    """
    if attempt.number == 1 and Job.objects.filter(pk=attempt.job_id).exclude(checkpoints_copied_at=None).exists():
        # `checkpoints_copied_at` is cleared last: by it, `finish_discard` and `results.delete_unused_copy` find what
        # an interrupted call has left.
        results.discard_count(attempt.job_id)
        cluster(attempt.backend).delete_shared(results.checkpoint_key(attempt.job_id))
        Job.objects.filter(pk=attempt.job_id).update(checkpoints_copied_at=None)


def finish_discard(attempt: Attempt) -> None:
    """Delete the rest of a copy if a call of `discard_copy` was interrupted.

    Such a copy is not counted any more, but its job still has `checkpoints_copied_at`.
    """
    if attempt.job.from_checkpoint_id is not None and not results.is_counted(attempt.job_id):
        discard_copy(attempt)


def _has_checkpoints(job: Job) -> bool:
    """Whether the job's checkpoint folder has files that are not about to be deleted."""
    try:
        root, path = job_files.resolve(job, "checkpoints")
        return not results.is_expired(job) and bool(files.list_folder(root=root, path=path, limit=1).entries)
    except FileMissing:
        return False


def _shares_storage(cluster_name: str) -> bool:
    """Whether the console can read and write the files of the cluster's runs."""
    try:
        return cluster(cluster_name).shares_storage
    except RuntimeFault:  # the settings no longer name the cluster, so nothing can be copied
        return False
