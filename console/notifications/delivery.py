"""Deliver notifications to webhooks: signed POST requests over HTTPS, tried again for about a day.

Receivers are customers' machines, and slow or hostile ones. So one process delivers at a time, with some threads; each
request goes to a public address, follows no redirect, and ends after some seconds; an organization has one request at a
time in each round.
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
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.db import connection, transaction
from django.utils import timezone

from console.core import connections, encryption
from console.notifications.models import Delivery, Notification, Webhook
from console.notifications.services import PURPOSE

logger = logging.getLogger(__name__)
WAITS = (60, 300, 1800, 7200, 21600, 43200)
"""Seconds before each further try. After the last one the delivery has failed."""
REQUEST_SECONDS = 10.0
"""How long a receiver may take."""
THREADS = 8
ROUND = 64
"""Deliveries of one round: with THREADS at a time, at most 80 seconds if every receiver is slow."""
KEEP = timedelta(days=90)
"""How long notifications and the log of their deliveries are kept."""
LOCK = 7_420
"""The number of the advisory lock; no other lock of the console uses it."""


@dataclass(frozen=True)
class Answer:
    """How a receiver answered: an HTTP status, or why there is none."""

    status: int | None = None
    error: str = ""

    @property
    def is_good(self) -> bool:
        """Whether the receiver accepted it."""
        return self.status is not None and 200 <= self.status < 300


def queue() -> int:
    """Create the deliveries of new notifications. Return how many notifications there were. Safe to repeat."""
    with transaction.atomic():
        new = list(Notification.objects.select_for_update(skip_locked=True).filter(queued_at=None).order_by("id")[:500])
        by_organization: dict[int, list[Webhook]] = {}
        for hook in Webhook.objects.filter(organization__in={each.organization_id for each in new}):
            by_organization.setdefault(hook.organization_id, []).append(hook)
        Delivery.objects.bulk_create(
            [
                Delivery(webhook=hook, notification=each)
                for each in new
                for hook in by_organization.get(each.organization_id, ())
                if (not hook.kinds or each.kind in hook.kinds) and hook.created_at <= each.created_at
            ],
            ignore_conflicts=True,
        )
        Notification.objects.filter(pk__in=[each.pk for each in new]).update(queued_at=timezone.now())
    return len(new)


def deliver_due() -> int:
    """Send what is due, unless another process does. Return how many receivers accepted."""
    with _only_one() as is_ours:
        return sum(_round()) if is_ours else 0


def tidy() -> None:
    """Delete old notifications with their deliveries."""
    Notification.objects.filter(created_at__lt=timezone.now() - KEEP).delete()


def signature(secret: str, body: bytes, at: int) -> str:
    """Return the header by which a receiver knows that the console sent `body` at this Unix time."""
    digest = hmac.new(secret.encode(), f"{at}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={at},v1={digest}"


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


def _round() -> Iterator[bool]:
    due = Delivery.objects.filter(state=Delivery.States.DUE, due_at__lte=timezone.now()).order_by("due_at", "id")
    chosen: dict[int, Delivery] = {}
    for delivery in due.select_related("webhook__organization", "notification")[: ROUND * 4]:
        chosen.setdefault(delivery.webhook_id, delivery)  # one for each receiver in a round
    batch = list(chosen.values())[:ROUND]
    requests = [(each, body_of(each), encryption.decrypt(each.webhook.secret, purpose=PURPOSE)) for each in batch]
    with ThreadPoolExecutor(THREADS) as pool:
        answers = pool.map(lambda request: _send(*request), requests)
        for delivery, answer in zip(batch, answers, strict=True):
            _store(delivery, answer)
            yield answer.is_good


def _send(delivery: Delivery, body: bytes, secret: str | None) -> Answer:
    """Send one request. Runs in a thread, and uses no database."""
    if secret is None:
        return Answer(error="The key of the signatures can no longer be decrypted: create the webhook again.")
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
        receiver.timeout = REQUEST_SECONDS
        with closing(receiver):
            receiver.connect()
            with connections.time_limit(receiver, REQUEST_SECONDS):
                receiver.request("POST", target, body, headers)
                response = receiver.getresponse()
    except connections.ForbiddenAddress:
        return Answer(error="The host has no public address.")
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Answer(error=f"{type(error).__name__}: {error}"[:200])
    return Answer(status=response.status, error="" if 200 <= response.status < 300 else response.reason[:200])


def _store(delivery: Delivery, answer: Answer) -> None:
    now = timezone.now()
    tries = delivery.tries + 1
    values: dict[str, Any] = {"tries": tries, "status": answer.status, "error": answer.error}
    if answer.is_good:
        values |= {"state": Delivery.States.DELIVERED, "delivered_at": now}
    elif tries > len(WAITS):
        values |= {"state": Delivery.States.FAILED}
    else:
        values |= {"due_at": _next_try(now, tries)}
    Delivery.objects.filter(pk=delivery.pk).update(**values)


def _next_try(now: datetime, tries: int) -> datetime:
    return now + timedelta(seconds=WAITS[tries - 1])


@contextmanager
def _only_one() -> Iterator[bool]:
    """Yield whether no other process delivers. PostgreSQL releases the lock of a process that dies."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(%s)", [LOCK])
        is_ours = bool(cursor.fetchone()[0])
    try:
        yield is_ours
    finally:
        if is_ours:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_advisory_unlock(%s)", [LOCK])
