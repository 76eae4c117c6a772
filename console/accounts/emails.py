"""Send mails once, in each recipient's language and time zone, and retry after failures.

A row, such as an Invitation, marks a mail as due until its `mailed_at` is set. Each recipient gets an email of their
own. A worker leases the recipient, sends, and stores that the email was sent. Mails are never sent inside a
transaction. A worker that is killed loses no mail. If it was killed after sending and before storing, one recipient
gets the mail again. So does a recipient whose mail the server accepted without saying so in time.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from smtplib import SMTPDataError, SMTPException, SMTPNotSupportedError, SMTPRecipientsRefused, SMTPSenderRefused
from typing import Any, Protocol

from celery import shared_task
from django.conf import settings
from django.core.mail import EmailMessage, get_connection
from django.core.mail.backends.base import BaseEmailBackend
from django.db import transaction
from django.db.models import Model, QuerySet
from django.template.loader import render_to_string
from django.utils import timezone, translation
from django.utils.translation import gettext as _

from console.accounts import zones
from console.accounts.models import EmailDelivery

logger = logging.getLogger(__name__)
PERMANENT_FAILURE = 500
"""The lowest SMTP code of permanent failures; lower codes may be retried."""
SERVER_CLOSES = 421
"""The SMTP code with which a server closes the connection, for example after as many emails as one may carry."""
LEASE = timedelta(minutes=10)
"""How long a worker may take to send one email. Each step of SMTP takes at most `settings.EMAIL_TIMEOUT`."""
SILENCE = timedelta(hours=2)
"""How long an address gets no email after the server did not answer in time about it: the server may ask a mail server
of that address that hangs. Longer than the interval of the slowest task, so that the address does not keep each run of
it from later recipients."""
MAX_TIMEOUTS = 2
"""After this many time-outs in a row the server itself seems to hang, and emails pause."""
PAUSE_SECONDS = 300.0
"""How long a worker process sends no emails while the server hangs. Otherwise it would wait for each of them."""
TRY_FOR = timedelta(days=7)
"""How long an email is tried again while the server refuses it for now, or drops the connection. Without this limit, a
full mailbox, or a domain that has gone, would be tried every minute for ever."""
ABANDONED_AFTER = timedelta(days=7)
"""After this time without a try, an email is no longer due, because due emails are tried at least once an hour. Then
the rows of its recipients (EmailDelivery) are deleted."""
Renderer = Callable[[], tuple[str, str]]
"""Renders subject and text in the active language and time zone."""
_connection: ContextVar[BaseEmailBackend | None] = ContextVar("connection", default=None)
# Of this process: the time-outs in a row, and until when it sends no emails, by the monotonic clock.
_timeouts = 0
_paused_until = 0.0


class _Result(enum.Enum):
    """What the mail server did with an email."""

    DONE = enum.auto()
    """It accepted it, or refused it for good."""
    LATER = enum.auto()
    """It may accept it later."""
    SILENT = enum.auto()
    """It did not answer in time, so it may have accepted it."""


class Recipient(Protocol):
    """The recipient of an email. A `User` is one."""

    @property
    def email(self) -> str:
        """The email address."""

    @property
    def language(self) -> str:
        """A code of `settings.LANGUAGES`; empty for the default."""

    @property
    def time_zone(self) -> str:
        """The IANA name of the chosen time zone; empty: the browser's."""

    @property
    def browser_time_zone(self) -> str:
        """The IANA name that the browser last sent; empty: the installation's."""


@dataclass(frozen=True)
class Guest:
    """A recipient without an account."""

    email: str
    language: str
    time_zone: str = ""
    browser_time_zone: str = ""


@contextmanager
def shared_connection() -> Iterator[BaseEmailBackend]:
    """Let all calls of `deliver` in this block use one connection to the mail server, and close it at the end.

    The connection opens at the first email. Also a decorator.
    """
    if connection := _connection.get():
        yield connection
        return
    connection = get_connection()
    token = _connection.set(connection)
    try:
        yield connection
    finally:
        _connection.reset(token)
        with suppress(OSError, SMTPException):
            connection.close()


