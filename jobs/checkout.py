"""Buy quotes that customers paid for at the payment page, once the payment arrives, even if they closed the page.

The payment tops up the wallet in any case. If the quote can no longer be bought, the money stays in the wallet.
"""

from __future__ import annotations

import logging

from celery import shared_task
from django.utils import timezone

from billing.models import TopUp
from console.accounts.models import Membership
from console.accounts.roles import Capability
from console.core.errors import CustomerError
from jobs import orders
from jobs.models import Order

logger = logging.getLogger(__name__)


def buy(*, top_up: TopUp) -> Order | None:
    """Buy the quote that a top-up pays for, for the user who paid. Return None if it cannot be bought.

    Safe to repeat, and safe while the customer orders the same quote: a quote can be bought only once.
    """
    quote, user = top_up.quote, top_up.created_by
    if top_up.state != TopUp.States.PAID or quote is None or user is None:
        return None
    if order := Order.objects.filter(quote=quote).first():
        return order
    membership = Membership.objects.filter(organization=quote.organization_id, user=user).first()
    if membership is None or not membership.allows(Capability.RUN):
        return None
    try:
        return orders.place_order(membership=membership, quote=quote)
    except CustomerError as error:
        logger.info("Quote %s was paid for and is not bought: %s", quote.pk, error.code)
        # The customer may have ordered the quote in the meantime.
        return Order.objects.filter(quote=quote).first()


def buy_all() -> int:
    """Buy every valid quote that was paid for, the oldest payment first. Return how many were bought.

    A failure is logged and retried by the next call; the others are not affected.
    """
    # A bought quote has a hold, so `quote__hold=None` leaves it out.
    top_ups = TopUp.objects.filter(
        state=TopUp.States.PAID, quote__hold=None, quote__expires_at__gt=timezone.now()
    ).select_related("quote__organization", "created_by")
    bought = 0
    for top_up in top_ups.order_by("created_at"):
        try:
            bought += buy(top_up=top_up) is not None
        except Exception:
            logger.exception("Quote %s was paid for and could not be bought. It will be retried.", top_up.quote_id)
    return bought


@shared_task
def buy_paid() -> None:
    """Buy the quotes of customers who paid and closed the page."""
    buy_all()
