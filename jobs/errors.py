"""Errors of `jobs` that customers see, each with a stable code."""

from __future__ import annotations

from django.utils.translation import gettext_lazy as _

from console.core.errors import CustomerError


class JobsError(CustomerError):
    """Root of the errors of jobs."""

    code = "jobs_error"


class IdempotencyConflict(JobsError):
    """The idempotency key was used for another quote or free run."""

    code = "idempotency_conflict"
    message = _("This idempotency key was already used for another order. Use a new key.")


class QuoteBought(JobsError):
    """The quote was bought with another idempotency key."""

    code = "quote_bought"
    message = _("This quote was already bought. Request a new one to run again.")


class ChoiceUnavailable(JobsError):
    """Something that the quote names no longer exists."""

    code = "invalid"
    message = _("Something in this quote has changed. Request a new quote.")


class QuotaExceeded(JobsError):
    """A quota of the organization is used up."""

    code = "quota_exceeded"


class AlreadyEnded(JobsError):
    """The job has ended and cannot be cancelled."""

    code = "already_ended"
    message = _("This job has already ended and can't be cancelled.")


class NotStarted(JobsError):
    """The job is queued, so it has no run."""

    code = "not_started"
    message = _("This job waits in the queue and has no run.")


class StaleTransition(JobsError):
    """Another process changed the job's state first, so this change may no longer be right."""

    code = "stale_transition"
    message = _("The job's state has just changed. Check it and try again.")


class NoNotebooks(JobsError):
    """The installation has no host names for notebooks."""

    code = "no_notebooks"
    message = _("This installation has no notebooks. The administrator can set NOTEBOOK_URL.")


class NotExtensible(JobsError):
    """The notebook cannot be extended: it does not run, it is ending, or its cluster cannot move a deadline."""

    code = "not_extensible"
    message = _("Only a running notebook can be extended.")


class NoLogs(JobsError):
    """No job has logs for TensorBoard: none has started, or the files were deleted."""

    code = "no_logs"
    message = _("There are no logs to show. They exist once a job has started, until its files are deleted.")


class LogsUnreachable(JobsError):
    """The logs are on storage that the console does not share."""

    code = "logs_unreachable"
    message = _("These logs are on storage that the console can't read.")


class TooManyTools(JobsError):
    """The limit of open TensorBoards is reached, of the organization or of the installation."""

    code = "too_many_tools"
    message = _("Too many TensorBoards are open. They end when nobody looks at them for a while. Try again later.")


class ToolsUnavailable(JobsError):
    """TensorBoard cannot be started at the moment."""

    code = "tools_away"
    message = _("TensorBoard can't be started at the moment. Try again later.")
