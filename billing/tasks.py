"""Celery shims: each calls one service. The rows are the truth; a lost message is made up for by the sweep."""

from __future__ import annotations

import logging
from datetime import timedelta

from celery import shared_task
from django.utils import timezone

from billing import payments
from billing.errors import PaymentUnavailable
from billing.models import Quote, StripeEvent

logger = logging.getLogger(__name__)


@shared_task
def apply_event(event_pk: int) -> None:
    """Apply one stored event."""
    payments.apply_event(event_pk=event_pk)


@shared_task
def apply_events() -> None:
    """Apply every event that a lost message left behind."""
    for pk in StripeEvent.objects.filter(state=StripeEvent.States.RECEIVED).values_list("pk", flat=True)[:1000]:
        try:
            payments.apply_event(event_pk=pk)
        except Exception:
            # One event's fault, whatever it is, must not keep the sweep from the others.
            logger.exception("Payment event %s could not be applied; the next sweep tries again.", pk)


@shared_task
def fetch_events() -> None:
    """Fetch what was not delivered."""
    try:
        payments.fetch_undelivered()
    except PaymentUnavailable:
        logger.warning("The payment provider did not answer; the next sweep asks again.")


@shared_task
def expire_quotes() -> None:
    """Forget quotes that nobody bought, a day after they expired."""
    Quote.objects.filter(hold=None, expires_at__lt=timezone.now() - timedelta(days=1)).delete()
