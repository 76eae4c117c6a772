"""Open TensorBoard on the logs of jobs. The process of `manage.py run_tools` starts it, in a sandbox."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from django.conf import settings
from django.utils.translation import gettext as _

from console.accounts.models import Membership
from console.core.errors import InvalidInput
from jobs.clusters import cluster, resolve_cluster_name
from jobs.errors import LogsUnreachable, NoLogs, ToolsUnavailable, TooManyTools
from jobs.models import Attempt, Job
from runtime.backends.kubernetes.config import ClusterConfig
from runtime.errors import RuntimeFault
from runtime.tools import control
from runtime.tools.control import LogFolder, Session, SessionRequest

PATH = "/tools/"
"""The beginning of the URL paths of all tools. The key of a session follows."""
MAX_JOBS = 20
"""Maximum number of jobs in one TensorBoard, because each of their attempts is a mount in its sandbox."""
MAX_ATTEMPTS = 10
"""Maximum number of attempts of each job, for the same reason."""
_MAX_NAME_LENGTH = 60
"""Characters of a job's name in TensorBoard's list of runs, which is narrow."""


def tools_folder() -> Path:
    """Return the folder in which the process that owns the tools has its socket and its sessions.

    If PostgreSQL and Redis are embedded, their sockets are there too.
    """
    folder: Path = settings.EMBEDDED.socket_dir
    return folder


def url_path(key: str) -> str:
    """Return the URL path of a session, without a slash at its end."""
    return f"{PATH}{key}"


def is_available() -> bool:
    """Whether the process that starts TensorBoard (`manage.py run_tools`) runs. True also while it restarts."""
    return control.has_owner(tools_folder())


def open_session(*, membership: Membership, jobs: Sequence[Job]) -> str:
    """Start a TensorBoard with the logs of these jobs of the organization, and return its URL path.

    It shows the latest MAX_ATTEMPTS attempts of each job that have started.
    Only the member can open it. Raises InvalidInput for more than MAX_JOBS jobs, NoLogs, LogsUnreachable, TooManyTools,
    ToolsUnavailable.
    """
    if len(jobs) > MAX_JOBS:
        raise InvalidInput(_("Select at most %(most)d jobs for TensorBoard.") % {"most": MAX_JOBS})
    logs: list[LogFolder] = []
    is_unreachable = False
    for job in jobs:
        attempts = list(job.attempts.exclude(started_at=None).order_by("-number")[:MAX_ATTEMPTS])
        for attempt in reversed(attempts):
            try:
                log_folder = _logs_of(job, attempt, is_only=len(attempts) == 1)
            except RuntimeFault:
                is_unreachable = True
                continue
            if log_folder is None:  # the cluster does not share its storage
                is_unreachable = True
            elif Path(log_folder.folder).is_dir():
                logs.append(log_folder)
    if not logs:
        raise LogsUnreachable if is_unreachable else NoLogs
    request = SessionRequest(membership.organization_id, membership.user_id, tuple(logs))
    try:
        return f"{url_path(control.start(tools_folder(), request))}/"
    except control.TooManySessions:
        raise TooManyTools from None
    except control.ToolsUnavailable as error:
        raise ToolsUnavailable from error


def find_session(*, membership: Membership, key: str) -> Session | None:
    """Return the session with this key; None if it does not exist or is another member's."""
    session = control.find(tools_folder(), key)
    owner_ids = (membership.organization_id, membership.user_id)
    is_own = session is not None and (session.organization_id, session.user_id) == owner_ids
    return session if is_own else None


def _logs_of(job: Job, attempt: Attempt, *, is_only: bool) -> LogFolder | None:
    """Return an attempt's TENSORBOARD_LOGDIR; None if the console cannot read its cluster's storage.

    `is_only`: no other attempt of the job is shown, so the name need not contain its number. Raises RuntimeFault.
    """
    backend = cluster(attempt.backend)  # the column has a cluster's name
    if not backend.shares_storage:
        return None
    file_name = re.sub(r"[^A-Za-z0-9_.-]+", "_", job.name)[:_MAX_NAME_LENGTH]  # the name becomes a folder's name
    name = f"{job.pk}-{file_name}".strip("-_.")
    if not is_only:
        name += f"-attempt-{attempt.number}"
    run_folder = backend.run_folder(attempt.run_name)
    # TensorBoard's sandbox may only mount a folder that the run's code cannot replace by a link. For a sandboxed run
    # that is `run`, which is itself a mount in the run's sandbox. A pod mounts the run's whole folder, and its code
    # could replace `run` in it. So TensorBoard's sandbox mounts the whole folder too.
    if isinstance(settings.TRAINYARD_CLUSTERS.get(resolve_cluster_name(attempt.backend)), ClusterConfig):
        return LogFolder(name, str(run_folder), "run/tensorboard")
    return LogFolder(name, str(run_folder / "run"), "tensorboard")
