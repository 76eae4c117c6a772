"""Mail about money: a budget's threshold, a wallet that runs low, an invoice that was written for a month.

The one rule: a row says that a mail is due, whoever sends it claims the row first, and a mail that could not be sent
gives it back. No mail is sent inside a transaction. Each reader gets it in the language they last logged in with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from smtplib import SMTPException, SMTPNotSupportedError, SMTPRecipientsRefused
from typing import Any

from django.conf import settings
from django.core.mail import EmailMessage, get_connection
from django.core.mail.backends.base import BaseEmailBackend
from django.db.models import QuerySet
from django.template.loader import render_to_string
from django.urls import reverse
from django.utils import timezone, translation
from django.utils.translation import gettext as _

from billing import budgets, receivables
from billing.models import Account, BalanceWarning, Budget, BudgetAlert, Invoice, InvoiceMail
from billing.wording import money
from console.accounts.models import Membership, Organization, User
from console.accounts.roles import Capability

logger = logging.getLogger(__name__)
REFUSED_FOR_GOOD = 500
"""SMTP's codes from here on; what is below may be taken later."""
Letter = Callable[[], tuple[str, str]]
"""Makes subject and text in the active language."""


def send_due() -> int:
    """Send every mail that is due. Gives how many went out."""
    sent = 0
    standing = Budget.objects.filter(budgets.STANDS)
    alerts = BudgetAlert.objects.filter(mailed_at=None, budget__in=standing)
    for alert in alerts.select_related("budget__organization", "budget__user"):
        budget = alert.budget
        own = {budget.user} if isinstance(budget.user, User) and budget.user.is_active else set()
        to = payers(budget.organization) | own
        sent += deliver(BudgetAlert.objects.filter(pk=alert.pk), lambda alert=alert: _budget_mail(alert), to)  # type: ignore[misc]  # mypy knows no lambda with a default
    warnings = BalanceWarning.objects.filter(mailed_at=None).select_related("account__organization")
    for warning in warnings:
        owner = warning.account.organization
        if owner is not None:
            rows = BalanceWarning.objects.filter(pk=warning.pk)
            sent += deliver(rows, lambda warning=warning: _balance_mail(warning), payers(owner))  # type: ignore[misc]  # as above
    for due in InvoiceMail.objects.filter(mailed_at=None).select_related("invoice__organization"):
        to = payers(due.invoice.organization)
        sent += deliver(InvoiceMail.objects.filter(pk=due.pk), lambda due=due: _invoice_mail(due.invoice), to)  # type: ignore[misc]  # as above
    return sent


def payers(organization: Organization) -> set[User]:
    """Those who may pay: owners and billing members."""
    members = Membership.objects.filter(organization=organization, user__is_active=True).select_related("user")
    return {member.user for member in members if member.allows(Capability.PAY)}


def _budget_mail(alert: BudgetAlert) -> tuple[str, str]:
    budget = alert.budget
    state = next(each for each in budgets.states(budget.organization) if each.budget.pk == budget.pk)
    subject = _("%(percent)d %% of the budget of %(whose)s is used") % {
        "percent": alert.percent,
        "whose": budget.user or budget.organization,
    }
    figures: dict[str, Any] = {
        "state": state,
        "alert": alert,
        "budget": money(budget.amount_minor, state.currency),
        "charged": money(state.charged_minor, state.currency),
        "held": money(state.held_minor, state.currency),
        "left": money(state.left_minor, state.currency),
        "url": f"{settings.TRAINYARD_URL}/costs/",
    }
    return subject, render_to_string("billing/mail/budget.txt", figures)


def _balance_mail(warning: BalanceWarning) -> tuple[str, str]:
    account = warning.account
    state = budgets.balance(account)
    figures = {
        "account": account,
        "available": money(account.available_minor, account.currency),
        "daily": money(state.daily_minor, account.currency),
        "days": state.days_left,
        "url": f"{settings.TRAINYARD_URL}/wallet/",
    }
    subject = _("The wallet of %(organization)s runs low") % {"organization": account.organization}
    return subject, render_to_string("billing/mail/balance.txt", figures)


def _invoice_mail(invoice: Invoice) -> tuple[str, str]:
    account = Account.objects.get(organization=invoice.organization_id, kind=Account.Kinds.WALLET)
    owed = receivables.owed_minor(account)
    figures = {
        "invoice": invoice,
        "owed": money(owed, account.currency) if owed else "",
        "total": money(invoice.total_minor, invoice.currency),
        "runs": invoice.line_count,
        "url": f"{settings.TRAINYARD_URL}{reverse('invoice_detail', args=[invoice.pk])}",
        "pdf_url": f"{settings.TRAINYARD_URL}{reverse('invoice_pdf', args=[invoice.pk])}"
        f"?language={translation.get_language()}",
    }
    subject = _("Invoice %(number)s of %(organization)s") % {
        "number": invoice.number,
        "organization": invoice.organization,
    }
    return subject, render_to_string("billing/mail/invoice.txt", figures)


def deliver(rows: QuerySet[Any], letter: Letter, to: Iterable[User]) -> bool:
    """Claim the row, then send: two workers never both do, and a failure is tried again by the next sweep."""
    if not rows.filter(mailed_at=None).update(mailed_at=timezone.now()):
        return False
    readers: dict[str, list[str]] = {}
    for reader in to:
        readers.setdefault(reader.language or settings.LANGUAGE_CODE, []).append(reader.email)
    mails = []
    for language, addresses in sorted(readers.items()):
        with translation.override(language):
            subject, text = letter()
        one_line = " ".join(f"{settings.ACCOUNT_EMAIL_SUBJECT_PREFIX}{subject}".split())
        mails.append(EmailMessage(one_line, text, None, sorted(addresses)))
    try:
        with get_connection() as connection:
            for mail in mails:
                _send(connection, mail)
    except (OSError, SMTPException):
        logger.warning("A mail about money could not be sent; the next sweep tries again.", exc_info=True)
        rows.update(mailed_at=None)
        return False
    return True


def _send(connection: BaseEmailBackend, mail: EmailMessage) -> None:
    """Send one mail. An address that takes none for good keeps nothing from the others, and is not asked again."""
    try:
        connection.send_messages([mail])
    except SMTPRecipientsRefused as error:
        if not all(code >= REFUSED_FOR_GOOD for code, _why in error.recipients.values()):
            raise
        logger.warning("A mail about money is not taken by %d of its readers.", len(error.recipients))
    except (SMTPNotSupportedError, ValueError):
        logger.warning("A mail about money can't be sent to an address as it is written.", exc_info=True)
