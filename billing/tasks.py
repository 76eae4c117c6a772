"""Celery shims: each calls one service. The rows are the truth; a lost message is made up for by the sweep."""

from __future__ import annotations

import logging
from datetime import timedelta

from celery import shared_task
from django.utils import timezone

from billing import audit, automatic, budgets, credit, events, invoices, mails, payment_mails, reversals
from billing.errors import PaymentUnavailable
from billing.models import Quote
from console.operations import signs

logger = logging.getLogger(__name__)


@shared_task
def apply_events() -> None:
    """Act on every payment event that waits."""
    while events.apply_waiting():
        pass


@shared_task
def fetch_events() -> None:
    """Fetch what was not delivered."""
    try:
        fresh = events.fetch_undelivered()
    except PaymentUnavailable:
        logger.warning("The payment provider did not answer; the next sweep asks again.")
        return
    if fresh:
        events.apply_waiting()


@shared_task
def move_money() -> None:
    """Begin and repeat what the payment provider is to be asked for: automatic top-ups, refunds; and tell by mail."""
    automatic.sweep()
    reversals.tell_waiting()
    payment_mails.send_due()


@shared_task
def expire_quotes() -> None:
    """Forget quotes that nobody bought, a day after they expired."""
    Quote.objects.filter(hold=None, expires_at__lt=timezone.now() - timedelta(days=1)).delete()


@shared_task
def watch_money() -> None:
    """Take back expired credit, and warn of budgets and wallets that run out."""
    credit.sweep_expired()
    budgets.watch()
    budgets.watch_balances()
    mails.send_due()


@shared_task
def check_books() -> None:
    """Ask the entries whether the books are right, and say so to whoever watches."""
    signs.give(signs.BOOKS, wrong=audit.check_books())


@shared_task
def write_invoices() -> None:
    """Write the invoices of the months that are over."""
    invoices.issue_due()
