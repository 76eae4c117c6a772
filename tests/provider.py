"""The payments sandbox inside a test: the gateway's real `stripe` client calls it without a socket.

It is the provider's side: what it holds is compared with what our ledger says it holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx
import stripe

from billing import events, gateway
from billing.models import StripeEvent
from billing.sandbox import Provider, Store

GOOD = "4242 4242 4242 4242"
"""The number of a test card of Stripe that works. `billing.sandbox.cards` has the behaviour of each number."""
DECLINED = "4000 0000 0000 0002"
"""A card that is declined each time."""
ASKS_FOR_CONFIRMATION = "4000 0025 0000 3155"
"""A card whose bank asks the payer to confirm a payment, but not if the card is saved."""
ALWAYS_ASKS_FOR_CONFIRMATION = "4000 0027 6000 3184"
"""A card whose bank asks the payer to confirm each payment, also if the card is saved."""
FAILS_LATER = "4000 0000 0000 0341"
"""A card that can be saved and then declines every charge."""
DISPUTED = "4000 0000 0000 0259"
"""A card whose payments are disputed at once."""
REFUND_FAILS = "4000 0000 0000 5126"
"""A card whose refunds succeed at first and then fail."""


class Wire(stripe.HTTPClient):
    """The network of the `stripe` client. `before` and `after` are called around each request, and may raise."""

    name = "wire"

    def __init__(self, sandbox: Provider) -> None:
        super().__init__()
        self.sandbox = sandbox
        self.before: Callable[[str, str], None] = lambda _method, _path: None
        self.after: Callable[[str, str], None] = lambda _method, _path: None
        self.calls: list[tuple[str, str]] = []

    def request(self, method: str, url: str, headers: Any, post_data: Any = None, **_options: Any) -> Any:
        parts = urlsplit(url)
        self.calls.append((method.upper(), parts.path))
        self.before(method.upper(), parts.path)
        encoded = (post_data or "") if method == "post" else parts.query
        key = dict(headers or {}).get("Idempotency-Key", "")
        answer = self.sandbox.handle(method.upper(), parts.path, encoded, key)
        self.after(method.upper(), parts.path)
        return json.dumps(answer.body), answer.status, {}

    def close(self) -> None:
        pass


def fail_network(*_call: str) -> None:
    """Raise the error of a failed network, as `before` or `after` of a `Wire`."""
    raise stripe.APIConnectionError("The network failed.", should_retry=False)


class Stripe:
    """The payments sandbox in place of Stripe, the network to it, and the delivery of its events."""

    def __init__(self, *, clock: Callable[[], float] | None = None, store: Store | None = None) -> None:
        options = {"clock": clock} if clock else {}
        self.sandbox = Provider(store or Store(), base_url="https://pay.example", **options)
        self.wire = Wire(self.sandbox)
        self.client = stripe.StripeClient(
            gateway.sandbox_key(), http_client=self.wire, stripe_version=gateway.API_VERSION, max_network_retries=0
        )
        self.event_count = 0  # of the events that `fresh` has returned

    def ask(self, method: str, path: str, **form: Any) -> Any:
        """Call the API as Stripe's own Dashboard would."""
        answer = self.sandbox.handle(method, f"/v1/{path}", str(httpx.QueryParams(form)))
        assert answer.status == 200, answer.body
        return answer.body

    def pay(self, session_id: str, card: str = GOOD, **form: Any) -> str:
        """Pay at a page. Return why it was refused, or the next address."""
        step = self.sandbox.submit(session_id, {"card": card} | form)
        return step.error or step.next_url

    def fresh(self) -> list[dict[str, Any]]:
        """Return the events since the last call, oldest first."""
        store = self.sandbox.account.store
        events_since = store.newest("event", store.count("event") - self.event_count)[::-1]
        self.event_count += len(events_since)
        return events_since

    def deliver(self, *chosen: dict[str, Any]) -> list[StripeEvent]:
        """Store and apply the chosen events, or all new ones. Return their rows."""
        return [apply(event) for event in chosen or self.fresh()]

    @contextmanager
    def network_failing(self, when: Literal["before", "after"] = "before") -> Iterator[None]:
        """Break the network before each call arrives, or after it was served."""
        setattr(self.wire, when, fail_network)
        try:
            yield
        finally:
            setattr(self.wire, when, lambda *_call: None)

    def held(self, currency: str = "USD") -> int:
        """Return what the provider holds for us, in minor units."""
        return self.sandbox.balance(currency)


def apply(event: dict[str, Any]) -> StripeEvent:
    """Store and apply an event. Return its row."""
    row = receive(event)
    events.apply(event_pk=row.pk)
    row.refresh_from_db()
    return row


def receive(event: dict[str, Any]) -> StripeEvent:
    """Store an event once. Return its row."""
    events.store(event)
    return StripeEvent.objects.get(event_id=event["id"])
