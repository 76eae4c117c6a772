"""Store the payment provider's webhook events as they arrive, and apply each one later, once.

An event is only a hint that something changed. Each action is keyed on its business object (top-up, refund, dispute),
not on the event, so two events about one change act once. For objects whose events can be out of order, `apply` fetches
the current state. An event that cannot be applied yet is parked and retried. An event that contradicts our rows is
quarantined until an administrator decides.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from datetime import timedelta
from itertools import islice
from typing import Any

from django.db import connection, transaction
from django.db.models import Q
from django.utils import timezone

from billing import auto_topup, customers, disputes, gateway, payments, refunds
from billing.errors import CustomerGone, Parked, PaymentRefused, PaymentUnavailable, Quarantined
from billing.models import StripeEvent, TopUp
from runtime.json_values import storable

logger = logging.getLogger(__name__)

FETCH_PERIOD = timedelta(days=3)
"""How far back `fetch_undelivered` looks. Stripe itself retries a delivery for three days."""
RETRY_SECONDS = (15, 60, 300, 1800, 3600)
"""Delays between retries of a parked event; the last one repeats. Most events wait only for another event, which takes
seconds; an outage of the provider can take hours."""
MAX_PARKED_AGE = timedelta(days=3)
"""Age up to which a parked event is retried. Stripe retries deliveries for three days, so the event that a parked event
waits for can take as long. An older parked event is quarantined, so that an administrator sees it."""
OPEN_STATES = (StripeEvent.States.RECEIVED, StripeEvent.States.PARKED)
"""States of events that are still to be applied."""

INSERT = """
INSERT INTO billing_stripeevent (event_id, type, payload, state, reason, received_at, tries)
VALUES (%s, %s, %s, %s, '', %s, 0) ON CONFLICT (event_id) DO NOTHING
"""
"""One statement, in SQL because every webhook waits for it: `bulk_create(ignore_conflicts=True)` adds BEGIN and COMMIT,
and takes three times the CPU time."""
MAYBE_UNSTORABLE = re.compile(r"\\u(0000|d[89a-f])")
"""Finds an escaped NUL or surrogate in ASCII JSON, because PostgreSQL stores neither NUL nor half a pair of surrogates.
A whole pair matches too, although PostgreSQL can store it."""


# --- Store ------------------------------------------------------------------------------------------------------------


def store(event: dict[str, Any]) -> None:
    """Store a verified event, unless it is already stored: the provider may deliver it twice."""
    payload = json.dumps(event)
    if MAYBE_UNSTORABLE.search(payload):  # in few events; `storable` looks at each value, which would slow the others
        event = storable(event)
        payload = json.dumps(event)
    with connection.cursor() as cursor:
        # Cut to the columns' lengths: an unexpected value must not make the insert fail.
        values = (event["id"][:255], event["type"][:100], payload, StripeEvent.States.RECEIVED.value, timezone.now())
        cursor.execute(INSERT, values)


def fetch_undelivered() -> int:
    """Fetch the provider's recent events and store those whose webhook did not arrive. Returns their number."""
    since = timezone.now() - FETCH_PERIOD
    events, count = gateway.events_since(int(since.timestamp())), 0
    while page := list(islice(events, 100)):  # one query of ours for each page of the provider, which has 100 events
        ids = [event["id"] for event in page]
        stored = set(StripeEvent.objects.filter(event_id__in=ids).values_list("event_id", flat=True))
        for event in page:
            if event["id"] not in stored:
                store(event)
                count += 1
    return count


# --- Apply ------------------------------------------------------------------------------------------------------------


def apply_waiting(*, limit: int = 1000) -> int:
    """Apply at most `limit` waiting events, oldest first, and return their number. Safe for concurrent workers.

    The limit bounds the memory for the ids. The caller repeats the call until no event waits.
    """
    due_events = StripeEvent.objects.filter(
        Q(state=StripeEvent.States.RECEIVED) | Q(state=StripeEvent.States.PARKED, retry_at__lte=timezone.now())
    )
    waiting = list(due_events.order_by("pk").values_list("pk", flat=True)[:limit])
    for pk in waiting:
        apply(event_pk=pk)
    return len(waiting)


