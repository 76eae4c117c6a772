"""Tell members that a notebook is about to reach its time limit, so that they save their work or extend it.

Each time limit is announced once. The attempt's number and the job's `deadline_seconds` identify a limit, so after an
extension, or in another attempt, the new limit is announced too. `_announce_limit` holds the job's lock, which
extensions take too, while it looks for an earlier notification and writes the new one.
"""

from __future__ import annotations

from datetime import datetime
from functools import partial

from celery import shared_task
from django.conf import settings
from django.db import transaction
from django.template.loader import render_to_string
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _

from console.accounts.emails import deliver, shared_connection
from console.accounts.models import User
from console.notifications import services as notifications
from console.notifications.models import Notification
from jobs import notebooks, run_mails
from jobs.models import NOTEBOOK_SCRIPT, Job
from jobs.states import JobState

KIND = "notebook.ending"
"""The kind of the notification."""


@shared_task
def announce_and_mail() -> None:
    """Announce the notebooks that are about to reach their time limit, by notifications and emails."""
    announce()
    send_due()


def announce(now: datetime | None = None) -> int:
    """Write the notifications due at `now` (default: the current time); return their number. Safe to repeat."""
    now = now or timezone.now()
    running = Job.objects.filter(builtin_script=NOTEBOOK_SCRIPT, state=JobState.RUNNING)
    return sum(_announce_limit(job.pk, now) for job in running if _is_due(job, now))


@shared_connection()
def send_due() -> int:
    """Send the emails that are due and return their number. Safe to repeat.

    `deliver` marks each notification as mailed, even if it has no recipients, so none is considered twice.
    """
    due = Notification.objects.filter(mailed_at=None, kind=KIND).select_related("user")
    return sum(
        deliver(Notification.objects.filter(pk=each.pk), partial(_mail, each), _recipients(each)) for each in due
    )


def _is_due(job: Job, now: datetime) -> bool:
    """Return whether the notebook runs and is about to reach its time limit."""
    limit = notebooks.time_limit(job)
    return limit is not None and now < limit.ends_at <= now + notebooks.notice_before_end(job)


def _announce_limit(job_pk: int, now: datetime) -> bool:
    """Write the notification about the job's time limit. Return False if it is no longer due, or exists already."""
    with transaction.atomic():
        job = Job.objects.select_for_update(of=("self",)).select_related("order").get(pk=job_pk)
        limit = notebooks.time_limit(job)
        if limit is None or not _is_due(job, now):  # the notebook was extended or has ended meanwhile
            return False
        identity = {"job": job.pk, "attempt": limit.attempt, "deadline_seconds": job.deadline_seconds}
        earlier = Notification.objects.filter(organization=job.organization_id, kind=KIND)
        if earlier.filter(**{f"data__{name}": value for name, value in identity.items()}).exists():
            return False
        data = {"name": job.name, "ends_at": limit.ends_at.isoformat(), "is_extensible": notebooks.is_extensible(job)}
        notifications.publish(
            organization=job.organization_id, kind=KIND, data=identity | data, user=job.order.placed_by_id
        )
    return True


def _recipients(notification: Notification) -> list[User]:
    """Return who gets the email: nobody if the notebook has ended, reached its limit or was extended since."""
    data = notification.data
    job = Job.objects.get(pk=data["job"])
    limit = notebooks.time_limit(job)
    if limit is None or limit.ends_at <= timezone.now():
        return []
    is_same_limit = (limit.attempt, job.deadline_seconds) == (data["attempt"], data["deadline_seconds"])
    return run_mails.recipients(notification) if is_same_limit else []


def _mail(notification: Notification) -> tuple[str, str]:
    """Return the subject and the text of the email."""
    data = notification.data
    page = "notebook_extend" if data["is_extensible"] else "job_detail"
    context = {
        "ends_at": datetime.fromisoformat(data["ends_at"]),
        "is_extensible": data["is_extensible"],
        "url": f"{settings.TRAINYARD_URL}{reverse(page, args=[data['job']])}",
        "mail_settings_url": f"{settings.TRAINYARD_URL}{reverse('notification_list')}",
    }
    subject = _("Notebook #%(job)d %(name)s ends soon") % {"job": data["job"], "name": data["name"]}
    return subject, render_to_string("jobs/mail/notebook_ending.txt", context)