def deliver(rows: QuerySet[Any], render: Renderer, to: Iterable[Recipient]) -> bool:
    """Send an email to each recipient, then set `mailed_at`. Return whether this call completed the email.

    `rows` selects the one row that marks the email as due. Several workers may call this at once: each recipient gets
    one email. After a failure the next periodic task sends to those who have not got it.
    """
    pk = rows.filter(mailed_at=None).values_list("pk", flat=True).first()
    if pk is None:
        return False
    source = _source(rows.model, pk)
    addresses_by_locale: dict[tuple[str, str], list[str]] = {}
    for recipient in to:
        zone = zones.zone(recipient.time_zone, recipient.browser_time_zone).key
        addresses_by_locale.setdefault((recipient.language or settings.LANGUAGE_CODE, zone), []).append(recipient.email)
    mails = []
    for (language, zone), addresses in sorted(addresses_by_locale.items()):
        with translation.override(language), timezone.override(zone):
            subject, text = render()
        subject_line = " ".join(f"{settings.ACCOUNT_EMAIL_SUBJECT_PREFIX}{subject}".split())
        mails += [EmailMessage(subject_line, text, None, [address]) for address in sorted(addresses)]
    EmailDelivery.objects.filter(source=source).update(seen_at=timezone.now())
    _send_to_waiting(rows, source, mails)
    return _complete(rows, source, {mail.to[0] for mail in mails})


def forget_sent(row: Model) -> None:
    """Let the next email of this row go to all recipients, also to those who got the last one.

    Call this where a row becomes due again, in the transaction that has locked it.
    """
    EmailDelivery.objects.filter(source=_source(type(row), row.pk)).delete()


def _source(model: type[Model], pk: object) -> str:
    """Return `EmailDelivery.source` of the row that marks an email as due."""
    return f"{model.__name__}:{pk}"


def send_approval(user: Recipient) -> bool:
    """Tell a person that they can log in now. Returns False if the email could not be sent; there is no retry."""
    with translation.override(user.language or settings.LANGUAGE_CODE):
        subject = f"{settings.ACCOUNT_EMAIL_SUBJECT_PREFIX}{_('Your account was approved')}"
        text = render_to_string("accounts/mail/approval.txt", {"url": settings.TRAINYARD_URL})
    try:
        return bool(EmailMessage(subject, text, None, [user.email]).send())
    except (OSError, SMTPException):
        logger.warning("The mail about an approved account could not be sent.", exc_info=True)
        return False


@shared_task(name="console.accounts.emails.forget_abandoned")
def forget_abandoned() -> None:
    """Delete the recipients of emails that are no longer due, for example because the row was deleted."""
    EmailDelivery.objects.filter(seen_at__lt=timezone.now() - ABANDONED_AFTER).delete()


def _send_to_waiting(rows: QuerySet[Any], source: str, mails: list[EmailMessage]) -> None:
    """Send the emails, each with one recipient, that were not sent yet and that no other worker is sending."""
    with shared_connection() as connection:
        for mail in mails:
            if _is_paused():
                return
            try:
                connection.open()  # again, if it was closed after a failure
                if delivery := _claim(rows, source, mail.to[0]):
                    _release(delivery, _send_mail(connection, mail))
            except (OSError, SMTPException) as error:
                if _is_timeout(error):
                    _pause()
                _close(connection)
                logger.warning("The mail server cannot be reached; the next periodic task tries again.", exc_info=True)
                return


def _claim(rows: QuerySet[Any], source: str, address: str) -> EmailDelivery | None:
    """Reserve a recipient for this worker.

    Return None if the email was sent, if another worker is sending it, or during the SILENCE of the address.
    """
    now = timezone.now()
    if EmailDelivery.objects.filter(address=address, leased_until__gt=now + LEASE).exists():
        return None
    with transaction.atomic():
        # With the lock, no other worker completes the email and deletes its recipients in between.
        if not rows.filter(mailed_at=None).select_for_update(no_key=True):
            return None
        delivery, _is_new = EmailDelivery.objects.get_or_create(
            source=source, address=address, defaults={"seen_at": now}
        )
        if delivery.sent_at or (delivery.leased_until and delivery.leased_until > now):
            return None
        delivery.leased_until = now + LEASE
        delivery.save(update_fields=["leased_until"])
    return delivery


