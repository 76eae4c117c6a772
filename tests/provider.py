"""The payments sandbox inside a test: the gateway's real `stripe` client speaks to it without a socket.

The one rule: it is the provider's side. What it holds is compared with what our ledger says it holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
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
    """What `stripe` takes for the network. `fault(method, path)` may raise, before the call arrives or after it."""

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
    """For `before` or `after`: the network is gone."""
    raise stripe.APIConnectionError("The network is gone.", should_retry=False)


class Stripe:
    """The provider, the wire to it, and what its events do here when they are delivered."""

    def __init__(self, *, clock: Callable[[], float] | None = None, store: Store | None = None) -> None:
        options = {"clock": clock} if clock else {}
        self.provider = Provider(store or Store(), base_url="https://pay.example", **options)
        self.wire = Wire(self.provider)
        self.client = stripe.StripeClient(
            gateway.sandbox_key(), http_client=self.wire, stripe_version=gateway.API_VERSION, max_network_retries=0
        )
        self.told = 0

    def ask(self, method: str, path: str, **form: Any) -> Any:
        """A call to the API as Stripe's own Dashboard would make it."""
        answer = self.provider.handle(method, f"/v1/{path}", str(httpx.QueryParams(form)))
        assert answer.status == 200, answer.body
        return answer.body

    def pay(self, session_id: str, card: str = GOOD, **form: Any) -> str:
        """Pay a page. Gives why it was refused, or where it leads."""
        step = self.provider.submit(session_id, {"card": card} | form)
        return step.refused or step.url

    def fresh(self) -> list[dict[str, Any]]:
        """Events that were not taken by this before, oldest first."""
        store = self.provider.book.store
        found = store.newest("event", store.count("event") - self.told)[::-1]
        self.told += len(found)
        return found

    def deliver(self, *told: dict[str, Any]) -> list[StripeEvent]:
        """Store and apply events (all that are new): gives their rows."""
        return [apply(event) for event in told or self.fresh()]

    def held(self, currency: str = "USD") -> int:
        """What the provider holds for us, in minor units."""
        return self.provider.balance(currency)


def apply(event: dict[str, Any], *, again: bool = False) -> StripeEvent:
    """Store and apply an event; gives its row."""
    row = receive(event)
    events.apply(event_pk=row.pk, again=again)
    row.refresh_from_db()
    return row


def receive(event: dict[str, Any]) -> StripeEvent:
    """Store an event, once; gives its row."""
    events.store(event, json.dumps(event))
    return StripeEvent.objects.get(event_id=event["id"])
