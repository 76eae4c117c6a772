"""Quotes that were paid for at the payment page: bought when the money has come in, be the customer there or not.

The one rule: the money is in the wallet whatever becomes of the order. A quote that can't be bought any more costs
nothing.
"""

from __future__ import annotations

import logging

from celery import shared_task
from django.utils import timezone

from billing.models import TopUp
from console.accounts.errors import CustomerError
from console.accounts.models import Membership
from console.accounts.roles import Capability
from jobs import orders
from jobs.models import Order

logger = logging.getLogger(__name__)


def buy(*, top_up: TopUp) -> Order | None:
    """Buy the quote that a top-up was paid for, for whoever paid it. None where it can't be bought (any more).

    Safe to repeat, and beside the customer's own click: a quote is bought once. The money is in the wallet either way.
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
        return Order.objects.filter(quote=quote).first()


def buy_all() -> int:
    """Buy every quote that was paid for and is still valid. Gives how many were bought."""
    waiting = TopUp.objects.filter(
        state=TopUp.States.PAID, quote__hold=None, quote__expires_at__gt=timezone.now()
    ).select_related("quote__organization", "created_by")
    return sum(buy(top_up=top_up) is not None for top_up in waiting)


@shared_task
def buy_paid() -> None:
    """The sweep: for those who paid and closed the page."""
    buy_all()
