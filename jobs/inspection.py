"""Notebooks that read the files of an ended job, for example to look into its failure.

No shell can be opened any more in the nodes of an ended job. A notebook can have the same image, workspace, datasets,
packages and node type, and mounts the job's checkpoints and outputs read-only. Those two folders are kept while the
notebook is open (`results.is_needed`).
"""

from __future__ import annotations

import posixpath
from pathlib import Path

from django.utils.translation import gettext_lazy as _

from console.accounts.models import Organization
from console.core.errors import CustomerError
from jobs import job_files, results
from jobs.clusters import resolve_cluster_name
from jobs.errors import JobsError
from jobs.models import Job
from runtime.specs import JOBS_TARGET, Mount


class NotInspectable(JobsError):
    """A notebook cannot read the files of a job."""

    code = "not_inspectable"
    message = _("A notebook cannot read the files of this job. Choose another job.")


def find_job(*, organization: Organization, pk: int, cluster_name: str) -> Job:
    """Return the ended job whose files a notebook on the cluster can read. Raises NotInspectable."""
    job = Job.objects.filter(organization=organization, pk=pk).first()
    if job is None:
        raise NotInspectable(_("This job does not exist. Choose one of your own jobs."))
    if not job.is_ended:
        raise NotInspectable(
            _("Job #%(job)d has not ended. Wait for it to end, or choose another job.") % {"job": job.pk}
        )
    attempt = job.attempts.last()
    if attempt is None or results.is_expired(job) or not _folders(job):
        raise NotInspectable(_("Job #%(job)d has no files. It wrote none, or they were deleted.") % {"job": job.pk})
    if resolve_cluster_name(attempt.backend) != cluster_name:  # the column has a cluster's name
        sentence = _("The files of job #%(job)d are on another cluster. Choose a node spec of that cluster.")
        raise NotInspectable(sentence % {"job": job.pk})
    return job


def mounts_of(notebook: Job) -> tuple[Mount, ...]:
    """Return the mounts of the folders of the job whose files the notebook reads: at `/jobs/<number>/<folder>`.

    Empty if the notebook reads no job's files.
    """
    if not notebook.is_notebook or not (pk := notebook.order.quote.purchase.get(results.INSPECTED_JOB)):
        return ()
    job = Job.objects.filter(organization=notebook.organization_id, pk=pk).first()
    folders = {} if job is None else _folders(job)
    return tuple(Mount(str(folder), posixpath.join(JOBS_TARGET, str(pk), name)) for name, folder in folders.items())


def _folders(job: Job) -> dict[str, Path]:
    """Return the job's folders that exist, by name."""
    folders = {}
    for name in job_files.RESULTS:
        try:
            location = job_files.resolve(job, name)
        except CustomerError:  # the settings no longer name the cluster
            continue
        if location.root.is_dir():
            folders[name] = location.root
    return folders
