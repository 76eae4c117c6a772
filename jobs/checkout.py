"""Buy quotes that were paid for at the payment page, once the payment arrives, also if the customer closed the page.

The money is in the wallet in any case. A quote that can no longer be bought costs nothing.
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
    """Buy a top-up's quote for the user who paid; None if it cannot be bought.

    Safe to repeat and to run beside the customer's own order: a quote is bought once.
    """
    quote, user = top_up.quote, top_up.created_by
    if top_up.state != TopUp.States.PAID or quote is None or user is None:
        return None
    if bought := Order.objects.filter(quote=quote).first():
        return bought
    membership = Membership.objects.filter(organization=quote.organization_id, user=user).first()
    if membership is None or not membership.allows(Capability.RUN):
        return None
    try:
        return orders.place_order(membership=membership, quote=quote)
    except CustomerError as error:
        logger.info("Quote %s was paid for and is not bought: %s", quote.pk, error.code)
        # The customer's own order may have been first.
        return Order.objects.filter(quote=quote).first()


def buy_all() -> int:
    """Buy every valid quote that was paid for. Return how many were bought."""
    top_ups = TopUp.objects.filter(
        state=TopUp.States.PAID, quote__hold=None, quote__expires_at__gt=timezone.now()
    ).select_related("quote__organization", "created_by")
    return sum(buy(top_up=top_up) is not None for top_up in top_ups)


@shared_task
def buy_paid() -> None:
    """Buy for customers who paid and closed the page."""
    buy_all()
