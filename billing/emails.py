"""Mails about budgets, low wallets and new invoices.

`console.accounts.emails` delivers them, in the language that each recipient last used.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from django.conf import settings
from django.template.loader import render_to_string
from django.urls import reverse
from django.utils import translation
from django.utils.translation import gettext as _

from billing import budgets, receivables
from billing.amounts import money
from billing.models import Account, BalanceWarning, Budget, BudgetAlert, Hold, Invoice, InvoiceMail
from console.accounts.emails import deliver, shared_connection
from console.accounts.models import Membership, Organization, User
from console.accounts.roles import Capability
from console.notifications import services as notifications


@shared_connection()
def send_due() -> int:
    """Send the emails that are due. Returns the number of alerts, warnings and invoices emailed.

    `deliver` takes a query set that selects exactly one row. It emails each recipient once, then sets the row's
    `mailed_at`.
    """
    sent = 0
    active = Budget.objects.filter(budgets.IS_ACTIVE)
    alerts = BudgetAlert.objects.filter(mailed_at=None, budget__in=active)
    for alert in alerts.select_related("budget__organization", "budget__user"):
        budget = alert.budget
        state = next((state for state in budgets.states(budget.organization) if state.budget.pk == budget.pk), None)
        if state is None:  # the budget was removed, or its member has left, since the query
            continue
        recipients = mail_recipients(budget.organization, "budget.reached")
        if isinstance(budget.user, User) and budget.user.is_active:
            recipients.add(budget.user)  # always, because it is this member's own budget
        sent += deliver(BudgetAlert.objects.filter(pk=alert.pk), partial(_budget_mail, alert, state), recipients)
    warnings = BalanceWarning.objects.filter(mailed_at=None).select_related("account__organization")
    for warning in warnings:
        organization = warning.account.organization
        if organization is not None:
            rows = BalanceWarning.objects.filter(pk=warning.pk)
            sent += deliver(rows, partial(_balance_mail, warning), mail_recipients(organization, "wallet.low"))
    for mail in InvoiceMail.objects.filter(mailed_at=None).select_related("invoice__organization"):
        recipients = mail_recipients(mail.invoice.organization, "invoice.issued")
        sent += deliver(InvoiceMail.objects.filter(pk=mail.pk), partial(_invoice_mail, mail.invoice), recipients)
    return sent


def payers(organization: Organization) -> set[User]:
    """Return the active members who may pay: owners and billing members."""
    members = Membership.objects.filter(organization=organization, user__is_active=True).select_related("user")
    return {member.user for member in members if member.allows(Capability.PAY)}


def mail_recipients(organization: Organization, kind: str) -> set[User]:
    """Return the active members who chose emails of this notification kind, and whose role may see such notices."""
    members = Membership.objects.filter(organization=organization, user__is_active=True).select_related("user")
    return {member.user for member in members if notifications.wants_mail(member, kind)}


def _budget_mail(alert: BudgetAlert, state: budgets.BudgetState) -> tuple[str, str]:
    """Return the subject and text of the email about a budget that reached a threshold, and is now in `state`."""
    budget = alert.budget
    subject = _("%(percent)d %% of the budget of %(whose)s is used") % {
        "percent": alert.percent,
        "whose": budget.user or budget.organization,
    }
    context: dict[str, Any] = {
        "state": state,
        "alert": alert,
        "budget": money(budget.amount_minor, state.currency),
        "charged": money(state.charged_minor, state.currency),
        "held": money(state.held_minor, state.currency),
        "left": money(state.left_minor, state.currency),
        "url": f"{settings.TRAINYARD_URL}/costs/",
    }
    return subject, render_to_string("billing/mail/budget.txt", context)


def _balance_mail(warning: BalanceWarning) -> tuple[str, str]:
    """Return the subject and text of the email about a wallet that runs low."""
    account = warning.account
    runway = budgets.runway_of(account)
    context = {
        "account": account,
        "available": money(account.available_minor, account.currency),
        "daily": money(runway.daily_minor, account.currency),
        "days": runway.days_left,
        "url": f"{settings.TRAINYARD_URL}/wallet/",
    }
    subject = _("The wallet balance of %(organization)s is low") % {"organization": account.organization}
    return subject, render_to_string("billing/mail/balance.txt", context)


def _invoice_mail(invoice: Invoice) -> tuple[str, str]:
    """Return the subject and text of the email about a new invoice."""
    account = Account.objects.get(organization=invoice.organization_id, kind=Account.Kinds.WALLET)
    owed = receivables.owed_minor(account)
    context = {
        "invoice": invoice,
        "owed": money(owed, account.currency) if owed else "",
        "total": money(invoice.total_minor, invoice.currency),
        "runs": invoice.lines.exclude(receipt__hold__reference__startswith=Hold.STORAGE_PREFIX).count(),
        "url": f"{settings.TRAINYARD_URL}{reverse('invoice_detail', args=[invoice.pk])}",
        "pdf_url": f"{settings.TRAINYARD_URL}{reverse('invoice_pdf', args=[invoice.pk])}"
        f"?language={translation.get_language()}",
    }
    subject = _("Invoice %(number)s for %(organization)s") % {
        "number": invoice.number,
        "organization": invoice.organization,
    }
    return subject, render_to_string("billing/mail/invoice.txt", context)
