"""Deliver notifications to webhooks: signed POST requests over HTTPS, which are retried for about a day.

The receivers belong to customers, and may be slow or hostile. Therefore only one process delivers at a time, in rounds,
with THREADS threads, and a round sends at most one request to each webhook. A request goes only to a public address,
and follows no redirects. Each of its steps ends after REQUEST_SECONDS, except the DNS query, which the resolver limits.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.db import connection, transaction
from django.utils import timezone

from console.core import connections, encryption
from console.notifications.models import Delivery, Notification, Webhook
from console.notifications.services import ENCRYPTION_PURPOSE
from runtime.json_values import storable

logger = logging.getLogger(__name__)
RETRY_SECONDS = (60, 300, 1800, 7200, 21600, 43200)
"""How long to wait before each retry, about a day in all. When the last retry fails, the delivery has failed."""
REQUEST_SECONDS = 10.0
"""Limit in seconds for the TCP connection, again for the TLS handshake, and again for the request and its response."""
THREADS = 8
"""How many requests are sent at once, so that a few slow receivers do not delay the others much."""
ROUND_SIZE = 64
"""The most deliveries that a round sends: 8 for each thread. A slow receiver takes up to 30 seconds, three times
REQUEST_SECONDS, so a round takes up to 240 seconds. Slow DNS servers make it longer: the resolver, glibc's, waits 10
seconds for each name server."""
NOTIFICATIONS_PER_CALL = 500
"""The most notifications that one call of `create_deliveries` handles, so that its transaction stays short."""
RETENTION = timedelta(days=90)
"""How long notifications and the log of their deliveries are kept."""
ERROR_LENGTH = 200
"""The length of the database column of a delivery's error; longer errors are cut."""
ADVISORY_LOCK = 7_420
"""The number of PostgreSQL's advisory lock, arbitrary but different from the console's other locks."""


@dataclass(frozen=True)
class RequestResult:
    """The result of one request: the HTTP status, and why the delivery failed. Without a response `status` is None."""

    status: int | None = None
    error: str = ""

    @property
    def is_accepted(self) -> bool:
        """Return whether the receiver accepted the notification."""
        return self.status is not None and 200 <= self.status < 300


def create_deliveries() -> int:
    """Create the deliveries of new notifications, and return the number of notifications. Safe to repeat."""
    with transaction.atomic():
        unqueued = Notification.objects.select_for_update(skip_locked=True).filter(queued_at=None).order_by("id")
        notifications = list(unqueued[:NOTIFICATIONS_PER_CALL])
        organization_ids = {notification.organization_id for notification in notifications}
        webhooks_by_organization: dict[int, list[Webhook]] = {}
        for webhook in Webhook.objects.filter(organization__in=organization_ids):
            webhooks_by_organization.setdefault(webhook.organization_id, []).append(webhook)
        Delivery.objects.bulk_create(
            [
                Delivery(webhook=webhook, notification=notification)
                for notification in notifications
                for webhook in webhooks_by_organization.get(notification.organization_id, ())
                if _wants(webhook, notification)
            ],
            ignore_conflicts=True,
        )
        handled = Notification.objects.filter(pk__in=[notification.pk for notification in notifications])
        handled.update(queued_at=timezone.now())
    return len(notifications)


def _wants(webhook: Webhook, notification: Notification) -> bool:
    """Return whether a webhook gets a notification: of one of its kinds, and not created before the webhook.

    A webhook without kinds gets notifications of all kinds.
    """
    is_chosen = not webhook.kinds or notification.kind in webhook.kinds
    return is_chosen and webhook.created_at <= notification.created_at


def deliver_due() -> int:
    """Send a round of deliveries that are due, unless another process does so. Return how many were accepted."""
    with _delivery_lock() as is_locked:
        return sum(_send_round()) if is_locked else 0


def delete_old() -> None:
    """Delete notifications older than RETENTION, with their deliveries."""
    Notification.objects.filter(created_at__lt=timezone.now() - RETENTION).delete()