def apply(*, event_pk: int, include_quarantined: bool = False) -> None:
    """Apply a stored event once. Safe for concurrent workers. No content of an event makes this raise.

    `include_quarantined` also applies a quarantined event, at an administrator's request.
    """
    states = (*OPEN_STATES, StripeEvent.States.QUARANTINED) if include_quarantined else OPEN_STATES
    event = StripeEvent.objects.filter(pk=event_pk, state__in=states).first()
    if event is None:
        return
    try:
        stripe_object = _prepare_object(event)
        with transaction.atomic():
            # Check again under the lock: another worker may have applied the event during the calls to the provider.
            locked = StripeEvent.objects.select_for_update().get(pk=event_pk)
            if locked.state not in states:
                return
            handler = HANDLERS.get(event.type)
            is_applied = handler is not None and handler(stripe_object, event.payload)
            _close(event, StripeEvent.States.APPLIED if is_applied else StripeEvent.States.IGNORED, "", states)
    except Quarantined as error:
        _close(event, StripeEvent.States.QUARANTINED, str(error), states)
    except Parked as error:
        _park(event, str(error), states)
    except PaymentUnavailable:
        _park(event, "The payment provider did not answer a request for the object.", states)
    except Exception as error:
        # One broken event must not stop the others.
        logger.exception("Payment event %s could not be applied. It will be retried.", event_pk)
        _park(event, f"{type(error).__name__}: {error}", states)


def _prepare_object(event: StripeEvent) -> dict[str, Any]:
    """Return the object that an event is about. If the object's payment is not credited yet, credit it first.

    Refunds, disputes and customers are fetched from the provider, because their events can be out of order. All calls
    to the provider happen here, outside any transaction. Raises Quarantined, PaymentUnavailable.
    """
    stripe_object = _embedded_object(event.payload)
    kind = str(stripe_object.get("object"))
    if event.type not in HANDLERS or kind not in {"refund", "dispute", "customer"}:
        return stripe_object
    try:
        stripe_object = gateway.fetch_object(kind, str(stripe_object.get("id")))
        intent_id = str(stripe_object.get("payment_intent") or "")
        # The event of a refund or dispute can arrive before the event of the payment.
        if intent_id and not TopUp.objects.filter(payment_intent=intent_id).exists():
            _credit_payment(intent_id)
    except CustomerGone:
        return stripe_object | {"deleted": True}  # as Stripe marks a deleted customer
    except PaymentRefused as error:
        raise Quarantined(f"The payment provider does not know this object: {error.reason}") from error
    return stripe_object


def _credit_payment(intent_id: str) -> None:
    """Fetch a payment whose own event has not arrived, and credit it. Raises Quarantined."""
    intent = gateway.fetch_object("payment_intent", intent_id)
    session = gateway.find_session(intent_id)
    # Only the payment's event has the time of the payment. `created`, the time at which the page or charge was created,
    # comes nearest.
    with transaction.atomic():
        # Our Checkout Sessions carry a reference. An automatic top-up has no session, only a Payment Intent.
        if session is not None and session.get("client_reference_id"):
            payments.apply_session(session, livemode=session.get("livemode"), at=session.get("created"))
        else:
            auto_topup.apply_intent(intent, livemode=intent.get("livemode"), at=intent.get("created"))


def _apply_session(session: dict[str, Any], payload: dict[str, Any]) -> bool:
    """Apply a Checkout Session that completed or expired."""
    _require_kind(session, "checkout.session", "Checkout Session")
    if session.get("mode") == "setup":  # the page saved a card; no money moved
        return False
    payments.apply_session(session, livemode=payload.get("livemode"), at=payload.get("created"))
    return True


def _fail_session(session: dict[str, Any], _payload: dict[str, Any]) -> bool:
    _require_kind(session, "checkout.session", "Checkout Session")
    payments.fail_session(session)
    return True


