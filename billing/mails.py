"""Mail about money: a budget's threshold, a wallet that runs low.

The one rule: a row says that a mail is due, whoever sends it claims the row first, and a mail that could not be sent
gives it back. No mail is sent inside a transaction.
"""

from __future__ import annotations

import logging
from smtplib import SMTPException
from typing import Any

from django.conf import settings
from django.core.mail import send_mail
from django.db.models import QuerySet
from django.template.loader import render_to_string
from django.utils import timezone
from django.utils.translation import gettext as _

from billing import budgets
from billing.models import BalanceWarning, BudgetAlert
from billing.wording import money
from console.accounts.models import Membership, Organization, User
from console.accounts.roles import Capability

logger = logging.getLogger(__name__)


def send_due() -> int:
    """Send every mail that is due. Gives how many went out."""
    sent = 0
    alerts = BudgetAlert.objects.filter(mailed_at=None).select_related("budget__organization", "budget__user")
    for alert in alerts:
        sent += deliver(BudgetAlert.objects.filter(pk=alert.pk), *_budget_mail(alert))
    warnings = BalanceWarning.objects.filter(mailed_at=None).select_related("account__organization")
    for warning in warnings:
        if warning.account.organization is not None:
            sent += deliver(
                BalanceWarning.objects.filter(pk=warning.pk), *_balance_mail(warning, warning.account.organization)
            )
    return sent


def payers(organization: Organization) -> set[str]:
    """The addresses of those who may pay: owners and billing members."""
    members = Membership.objects.filter(organization=organization, user__is_active=True).select_related("user")
    return {member.user.email for member in members if member.allows(Capability.PAY)}


def _budget_mail(alert: BudgetAlert) -> tuple[str, str, set[str]]:
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
    own = {budget.user.email} if isinstance(budget.user, User) and budget.user.is_active else set()
    return subject, render_to_string("billing/mail/budget.txt", figures), payers(budget.organization) | own


def _balance_mail(warning: BalanceWarning, organization: Organization) -> tuple[str, str, set[str]]:
    account = warning.account
    state = budgets.balance(account)
    figures = {
        "account": account,
        "available": money(account.available_minor, account.currency),
        "daily": money(state.daily_minor, account.currency),
        "days": state.days_left,
        "url": f"{settings.TRAINYARD_URL}/wallet/",
    }
    subject = _("The wallet of %(organization)s runs low") % {"organization": organization}
    return subject, render_to_string("billing/mail/balance.txt", figures), payers(organization)


def deliver(rows: QuerySet[Any], subject: str, text: str, to: set[str]) -> bool:
    """Claim the row, then send: two workers never both do, and a failure is tried again by the next sweep."""
    if not rows.filter(mailed_at=None).update(mailed_at=timezone.now()):
        return False
    one_line = " ".join(f"{settings.ACCOUNT_EMAIL_SUBJECT_PREFIX}{subject}".split())
    try:
        send_mail(one_line, text, None, sorted(to))
    except (OSError, SMTPException):
        logger.warning("A mail about money could not be sent; the next sweep tries again.", exc_info=True)
        rows.update(mailed_at=None)
        return False
    return True
