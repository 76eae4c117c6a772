"""The provider's events: stored as they came, acted on later, each once.

The one rule: an event is only a hint that something changed. What is done is keyed on the business object, and where
the order of events could matter, the object is asked for as it is now. What can't be done yet is parked and tried
again; what does not match our rows is quarantined for a person.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from itertools import islice
from typing import Any

from django.db import InterfaceError, OperationalError, connection, transaction
from django.db.models import Q
from django.utils import timezone

from billing import automatic, customers, disputes, gateway, payments, reversals
from billing.errors import CustomerGone, Parked, PaymentRefused, PaymentUnavailable, Quarantined
from billing.models import StripeEvent, TopUp

logger = logging.getLogger(__name__)

FETCH_BACK = timedelta(days=3)
"""How far the sweep looks back for events that were not delivered."""
PARK_SECONDS = (15, 60, 300, 1800, 3600)
"""Waits before a parked event is tried again; the last is repeated."""
PARKED_AT_MOST = timedelta(days=3)
OPEN = (StripeEvent.States.RECEIVED, StripeEvent.States.PARKED)
AGAIN = (*OPEN, StripeEvent.States.QUARANTINED)
"""What *apply again* acts on."""
ODD = re.compile(r"\\u(0000|d[89a-f])", re.IGNORECASE)
"""In JSON: what may be a NUL, or half a character."""
STORE = """
INSERT INTO billing_stripeevent (event_id, type, payload, state, reason, received_at, tries)
VALUES (%s, %s, %s::jsonb, 'received', '', now(), 0) ON CONFLICT (event_id) DO NOTHING RETURNING id
"""


# --- Stored -----------------------------------------------------------------------------------------------------------


def store(event: Mapping[str, Any], body: str) -> int | None:
    """Store a verified event, `body` being its JSON; None where it was stored before. One statement, one commit."""
    if ODD.search(body):
        event = _readable(event)
        body = json.dumps(event)
    values = (event["id"][:255], event["type"][:100], body)
    try:
        # A broken connection shows itself here as well as by asking first, and the statement can be repeated.
        connection.health_check_done = True  # type: ignore[attr-defined]  # django-stubs doesn't know it
        return _insert(values)
    except (OperationalError, InterfaceError):
        if connection.in_atomic_block:
            raise
        connection.close()
        return _insert(values)


def _readable(thing: Any) -> Any:
    """What PostgreSQL can keep of it: a payer may have typed anything, and one event must not hold up the sweep."""
    if isinstance(thing, dict):
        return {_readable(name): _readable(value) for name, value in thing.items()}
    if isinstance(thing, list):
        return [_readable(value) for value in thing]
    if isinstance(thing, str):
        return thing.replace("\0", "\ufffd").encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return thing


def _insert(values: tuple[str, str, str]) -> int | None:
    with connection.cursor() as cursor:
        cursor.execute(STORE, values)
        row = cursor.fetchone()
    return row[0] if row else None


def fetch_undelivered() -> int:
    """Ask the provider for the events of late and store those that never came. Gives how many were new."""
    since = timezone.now() - FETCH_BACK
    events, fresh = gateway.events_since(int(since.timestamp())), 0
    while page := list(islice(events, 100)):
        ids = [event["id"] for event in page]
        known = set(StripeEvent.objects.filter(event_id__in=ids).values_list("event_id", flat=True))
        fresh += sum(store(event, json.dumps(event)) is not None for event in page if event["id"] not in known)
    return fresh


# --- Applied ----------------------------------------------------------------------------------------------------------


def apply_waiting(*, limit: int = 1000) -> int:
    """Act on every event that waits, oldest first. Gives how many there were. Safe for several workers at once."""
    due = StripeEvent.objects.filter(
        Q(state=StripeEvent.States.RECEIVED) | Q(state=StripeEvent.States.PARKED, retry_at__lte=timezone.now())
    )
    waiting = list(due.order_by("pk").values_list("pk", flat=True)[:limit])
    for pk in waiting:
        apply(event_pk=pk)
    return len(waiting)


def apply(*, event_pk: int, again: bool = False) -> None:
    """Act on a stored event, once. Safe to repeat, and for two workers at once. It never raises for what is in it.

    `again` acts on a quarantined one too, as a person asks for.
    """
    states = AGAIN if again else OPEN
    event = StripeEvent.objects.filter(pk=event_pk, state__in=states).first()
    if event is None:
        return
    try:
        found = _found(event)
        with transaction.atomic():
            locked = StripeEvent.objects.select_for_update().get(pk=event_pk)
            if locked.state not in states:
                return
            acted = _act(event, found)
            _close(event, StripeEvent.States.APPLIED if acted else StripeEvent.States.IGNORED, "", states)
    except Quarantined as refusal:
        _close(event, StripeEvent.States.QUARANTINED, str(refusal), states)
    except Parked as reason:
        _park(event, str(reason), states)
    except PaymentUnavailable:
        _park(event, "The payment provider did not answer when asked about it.", states)
    except Exception as error:
        # Whatever is wrong with one event must keep no worker from the others.
        logger.exception("Payment event %s could not be applied; it is tried again.", event_pk)
        _park(event, f"{type(error).__name__}: {error}", states)


def _found(event: StripeEvent) -> dict[str, Any]:
    """The object an event is about: as it is now, where events out of order would tell another story.

    What is asked of the provider is asked here, outside of any transaction.
    """
    thing = _object(event.payload)
    kind = str(thing.get("object"))
    if event.type not in HANDLERS or kind not in {"refund", "dispute", "customer"}:
        return thing
    try:
        thing = gateway.current(kind, str(thing.get("id")))
        intent = str(thing.get("payment_intent") or "")
        if intent and not TopUp.objects.filter(payment_intent=intent).exists():
            _catch_up(intent)
    except CustomerGone:
        return thing | {"deleted": True}
    except PaymentRefused as error:
        raise Quarantined(f"The payment provider knows nothing of it: {error.reason}") from error
    return thing


def _catch_up(payment_intent: str) -> None:
    """Credit a payment whose own event has not come yet, from the provider's answer. Raises Quarantined."""
    intent = gateway.current("payment_intent", payment_intent)
    session = gateway.session_of(payment_intent)
    with transaction.atomic():
        if session is not None and session.get("client_reference_id"):
            payments.apply_session(session, livemode=session.get("livemode"), at=session.get("created"))
        else:
            automatic.apply_intent(intent, livemode=intent.get("livemode"), at=intent.get("created"))


