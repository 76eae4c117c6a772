"""Send mails once, in each recipient's language and time zone, and retry after failures.

A row marks a mail as due. The sender claims the row first and releases it if sending fails. Mails are never sent inside
a transaction. A mail is lost if the worker is killed between claim and sending.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from smtplib import SMTPException, SMTPNotSupportedError, SMTPRecipientsRefused
from typing import Any, Protocol

from django.conf import settings
from django.core.mail import EmailMessage, get_connection
from django.core.mail.backends.base import BaseEmailBackend
from django.db.models import QuerySet
from django.template.loader import render_to_string
from django.utils import timezone, translation
from django.utils.translation import gettext as _

from console.accounts import zones

logger = logging.getLogger(__name__)
PERMANENT_FAILURE = 500
"""The lowest SMTP code of permanent failures; lower codes may be retried."""
Renderer = Callable[[], tuple[str, str]]
"""Renders subject and text in the active language and time zone."""


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


def deliver(rows: QuerySet[Any], render: Renderer, to: Iterable[Recipient]) -> bool:
    """Claim the row by setting `mailed_at`, then send an email to each recipient. Return whether the emails were sent.

    `rows` selects the one row that marks the email as due. If several workers call this at once, only one sends. After
    a failure the row is released, and the next periodic task tries again. It then sends all emails of the row again,
    also those that were sent before the failure.
    """
    if not rows.filter(mailed_at=None).update(mailed_at=timezone.now()):
        return False
    addresses_by_locale: dict[tuple[str, str], list[str]] = {}
    for recipient in to:
        zone = zones.zone(recipient.time_zone, recipient.browser_time_zone).key
        addresses_by_locale.setdefault((recipient.language or settings.LANGUAGE_CODE, zone), []).append(recipient.email)
    mails = []
    for (language, zone), addresses in sorted(addresses_by_locale.items()):
        with translation.override(language), timezone.override(zone):
            subject, text = render()
        subject_line = " ".join(f"{settings.ACCOUNT_EMAIL_SUBJECT_PREFIX}{subject}".split())
        mails.append(EmailMessage(subject_line, text, None, sorted(addresses)))
    try:
        with get_connection() as connection:
            for mail in mails:
                _send_mail(connection, mail)
    except (OSError, SMTPException):
        logger.warning("A mail could not be sent; the next periodic task tries again.", exc_info=True)
        rows.update(mailed_at=None)
        return False
    return True


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


def _send_mail(connection: BaseEmailBackend, mail: EmailMessage) -> None:
    """Send one email. A permanent failure is logged and not retried, because no retry can succeed.

    smtplib raises SMTPRecipientsRefused only if the server refuses all recipients. Django does not tell of single
    refused ones, so these do not get the email.
    """
    try:
        connection.send_messages([mail])
    except SMTPRecipientsRefused as error:
        if not all(code >= PERMANENT_FAILURE for code, _message in error.recipients.values()):
            raise
        logger.warning("The mail server refused %d recipients of a mail.", len(error.recipients))
    except (SMTPNotSupportedError, ValueError):
        logger.warning("A mail cannot be sent because an address is malformed.", exc_info=True)
