"""Mail the end of a run or sweep to the member who ordered it, if the member wants such mails."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

from django.conf import settings
from django.template.loader import render_to_string
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _

from billing.amounts import money
from console.accounts.emails import deliver, shared_connection
from console.accounts.models import Membership, User
from console.notifications import services as notifications
from console.notifications.models import Notification
from jobs.messages import end_sentence, failure_sentence, sweep_end_sentence
from jobs.models import Job, Trial
from jobs.states import pays_for_hang

KINDS = ("job.succeeded", "job.failed", "job.cancelled", "sweep.ended")
"""Kinds of notifications that are emailed by this module."""
MAX_MAIL_DELAY = timedelta(days=1)
"""After this time an end is no longer emailed: after a long outage of the email server, old emails are of no use."""


@shared_connection()
def send_due() -> int:
    """Send the emails that are due and return their number. Safe to repeat."""
    since = timezone.now() - MAX_MAIL_DELAY
    due = Notification.objects.filter(mailed_at=None, kind__in=KINDS, created_at__gt=since).select_related("user")
    # `deliver` marks the row as mailed, and calls `_mail` in each recipient's language.
    return sum(deliver(Notification.objects.filter(pk=each.pk), partial(_mail, each), recipients(each)) for each in due)


def recipients(notification: Notification) -> list[User]:
    """Return the member who ordered the run or sweep, if the member wants the email; else nobody."""
    user = notification.user
    # The end of a trial is not emailed, because one email about the end of its sweep is enough.
    is_trial = "job" in notification.data and Trial.objects.filter(job=notification.data["job"]).exists()
    if user is None or not user.is_active or is_trial:
        return []
    member = Membership.objects.filter(organization=notification.organization_id, user=user).first()
    return [user] if member and notifications.wants_mail(member, notification.kind) else []


def _mail(notification: Notification) -> tuple[str, str]:
    """Return the subject and the text of the email."""
    return _sweep_mail(notification) if notification.kind == "sweep.ended" else _job_mail(notification)


def _sweep_mail(notification: Notification) -> tuple[str, str]:
    data = notification.data
    best = data["best"]
    context = {
        "sentence": sweep_end_sentence(data),
        "parameters": best and " ".join(f"{name}={value}" for name, value in best["parameters"].items()),
        "url": f"{settings.TRAINYARD_URL}{reverse('sweep_detail', args=[data['sweep']])}",
        "mail_settings_url": f"{settings.TRAINYARD_URL}{reverse('notification_list')}",
    }
    subject = _("Sweep %(sweep)d %(name)s ended") % {"sweep": data["sweep"], "name": data["name"]}
    return subject, render_to_string("jobs/mail/sweep_end.txt", context)


def _job_mail(notification: Notification) -> tuple[str, str]:
    job = Job.objects.select_related("order__hold__quote", "organization").get(pk=notification.data["job"])
    attempt = job.attempts.last()
    failure = attempt.failure if attempt else None
    context = {
        "job": job,
        "sentence": end_sentence(
            job.reason,
            is_hang_charged=pays_for_hang(failure),
            is_free=notification.data["charged_minor"] == 0,
            is_notebook=job.is_notebook,
        ),
        "failure": failure_sentence(failure) if failure else "",
        "charged": money(notification.data["charged_minor"], notification.data["currency"]),
        "url": f"{settings.TRAINYARD_URL}{reverse('job_detail', args=[job.pk])}",
        "mail_settings_url": f"{settings.TRAINYARD_URL}{reverse('notification_list')}",
    }
    subject = _("#%(job)d %(name)s: %(state)s") % {"job": job.pk, "name": job.name, "state": job.state_title}
    return subject, render_to_string("jobs/mail/end.txt", context)
