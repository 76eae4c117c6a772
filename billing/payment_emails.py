"""Mails about payments: failed automatic top-ups, deleted cards, disputes. `console.accounts.emails` delivers them."""

from __future__ import annotations

from datetime import timedelta

from django.conf import settings
from django.template.loader import render_to_string
from django.utils import timezone
from django.utils.translation import gettext as _

from billing import customers
from billing.amounts import money
from billing.emails import payers
from billing.messages import payment_failure_sentence
from billing.models import AutoTopUp, Dispute, TopUp
from console.accounts.emails import deliver, shared_connection

MAX_AGE = timedelta(days=3)
"""Failures and disputes older than this are not emailed: after a long outage, the email would be too late."""


@shared_connection()
def send_due() -> int:
    """Send the emails that are due, each to all who may pay. Returns how many of them were sent.

    `deliver` sends each recipient one email, even if several workers run this at once, and then sets `mailed_at`. It
    renders the email for each language and time zone of the recipients.
    """
    since = timezone.now() - MAX_AGE
    failed = TopUp.objects.filter(
        origin=TopUp.Origins.AUTOMATIC, state=TopUp.States.FAILED, mailed_at=None, created_at__gt=since
    ).exclude(failure=customers.CUSTOMER_GONE)  # the email about deleted cards covers these failures
    # `customers.forget` switches off automatic top-ups in this way when the provider has deleted the customer.
    setups_without_cards = AutoTopUp.objects.filter(
        is_on=False, last_failure=customers.CUSTOMER_GONE, mailed_at=None, updated_at__gt=since
    )
    # The age of a dispute counts from its last movement of money. Once the bank has returned the money,
    # `withdrawn_minor` is 0, and no email is needed.
    disputed = Dispute.objects.filter(mailed_at=None, withdrawn_minor__gt=0, movements__moved_at__gt=since).distinct()
    sent = 0
    for top_up in failed.select_related("account__organization"):
        sent += _send_failure(top_up)
    for setup in setups_without_cards.select_related("account__organization"):
        sent += _send_deleted_cards(setup)
    for dispute in disputed.select_related("top_up__account__organization"):
        sent += _send_dispute(dispute)
    return sent


def _send_deleted_cards(setup: AutoTopUp) -> bool:
    """Email that the saved cards were deleted at the provider. Returns whether an email was sent.

    `setup` is the row with the settings of a wallet's automatic top-ups.
    """
    organization = setup.account.owner

    def render() -> tuple[str, str]:
        context = {
            "organization": organization,
            "card": setup.method_label,
            "url": f"{settings.TRAINYARD_URL}/wallet/cards/",
        }
        subject = _("Automatic top-ups for %(organization)s were switched off") % {"organization": organization}
        return subject, render_to_string("billing/mail/cards_gone.txt", context)

    return deliver(AutoTopUp.objects.filter(pk=setup.pk), render, payers(organization))


def _send_failure(top_up: TopUp) -> bool:
    """Email that an automatic top-up failed. Returns whether an email was sent."""
    organization = top_up.account.owner
    setup = AutoTopUp.objects.get(account=top_up.account)  # exists: switching them off keeps the row

    def render() -> tuple[str, str]:
        context = {
            "organization": organization,
            "amount": money(top_up.amount_minor, top_up.currency),
            "card": setup.method_label,
            "why": payment_failure_sentence(top_up.failure),
            "is_on": setup.is_on,
            "url": f"{settings.TRAINYARD_URL}/wallet/cards/",
        }
        subject = _("The automatic top-up for %(organization)s failed") % {"organization": organization}
        return subject, render_to_string("billing/mail/automatic_top_up.txt", context)

    return deliver(TopUp.objects.filter(pk=top_up.pk), render, payers(organization))


def _send_dispute(dispute: Dispute) -> bool:
    """Email that a payment was disputed and its amount withdrawn. Returns whether an email was sent."""
    organization = dispute.top_up.account.owner

    def render() -> tuple[str, str]:
        context = {
            "organization": organization,
            "amount": money(dispute.amount_minor, dispute.top_up.currency),
            "paid_at": dispute.top_up.paid_at,
            "is_lost": dispute.state == Dispute.States.LOST,  # the bank may decide before the email is sent
            "url": f"{settings.TRAINYARD_URL}/wallet/",
        }
        subject = _("A payment by %(organization)s was disputed") % {"organization": organization}
        return subject, render_to_string("billing/mail/dispute.txt", context)

    return deliver(Dispute.objects.filter(pk=dispute.pk), render, payers(organization))
