"""Announce the deletion of job files: one email per organization, seven days (`NOTICE`) before.

Each job is announced once. If the time of the deletion is changed, `Job.deletion_notice` is cleared, so that the job is
announced again.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial

from django.conf import settings
from django.db import transaction
from django.db.models import QuerySet
from django.template.loader import render_to_string
from django.utils import timezone
from django.utils.translation import gettext as _

from console.accounts.emails import deliver, shared_connection
from console.accounts.models import Membership, User
from console.notifications import services as notifications
from jobs import results
from jobs.models import DeletionNotice, Job
from storage.models import Allocation

NOTICE = timedelta(days=7)
"""How long before the deletion it is announced: enough to read the email after a short absence."""
MAX_LISTED_JOBS = 50
"""How many jobs one email or notification lists, so that it stays short. The email gives the number of the others."""


@shared_connection()
def announce() -> int:
    """Send the notices that are due and return their number. Safe to repeat."""
    for organization_pk in _expiring().order_by().values_list("organization", flat=True).distinct():
        _write_notice(organization_pk)
    due = DeletionNotice.objects.filter(mailed_at=None).select_related("organization")
    # `deliver` marks the row as emailed and returns whether it sent the email.
    return sum(
        deliver(DeletionNotice.objects.filter(pk=notice.pk), partial(_mail, notice), _recipients(notice))
        for notice in due
    )


def files_expire_soon(job: Job) -> bool:
    """Whether the job's files will be deleted within NOTICE."""
    deletion_at = results.deletion_time(job)
    now = timezone.now()
    return deletion_at is not None and now < deletion_at <= now + NOTICE


def _expiring() -> QuerySet[Allocation]:
    """Return the storage quota's rows (`Allocation`) for jobs whose files will be deleted within NOTICE."""
    now = timezone.now()
    return Allocation.objects.filter(kind=Allocation.Kinds.RUN, kept_until__gt=now, kept_until__lte=now + NOTICE)


def _write_notice(organization_pk: int) -> None:
    """Write one notice about all jobs of an organization that are not announced yet."""
    expiring = [allocation.job_pk for allocation in _expiring().filter(organization=organization_pk)]
    with transaction.atomic():
        # With the lock, the second of two concurrent calls finds that the first has announced the job.
        unannounced = Job.objects.select_for_update().filter(pk__in=expiring, deletion_notice=None).order_by("pk")
        # Checked again, because the customer may have moved the deletion meanwhile.
        jobs = [job.pk for job in unannounced if files_expire_soon(job)]
        if jobs:
            notice = DeletionNotice.objects.create(organization_id=organization_pk)
            Job.objects.filter(pk__in=jobs).update(deletion_notice=notice)
            notifications.publish(
                organization=organization_pk, kind="files.expiring", data={"jobs": jobs[:MAX_LISTED_JOBS]}
            )


def _recipients(notice: DeletionNotice) -> set[User]:
    """Return the active members who want the email; nobody if the files of all its jobs are now kept longer."""
    if not notice.jobs.exists():
        return set()
    members = Membership.objects.filter(organization=notice.organization, user__is_active=True).select_related("user")
    return {member.user for member in members if notifications.wants_mail(member, "files.expiring")}


def _mail(notice: DeletionNotice) -> tuple[str, str]:
    """Return the subject and the text of the email."""
    jobs = sorted(notice.jobs.all(), key=lambda job: (results.deletion_time(job), job.pk))
    context = {
        "organization": notice.organization,
        "jobs": [(job, timezone.localtime(results.deletion_time(job))) for job in jobs[:MAX_LISTED_JOBS]],
        "others": max(0, len(jobs) - MAX_LISTED_JOBS),
        "url": settings.TRAINYARD_URL,
    }
    subject = _("Files of %(organization)s will be deleted") % {"organization": notice.organization}
    return subject, render_to_string("jobs/mail/deletion.txt", context)
