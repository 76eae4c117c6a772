"""Celery tasks of billing. Celery beat sends each of them periodically, so a lost message only delays its work."""

from __future__ import annotations

import contextvars
import logging
import threading
from contextlib import suppress
from datetime import timedelta

import redis
from celery import shared_task
from django.utils import timezone

from billing import auto_topup, budgets, credit, emails, events, invoices, payment_emails, reconciliation, refunds
from billing.errors import PaymentUnavailable
from billing.models import Quote
from console.core.enqueue import send
from console.observability import heartbeats, redis_client

logger = logging.getLogger(__name__)

APPLY_PENDING = "apply-events-pending"
"""Redis key that exists while a message for `apply_events` waits for a worker."""
APPLY_PENDING_SECONDS = 15
"""Lifetime of the key if its message is lost. Beat sends `apply_events` every 15 seconds anyway."""
BURST_SECONDS = 0.05
"""How long a process waits before it asks for `apply_events`. Stripe sends the events of one payment together."""
_is_request_due = threading.Event()


def request_apply_events() -> None:
    """Ask for `apply_events` after BURST_SECONDS, once for all events that this process stores until then.

    A timer's thread asks, so that the payment provider's requests do not wait for Redis and the broker.
    """
    if not _is_request_due.is_set():
        _is_request_due.set()
        try:
            # In the request's context, whose id and trace Celery passes on to the task.
            threading.Timer(BURST_SECONDS, contextvars.copy_context().run, (_send_apply_events,)).start()
        except RuntimeError:  # the process may start no more threads; beat sends the task every 15 seconds
            _is_request_due.clear()


def _send_apply_events() -> None:
    """Send `apply_events` unless a message for it already waits: its run applies all events stored before it starts."""
    _is_request_due.clear()  # first, because an event that is stored from now on may need another message
    try:
        key = redis_client.key(APPLY_PENDING)
        is_first = redis_client.client().set(key, 1, nx=True, ex=APPLY_PENDING_SECONDS)
    except redis.RedisError:
        return  # beat sends the task every 15 seconds anyway
    if is_first:
        send(apply_events)


@shared_task
def apply_events() -> None:
    """Apply all payment events that are stored but not yet applied."""
    # Deleted first, because an event that is stored from now on may need another run. If
    # Redis does not answer now, the key expires by itself.
    with suppress(redis.RedisError):
        redis_client.client().delete(redis_client.key(APPLY_PENDING))
    while events.apply_waiting():
        pass


@shared_task
def fetch_events() -> None:
    """Fetch and apply events that the payment provider did not deliver."""
    try:
        fetched = events.fetch_undelivered()
    except PaymentUnavailable:
        logger.warning("The payment provider did not answer. The next run of this task retries.")
        return
    if fetched:
        apply_events()


@shared_task
def move_money() -> None:
    """Start and retry automatic top-ups, submit refunds again, and send the emails about payments."""
    auto_topup.run_due()
    refunds.submit_waiting()
    payment_emails.send_due()


@shared_task
def expire_quotes() -> None:
    """Delete quotes that were not bought, a day after they expired, so that the table does not grow for ever."""
    Quote.objects.filter(hold=None, extension=None, expires_at__lt=timezone.now() - timedelta(days=1)).delete()


@shared_task
def watch_money() -> None:
    """Remove expired credit, and warn about budgets and wallets that run low."""
    credit.remove_all_expired()
    budgets.record_alerts()
    budgets.record_low_balances()
    emails.send_due()


@shared_task(name="billing.tasks.check_books")  # the name since version 0.1, whose beat may still send messages
def check_ledger() -> None:
    """Check the ledger and publish the result for monitoring."""
    heartbeats.send(heartbeats.LEDGER, wrong=reconciliation.check_ledger())


@shared_task
def write_invoices() -> None:
    """Issue the invoices of past months."""
    invoices.issue_due()
