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

GOOD, DECLINED, POOR = "4242 4242 4242 4242", "4000 0000 0000 0002", "4000 0000 0000 9995"
ASKS, ASKS_ALWAYS, FAILS_LATER = "4000 0025 0000 3155", "4000 0027 6000 3184", "4000 0000 0000 0341"
DISPUTED, REFUND_FAILS = "4000 0000 0000 0259", "4000 0000 0000 5126"


class Wire(stripe.HTTPClient):
    """The network of the `stripe` client. `before` and `after` a call is served they may raise."""

    name = "wire"

    def __init__(self, provider: Provider) -> None:
        super().__init__()
        self.provider = provider
        self.before: Callable[[str, str], None] = lambda _method, _path: None
        self.after: Callable[[str, str], None] = lambda _method, _path: None
        self.calls: list[tuple[str, str]] = []

    def request(self, method: str, url: str, headers: Any, post_data: Any = None, **_options: Any) -> Any:
        parts = urlsplit(url)
        self.calls.append((method.upper(), parts.path))
        self.before(method.upper(), parts.path)
        encoded = (post_data or "") if method == "post" else parts.query
        key = dict(headers or {}).get("Idempotency-Key", "")
        answer = self.provider.handle(method.upper(), parts.path, encoded, key)
        self.after(method.upper(), parts.path)
        return json.dumps(answer.body), answer.status, {}

    def close(self) -> None:
        pass


def lost(*_call: str) -> None:
    """For `before` or `after`: the network fails."""
    raise stripe.APIConnectionError("The network failed.", should_retry=False)


class Stripe:
    """The provider, the network to it, and the delivery of its events."""

    def __init__(self, *, clock: Callable[[], float] | None = None, store: Store | None = None) -> None:
        options = {"clock": clock} if clock else {}
        self.provider = Provider(store or Store(), base_url="https://pay.example", **options)
        self.wire = Wire(self.provider)
        self.client = stripe.StripeClient(
            gateway.sandbox_key(), http_client=self.wire, stripe_version=gateway.API_VERSION, max_network_retries=0
        )
        self.event_count = 0

    def ask(self, method: str, path: str, **form: Any) -> Any:
        """Call the API as Stripe's own Dashboard would."""
        answer = self.provider.handle(method, f"/v1/{path}", str(httpx.QueryParams(form)))
        assert answer.status == 200, answer.body
        return answer.body

    def pay(self, session_id: str, card: str = GOOD, **form: Any) -> str:
        """Pay at a page. Return why it was refused, or the next address."""
        step = self.provider.submit(session_id, {"card": card} | form)
        return step.error or step.next_url

    def fresh(self) -> list[dict[str, Any]]:
        """Return the events since the last call, oldest first."""
        store = self.provider.account.store
        events_since = store.newest("event", store.count("event") - self.event_count)[::-1]
        self.event_count += len(events_since)
        return events_since

    def deliver(self, *chosen: dict[str, Any]) -> list[StripeEvent]:
        """Store and apply the chosen events, or all new ones. Return their rows."""
        return [apply(event) for event in chosen or self.fresh()]

    @contextmanager
    def network_failing(self, when: Literal["before", "after"] = "before") -> Iterator[None]:
        """Break the network before each call arrives, or after it was served."""
        setattr(self.wire, when, lost)
        try:
            yield
        finally:
            setattr(self.wire, when, lambda *_call: None)

    def held(self, currency: str = "USD") -> int:
        """Return what the provider holds for us, in minor units."""
        return self.provider.balance(currency)


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
