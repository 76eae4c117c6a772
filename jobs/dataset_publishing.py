"""Publish files that are already on the platform as a dataset: a folder of a workspace, or files that a job wrote."""

from __future__ import annotations

from django.utils.translation import gettext_lazy as _

from console.accounts.models import User
from console.core.errors import InvalidInput
from jobs import job_files
from jobs.models import Job
from storage import catalog
from storage.errors import FileMissing, SourceChanged, UnsafePath, WrongKind
from storage.models import Dataset, DatasetVersion, Workspace
from storage.selectors import workspace_folder

ONE_SOURCE = _("Choose either a workspace or a job.")
"""The error for a request that names no source, or both."""


def publish_workspace_folder(
    *, dataset: Dataset, user: User | None, workspace: Workspace, path: str = ""
) -> DatasetVersion:
    """Publish a copy of a file or folder of a workspace as the dataset's next version.

    An empty path is the whole workspace. Raises InvalidInput, TooLarge, StorageFull.
    """
    return _publish(dataset, user, job_files.Location(workspace_folder(workspace), path.strip("/")))


def publish_job_files(*, dataset: Dataset, user: User | None, job: Job, path: str) -> DatasetVersion:
    """Publish a copy of a file or folder that a job wrote as the dataset's next version.

    `path` begins with `outputs/` or `checkpoints/`, as in `job_files`. Raises InvalidInput, TooLarge, StorageFull,
    ClusterUnavailable.
    """
    path = path.strip("/")
    if path.split("/")[0] not in job_files.RESULTS:
        raise InvalidInput(fields={"path": _("Choose a path that begins with outputs or checkpoints.")})
    try:
        location = job_files.resolve(job, path)
    except (FileMissing, UnsafePath) as error:
        raise InvalidInput(fields={"path": error.message}) from None
    return _publish(dataset, user, location)


def _publish(dataset: Dataset, user: User | None, location: job_files.Location) -> DatasetVersion:
    """Publish a copy of a file or folder as the dataset's next version. Errors of the path are reported at `path`."""
    try:
        return catalog.publish_copy(dataset=dataset, user=user, root=location.root, path=location.path)
    except (FileMissing, UnsafePath, WrongKind, SourceChanged) as error:
        raise InvalidInput(fields={"path": error.message}) from None
