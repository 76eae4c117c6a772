"""Mail about payments: an automatic top-up that failed, one whose cards are gone, a payment that was disputed.

The one rule is that of `billing.mails`, which sends them.
"""

from __future__ import annotations

from datetime import timedelta

from django.conf import settings
from django.template.loader import render_to_string
from django.utils import timezone
from django.utils.translation import gettext as _

from billing import customers, mails
from billing.models import Account, AutoTopUp, Dispute, TopUp
from billing.wording import failure_sentence, money
from console.accounts.models import Organization

LATEST = timedelta(days=3)
"""What is older is no news."""


def send_due() -> int:
    """Send every mail that is due. Gives how many went out."""
    since = timezone.now() - LATEST
    failed = TopUp.objects.filter(
        origin=TopUp.Origins.AUTOMATIC, state=TopUp.States.FAILED, mailed_at=None, created_at__gt=since
    ).exclude(failure=customers.GONE)  # that is told of the standing order, whether a payment was due or not
    without_card = AutoTopUp.objects.filter(
        is_on=False, last_failure=customers.GONE, mailed_at=None, updated_at__gt=since
    )
    disputed = Dispute.objects.filter(mailed_at=None, withdrawn_minor__gt=0, movements__moved_at__gt=since).distinct()
    sent = 0
    for top_up in failed.select_related("account__organization"):
        sent += _tell_failure(top_up)
    for setup in without_card.select_related("account__organization"):
        sent += _tell_no_card(setup)
    for dispute in disputed.select_related("top_up__account__organization"):
        sent += _tell_dispute(dispute)
    return sent


def _tell_no_card(setup: AutoTopUp) -> bool:
    organization = _owner(setup.account)

    def letter() -> tuple[str, str]:
        figures = {
            "organization": organization,
            "card": setup.method_label,
            "url": f"{settings.TRAINYARD_URL}/wallet/cards/",
        }
        subject = _("The automatic top-ups of %(organization)s are switched off") % {"organization": organization}
        return subject, render_to_string("billing/mail/cards_gone.txt", figures)

    return mails.deliver(AutoTopUp.objects.filter(pk=setup.pk), letter, mails.payers(organization))


def _tell_failure(top_up: TopUp) -> bool:
    organization = _owner(top_up.account)
    setup = AutoTopUp.objects.get(account=top_up.account)

    def letter() -> tuple[str, str]:
        figures = {
            "organization": organization,
            "amount": money(top_up.amount_minor, top_up.currency),
            "card": setup.method_label,
            "why": failure_sentence(top_up.failure),
            "is_on": setup.is_on,
            "url": f"{settings.TRAINYARD_URL}/wallet/cards/",
        }
        subject = _("The automatic top-up of %(organization)s failed") % {"organization": organization}
        return subject, render_to_string("billing/mail/automatic_top_up.txt", figures)

    return mails.deliver(TopUp.objects.filter(pk=top_up.pk), letter, mails.payers(organization))


def _tell_dispute(dispute: Dispute) -> bool:
    organization = _owner(dispute.top_up.account)

    def letter() -> tuple[str, str]:
        figures = {
            "organization": organization,
            "amount": money(dispute.amount_minor, dispute.top_up.currency),
            "paid_at": dispute.top_up.paid_at,
            "url": f"{settings.TRAINYARD_URL}/wallet/",
        }
        subject = _("A payment of %(organization)s was disputed") % {"organization": organization}
        return subject, render_to_string("billing/mail/dispute.txt", figures)

    return mails.deliver(Dispute.objects.filter(pk=dispute.pk), letter, mails.payers(organization))


def _owner(account: Account) -> Organization:
    organization = account.organization
    if organization is None:
        raise ValueError("Only an organization's wallet is topped up.")
    return organization