def signature(secret: str, body: bytes, sent_at: int) -> str:
    """Return the value of the header Trainyard-Signature, in the format that Stripe's webhooks use.

    It proves to a receiver that the console sent `body` at the Unix time `sent_at`.
    """
    digest = hmac.new(secret.encode(), f"{sent_at}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={sent_at},v1={digest}"


def body_of(delivery: Delivery) -> bytes:
    """Return the request's body: the notification as JSON."""
    notification = delivery.notification
    content: dict[str, Any] = {
        "id": str(delivery.key),
        "kind": notification.kind,
        "created_at": notification.created_at.isoformat(),
        "organization": delivery.webhook.organization.slug,
        "data": notification.data,
    }
    return json.dumps(content, separators=(",", ":")).encode()


def _send_round() -> Iterator[bool]:
    """Send the first due delivery of each of up to ROUND_SIZE webhooks. Yield for each whether it was accepted."""
    due = Delivery.objects.filter(state=Delivery.States.DUE, due_at__lte=timezone.now())
    # One for each webhook, so that the backlog of one webhook cannot fill a round while the others wait.
    first_of_each_webhook = due.order_by("webhook_id", "due_at", "id").distinct("webhook_id").values("pk")
    chosen = Delivery.objects.filter(pk__in=first_of_each_webhook).select_related(
        "webhook__organization", "notification"
    )
    deliveries = list(chosen.order_by("due_at", "id")[:ROUND_SIZE])
    bodies = [body_of(delivery) for delivery in deliveries]
    secrets = [encryption.decrypt(delivery.webhook.secret, purpose=ENCRYPTION_PURPOSE) for delivery in deliveries]
    with ThreadPoolExecutor(THREADS) as pool:
        results = pool.map(_send, deliveries, bodies, secrets)
        for delivery, result in zip(deliveries, results, strict=True):
            _store_result(delivery, result)
            yield result.is_accepted


def _send(delivery: Delivery, body: bytes, secret: str | None) -> RequestResult:
    """Send one request, and return its result. It runs in a thread of the pool, and must not use the database."""
    if secret is None:
        return RequestResult(error="The key of the signatures can no longer be decrypted: create the webhook again.")
    parts = urlsplit(delivery.webhook.url)
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "Trainyard-Webhook/1",
        "Trainyard-Event": delivery.notification.kind,
        "Trainyard-Delivery": str(delivery.key),
        "Trainyard-Signature": signature(secret, body, int(time.time())),
    }
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        receiver = connections.connection_to(
            f"{parts.scheme}://{parts.netloc}", allows_private=settings.WEBHOOK_PRIVATE_ADDRESSES
        )
        # The timeout limits connecting, and then each read on its own. A receiver that sends single bytes could hold
        # the thread forever. Therefore `time_limit` limits the request as a whole.
        receiver.timeout = REQUEST_SECONDS
        with closing(receiver):
            receiver.connect()
            with connections.time_limit(receiver, REQUEST_SECONDS):
                receiver.request("POST", target, body, headers)
                response = receiver.getresponse()
    except connections.ForbiddenAddress:
        return RequestResult(error="The host has no public address.")
    except (OSError, http.client.HTTPException, ValueError) as error:
        return RequestResult(error=f"{type(error).__name__}: {error}"[:ERROR_LENGTH])
    return RequestResult(
        status=response.status, error="" if 200 <= response.status < 300 else response.reason[:ERROR_LENGTH]
    )


def _store_result(delivery: Delivery, result: RequestResult) -> None:
    """Store the result of a request: the delivery is delivered, has failed for good, or is due again later.

    If `redeliver` has made the delivery due again during the request, store nothing, so that the next round sends it.
    """
    now = timezone.now()
    tries = delivery.tries + 1
    # The receiver writes the error. If PostgreSQL could not store it, each round would send this delivery again.
    values: dict[str, Any] = {"tries": tries, "status": result.status, "error": storable(result.error)}
    if result.is_accepted:
        values |= {"state": Delivery.States.DELIVERED, "delivered_at": now}
    elif tries > len(RETRY_SECONDS):
        values |= {"state": Delivery.States.FAILED}
    else:
        values |= {"due_at": now + timedelta(seconds=RETRY_SECONDS[tries - 1])}
    Delivery.objects.filter(pk=delivery.pk, due_at=delivery.due_at).update(**values)


@contextmanager
def _delivery_lock() -> Iterator[bool]:
    """Hold the lock for delivering during the block; yield False at once if another process holds it.

    PostgreSQL releases the lock of a process that dies.
    """
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(%s)", [ADVISORY_LOCK])
        is_locked = bool(cursor.fetchone()[0])
    try:
        yield is_locked
    finally:
        if is_locked:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_advisory_unlock(%s)", [ADVISORY_LOCK])
