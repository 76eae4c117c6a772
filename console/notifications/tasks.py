"""Celery tasks of notifications."""

from __future__ import annotations

from celery import shared_task

from console.notifications import delivery


@shared_task
def deliver() -> None:
    """Create the deliveries of new notifications, and send those that are due."""
    delivery.create_deliveries()
    delivery.deliver_due()


@shared_task
def tidy() -> None:
    """Delete notifications older than `delivery.RETENTION`."""
    delivery.delete_old()
