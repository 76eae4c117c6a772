"""Delivery of the sandbox's webhooks: signed as Stripe signs them, and retried until the console answers with 2xx."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import threading
import time
import urllib.request
from urllib.error import URLError

from billing.sandbox.account import public_fields
from billing.sandbox.provider import Provider
from billing.sandbox.store import StripeObject

RETRY_SECONDS = (0.2, 1, 2, 5, 10, 30, 60)
"""Delays between retries of a webhook; the last one repeats. Stripe's delays are hours. These are short, because the
console usually fails to answer only while it restarts."""
ANSWER_SECONDS = 10
"""How long to wait for the console's answer. It stores an event in much less, unless it is just starting."""


class Delivery:
    """Sends a provider's events to one URL. Run `deliver` in a thread of its own; `stop` ends it."""

    def __init__(self, provider: Provider, *, url: str, secret: str) -> None:
        self.url = url
        self._provider = provider
        self._secret = secret
        self._wake = threading.Event()
        self._stopped = threading.Event()
        provider.after_request = self._wake.set  # only requests to the provider create events

    def deliver(self) -> None:
        """Send the waiting events, oldest first, until `stop` is called."""
        while not self._stopped.is_set():
            for event_id in self._due():
                if self._stopped.is_set():
                    return
                self._deliver_one(event_id)
            self._wake.wait(self._until_next())
            # Cleared before the next look, so that neither an event nor a stop that comes meanwhile is missed.
            self._wake.clear()

    def stop(self) -> None:
        """End `deliver`."""
        self._stopped.set()
        self._wake.set()

    def _due(self) -> list[str]:
        """Return the ids of the events to send now."""
        with self._provider.lock:
            return [record["id"] for record in self._records() if record["next_at"] <= time.time()]

    def _until_next(self) -> float | None:
        """Return the seconds until the next retry, or None if no event waits."""
        with self._provider.lock:
            times = [record["next_at"] for record in self._records()]
        return max(0.0, min(times) - time.time()) if times else None

    def _records(self) -> list[StripeObject]:
        """Return a record of each event that the console has not accepted: id, tries, and time of the next try."""
        return list(self._provider.account.store.all("delivery"))

    def _deliver_one(self, event_id: str) -> None:
        """Send one event. If the console accepts it, remove its record, otherwise schedule the next try."""
        store = self._provider.account.store
        with self._provider.lock:
            event = self._provider.account.get("event", event_id)
            body = json.dumps(public_fields(event)).encode()
        # Without the lock, so that API requests need not wait for the console's answer.
        is_accepted = self._send(body)
        with self._provider.lock:
            if is_accepted:
                store.remove("delivery", event_id)
                store.put("event", event_id, event | {"pending_webhooks": 0})
            elif record := store.get("delivery", event_id):
                wait = RETRY_SECONDS[min(record["tries"], len(RETRY_SECONDS) - 1)]
                store.put("delivery", event_id, record | {"tries": record["tries"] + 1, "next_at": time.time() + wait})
            store.commit()

    def _send(self, body: bytes) -> bool:
        """Post a webhook and return whether the answer was 2xx."""
        stamp = int(time.time())
        signature = hmac.new(self._secret.encode(), b"%d.%s" % (stamp, body), hashlib.sha256).hexdigest()
        request = urllib.request.Request(  # noqa: S310  # the URL is our own console's, from settings
            self.url,
            data=body,
            headers={"Content-Type": "application/json", "Stripe-Signature": f"t={stamp},v1={signature}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:  # noqa: S310  # as above
                return bool(200 <= response.status < 300)
        except (URLError, OSError, http.client.HTTPException):
            return False