def _act(event: StripeEvent, found: dict[str, Any]) -> bool:
    """Do what an event asks for; False where that is nothing."""
    handler = HANDLERS.get(event.type)
    return handler(found, event.payload) if handler else False


def _session(found: dict[str, Any], payload: dict[str, Any]) -> bool:
    _require_kind(found, "checkout.session", "Checkout Session")
    if found.get("mode") == "setup":
        return False
    payments.apply_session(found, livemode=payload.get("livemode"), at=payload.get("created"))
    return True


def _failed_session(found: dict[str, Any], _payload: dict[str, Any]) -> bool:
    _require_kind(found, "checkout.session", "Checkout Session")
    payments.fail_session(found)
    return True


def _intent(found: dict[str, Any], payload: dict[str, Any]) -> bool:
    _require_kind(found, "payment_intent", "Payment Intent")
    return automatic.apply_intent(found, livemode=payload.get("livemode"), at=payload.get("created"))


def _refund(found: dict[str, Any], payload: dict[str, Any]) -> bool:
    _require_kind(found, "refund", "Refund")
    reversals.apply_refund(found, livemode=payload.get("livemode"))
    return True


def _dispute(found: dict[str, Any], payload: dict[str, Any]) -> bool:
    _require_kind(found, "dispute", "Dispute")
    disputes.apply_dispute(found, livemode=payload.get("livemode"))
    return True


def _customer(found: dict[str, Any], payload: dict[str, Any]) -> bool:
    _require_kind(found, "customer", "Customer")
    payments.require_match({"livemode": (payload.get("livemode"), gateway.is_live())})
    return found.get("deleted") is True and customers.forget(str(found["id"]))


HANDLERS: dict[str, Callable[[dict[str, Any], dict[str, Any]], bool]] = {
    "checkout.session.completed": _session,
    "checkout.session.async_payment_succeeded": _session,
    "checkout.session.async_payment_failed": _failed_session,
    "checkout.session.expired": _session,
    "payment_intent.succeeded": _intent,
    "payment_intent.payment_failed": _intent,
    "refund.created": _refund,
    "refund.updated": _refund,
    "refund.failed": _refund,
    "charge.dispute.created": _dispute,
    "charge.dispute.updated": _dispute,
    "charge.dispute.funds_withdrawn": _dispute,
    "charge.dispute.funds_reinstated": _dispute,
    "charge.dispute.closed": _dispute,
    "customer.deleted": _customer,
}
"""The one table of what is acted on; every other type is stored and ignored."""


def _object(payload: dict[str, Any]) -> dict[str, Any]:
    data = payload.get("data")
    thing = data.get("object") if isinstance(data, dict) else None
    return thing if isinstance(thing, dict) else {}


def _require_kind(found: dict[str, Any], kind: str, words: str) -> None:
    if found.get("object") != kind:
        raise Quarantined(f"The event carries no {words}.")


def _close(event: StripeEvent, state: StripeEvent.States, reason: str, states: tuple[StripeEvent.States, ...]) -> None:
    """Write what became of an event, unless another worker was first."""
    StripeEvent.objects.filter(pk=event.pk, state__in=states).update(
        state=state, reason=reason, applied_at=timezone.now(), retry_at=None
    )


def _park(event: StripeEvent, reason: str, states: tuple[StripeEvent.States, ...]) -> None:
    if event.received_at < timezone.now() - PARKED_AT_MOST:
        _close(event, StripeEvent.States.QUARANTINED, reason, states)
        return
    wait = PARK_SECONDS[min(event.tries, len(PARK_SECONDS) - 1)]
    StripeEvent.objects.filter(pk=event.pk, state__in=states).update(
        state=StripeEvent.States.PARKED,
        reason=reason,
        tries=event.tries + 1,
        retry_at=timezone.now() + timedelta(seconds=wait),
    )
