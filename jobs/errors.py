"""What jobs may refuse. One root, stable codes."""

from __future__ import annotations

from django.utils.translation import gettext_lazy as _

from console.accounts.errors import CustomerError


class JobsError(CustomerError):
    """Root of the errors of jobs."""

    code = "jobs_error"


class IdempotencyConflict(JobsError):
    """An idempotency key that bought another quote."""

    code = "idempotency_conflict"
    message = _("This idempotency key was used for another quote. Use a new key for a new order.")


class QuoteBought(JobsError):
    """A quote that was bought under another idempotency key."""

    code = "quote_bought"
    message = _("This quote has been bought already. Ask for a new one to run again.")


class ChoiceGone(JobsError):
    """Something the quote named is no longer there."""

    code = "invalid"
    message = _("Something this quote named has changed since. Ask for a new quote.")


class QuotaExceeded(JobsError):
    """The organization has as many open jobs as it may."""

    code = "quota_exceeded"


class AlreadyEnded(JobsError):
    """The job has ended, so it can't be cancelled."""

    code = "already_ended"
    message = _("This job has ended, so there is nothing to cancel.")


class StaleTransition(JobsError):
    """Somebody else changed the job's state first. What was to be done may no longer be right; look again."""

    code = "stale_transition"
    message = _("The job has just changed. Look at it again.")