def _release(delivery: EmailDelivery, result: _Result) -> None:
    """End this worker's lease, or extend it to the SILENCE of the address. Tries end after TRY_FOR."""
    now = timezone.now()
    is_done = result is _Result.DONE or delivery.created_at < now - TRY_FOR
    leased_until = now + SILENCE if result is _Result.SILENT and not is_done else None
    EmailDelivery.objects.filter(pk=delivery.pk).update(leased_until=leased_until, sent_at=now if is_done else None)


def _complete(rows: QuerySet[Any], source: str, addresses: set[str]) -> bool:
    """Set `mailed_at` if no recipient is left. Return whether this call did so."""
    deliveries = EmailDelivery.objects.filter(source=source)
    with transaction.atomic():
        # Locked first: a row that became due again meanwhile has no deliveries, so its email is not complete.
        if not rows.filter(mailed_at=None).select_for_update(no_key=True):
            return False
        if deliveries.filter(address__in=addresses).exclude(sent_at=None).count() < len(addresses):
            return False
        rows.update(mailed_at=timezone.now())
        deliveries.delete()
    return True


def _send_mail(connection: BaseEmailBackend, mail: EmailMessage) -> _Result:
    """Send one email.

    A permanent failure is logged and counts as done, because no retry can succeed. If the connection fails, it is
    closed, so that the next email gets a new connection: one bad address must not keep the email from the other
    recipients. Raises SMTPSenderRefused.
    """
    global _timeouts  # noqa: PLW0603 - one for the process
    try:
        connection.send_messages([mail])
    except SMTPRecipientsRefused as error:
        codes = [code for code, _message in error.recipients.values()]
        logger.warning("The mail server refused a recipient: %s", codes)
        return _refused(connection, codes)
    except SMTPDataError as error:
        logger.warning("The mail server refused a mail: %s", error)
        return _refused(connection, [error.smtp_code])
    except SMTPSenderRefused as error:
        if error.smtp_code != SERVER_CLOSES:
            raise  # our own address, so all recipients wait until an administrator has mended it
        return _refused(connection, [error.smtp_code])
    except (SMTPNotSupportedError, ValueError):
        logger.warning("A mail cannot be sent because an address is malformed.", exc_info=True)
    except (OSError, SMTPException) as error:
        logger.warning("A mail could not be sent; a later periodic task tries again.", exc_info=True)
        _close(connection)
        if not _is_timeout(error):
            return _Result.LATER
        _timeouts += 1
        if _timeouts >= MAX_TIMEOUTS:
            _pause()
        return _Result.SILENT
    _timeouts = 0
    return _Result.DONE


def _refused(connection: BaseEmailBackend, codes: list[int]) -> _Result:
    """Return the result of an email that the server refused with these codes."""
    if SERVER_CLOSES in codes:
        _close(connection)
    return _Result.DONE if min(codes) >= PERMANENT_FAILURE else _Result.LATER


def _is_timeout(error: BaseException) -> bool:
    """Return whether the server did not answer in time. smtplib raises SMTPServerDisconnected for a time-out."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, TimeoutError):
        cause = cause.__context__
    return cause is not None


def _pause() -> None:
    """Send no emails for PAUSE_SECONDS."""
    global _timeouts, _paused_until
    logger.warning("The mail server does not answer in time. Emails pause for %d s.", PAUSE_SECONDS)
    _timeouts, _paused_until = 0, time.monotonic() + PAUSE_SECONDS


def _close(connection: BaseEmailBackend) -> None:
    """Close a connection, even if it is broken."""
    with suppress(OSError, SMTPException):
        connection.close()


def _is_paused() -> bool:
    """Return whether this process sends no emails now."""
    return time.monotonic() < _paused_until