def _apply_intent(intent: dict[str, Any], payload: dict[str, Any]) -> bool:
    _require_kind(intent, "payment_intent", "Payment Intent")
    return auto_topup.apply_intent(intent, livemode=payload.get("livemode"), at=payload.get("created"))


def _apply_refund(refund: dict[str, Any], payload: dict[str, Any]) -> bool:
    _require_kind(refund, "refund", "Refund")
    refunds.apply_refund(refund, livemode=payload.get("livemode"))
    return True


def _apply_dispute(dispute: dict[str, Any], payload: dict[str, Any]) -> bool:
    _require_kind(dispute, "dispute", "Dispute")
    disputes.apply_dispute(dispute, livemode=payload.get("livemode"))
    return True


def _forget_customer(customer: dict[str, Any], payload: dict[str, Any]) -> bool:
    """Forget a customer if `_prepare_object` found that it is deleted.

    Raises Quarantined for an event of the other mode (test or live).
    """
    _require_kind(customer, "customer", "Customer")
    payments.require_match({"livemode": (payload.get("livemode"), gateway.is_live())})
    return customer.get("deleted") is True and customers.forget(str(customer["id"]))


HANDLERS: dict[str, Callable[[dict[str, Any], dict[str, Any]], bool]] = {
    "checkout.session.completed": _apply_session,
    "checkout.session.async_payment_succeeded": _apply_session,
    "checkout.session.async_payment_failed": _fail_session,
    "checkout.session.expired": _apply_session,
    "payment_intent.succeeded": _apply_intent,
    "payment_intent.payment_failed": _apply_intent,
    "refund.created": _apply_refund,
    "refund.updated": _apply_refund,
    "refund.failed": _apply_refund,
    "charge.dispute.created": _apply_dispute,
    "charge.dispute.updated": _apply_dispute,
    "charge.dispute.funds_withdrawn": _apply_dispute,
    "charge.dispute.funds_reinstated": _apply_dispute,
    "charge.dispute.closed": _apply_dispute,
    "customer.deleted": _forget_customer,
}
"""The handler of each event type. Events of other types are stored and ignored.

A handler gets the object from `_prepare_object` and the stored event. It returns whether it applied anything."""


def _embedded_object(payload: dict[str, Any]) -> dict[str, Any]:
    """Return `data.object` of an event, or {} if it is malformed; the handler then quarantines the event."""
    data = payload.get("data")
    stripe_object = data.get("object") if isinstance(data, dict) else None
    return stripe_object if isinstance(stripe_object, dict) else {}


def _require_kind(stripe_object: dict[str, Any], kind: str, title: str) -> None:
    if stripe_object.get("object") != kind:
        raise Quarantined(f"The event carries no {title}.")


def _close(
    event: StripeEvent, state: StripeEvent.States, reason: str, from_states: tuple[StripeEvent.States, ...]
) -> None:
    """Store the state of an event that is not retried, unless another worker has moved it out of `from_states`.

    `applied_at` becomes the time of this decision, also if the event was ignored or quarantined.
    """
    StripeEvent.objects.filter(pk=event.pk, state__in=from_states).update(
        state=state, reason=reason, applied_at=timezone.now(), retry_at=None
    )


def _park(event: StripeEvent, reason: str, from_states: tuple[StripeEvent.States, ...]) -> None:
    """Schedule the next attempt, or quarantine an event that has been retried for too long."""
    if event.received_at < timezone.now() - MAX_PARKED_AGE:
        _close(event, StripeEvent.States.QUARANTINED, reason, from_states)
        return
    delay_seconds = RETRY_SECONDS[min(event.tries, len(RETRY_SECONDS) - 1)]
    StripeEvent.objects.filter(pk=event.pk, state__in=from_states).update(
        state=StripeEvent.States.PARKED,
        reason=reason,
        tries=event.tries + 1,
        retry_at=timezone.now() + timedelta(seconds=delay_seconds),
    )
