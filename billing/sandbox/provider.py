"""The sandbox's API without HTTP: routes, form decoding and idempotency.

Requests run one at a time. Changes are written to the journal before the answer. A repeated idempotency key replays the
first answer.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl

from billing.sandbox import checkout, intents
from billing.sandbox.account import Refused, StripeAccount, public_fields, required
from billing.sandbox.store import Object, Store

KEY_SECONDS = 24 * 3600
"""How long an idempotency key is kept: 24 hours, as at Stripe."""


@dataclass(frozen=True)
class Response:
    """A response of the API."""

    status: int
    body: Object
    is_replay: bool = False


class Provider:
    """The payment provider. Thread-safe. `on_event` is called after each request, to deliver its events."""

    def __init__(self, store: Store, *, base_url: str, clock: Callable[[], float] = time.time) -> None:
        self.account = StripeAccount(store, base_url=base_url, clock=clock)
        self.lock = threading.RLock()
        self.on_event: Callable[[], None] = lambda: None

    def handle(self, method: str, path: str, encoded: str = "", key: str = "") -> Response:
        """Handle an API request; `encoded` is the query or the form, `key` the idempotency key."""
        with self.lock:
            fingerprint = hashlib.sha256(f"{method} {path} {encoded}".encode()).hexdigest()
            try:
                if key and method == "POST" and (replay := self._replay(key, fingerprint)):
                    return replay
                response = Response(HTTPStatus.OK, public_fields(self._route(method, _parts(path), decode(encoded))))
            except Refused as error:
                response = Response(error.status, error.answer)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                response = Response(400, Refused(f"Invalid request: {error}").answer)
            # As at Stripe, a decline is replayed, but a request refused as invalid may be corrected and sent again.
            if key and method == "POST" and response.status in {HTTPStatus.OK, HTTPStatus.PAYMENT_REQUIRED}:
                self._remember(key, fingerprint, response)
            self._commit()
            return response

    def session(self, session_id: str) -> Object:
        """Return a payment page's session. Raises Refused."""
        with self.lock:
            session = dict(checkout.current_session(self.account, session_id))
            self._commit()
            return session

    def submit(self, session_id: str, form: Object) -> checkout.Step:
        """Handle a payment page's form. Raises Refused if the page does not exist."""
        with self.lock:
            step = checkout.submit(self.account, checkout.current_session(self.account, session_id), form)
            self._commit()
            return step

    def last_refusal(self, session: Object) -> str:
        """Return why the last payment attempt on a page failed, or an empty string."""
        with self.lock:
            store = self.account.store
            payment = store.get("payment_intent", str(session["payment_intent"])) or {}
            setup = store.get("setup_intent", str(session["setup_intent"])) or {}
            error = payment.get("last_payment_error") or setup.get("last_setup_error") or {}
            return str(error.get("message") or "")

    def pending_challenge(self, intent_id: str) -> tuple[Object, Object]:
        """Return the intent and session of a challenge. Raises Refused."""
        with self.lock:
            intent, session = checkout.pending_challenge(self.account, intent_id)
            return dict(intent), dict(session)

    def answer_challenge(self, intent_id: str, *, is_agreed: bool) -> checkout.Step:
        """Handle the payer's answer to a challenge. Raises Refused."""
        with self.lock:
            step = checkout.answer_challenge(self.account, intent_id, is_agreed=is_agreed)
            self._commit()
            return step

    def events(self) -> list[Object]:
        """Return all events, newest first."""
        with self.lock:
            return list(self.account.store.all("event", newest_first=True))

    def balance(self, currency: str) -> int:
        """Return the balance in minor units."""
        with self.lock:
            return self.account.balance().get(currency.lower(), 0)

    def _commit(self) -> None:
        self.account.store.commit()
        self.on_event()

    def _replay(self, key: str, fingerprint: str) -> Response | None:
        record = self.account.store.get("key", key)
        if record is None or record["created"] < self.account.clock() - KEY_SECONDS:
            return None
        if record["mark"] != fingerprint:
            raise Refused(
                "Keys for idempotent requests can only be used with the same parameters they were first used with. "
                f"Try using a key other than '{key}' if you meant to execute a different request.",
                kind="idempotency_error",
            )
        return Response(record["status"], record["body"], is_replay=True)

    def _remember(self, key: str, fingerprint: str, response: Response) -> None:
        record = {
            "mark": fingerprint,
            "status": response.status,
            "body": dict(response.body),
            "created": self.account.clock(),
        }
        self.account.store.put("key", key, record)

    def _route(self, method: str, parts: list[str], form: Object) -> Object:
        if method == "GET":
            return self._read(parts, form)
        match method, parts:
            case "DELETE", ["customers", customer]:
                return intents.delete_customer(self.account, self.account.customer(customer))
            case "POST", [("checkout" | "customers" | "payment_methods"), *_rest]:
                return self._write_customer(parts, form)
            case "POST", _:
                return self._write_payment(parts, form)
        raise _unknown(method, parts)

    def _read(self, parts: list[str], form: Object) -> Object:  # noqa: PLR0911  # a table of routes
        account = self.account
        match parts:
            case ["checkout", "sessions", session_id]:
                return checkout.current_session(account, session_id)
            case ["checkout", "sessions"]:
                filters = {name: form[name] for name in ("payment_intent", "customer") if name in form}
                return account.page("checkout.session", "/v1/checkout/sessions", form, **filters)
            case ["customers", customer, "payment_methods"]:
                account.customer(customer)
                return account.page(
                    "payment_method", f"/v1/customers/{customer}/payment_methods", form, customer=customer
                )
            case ["payment_methods"]:
                return account.page("payment_method", "/v1/payment_methods", form, customer=required(form, "customer"))
            case ["balance"]:
                amounts = [{"amount": amount, "currency": currency} for currency, amount in account.balance().items()]
                return {"object": "balance", "livemode": False, "available": amounts, "pending": []}
            case [plural] if plural in KINDS:
                wanted = {name: form[name] for name in FILTERS if name in form}
                return account.page(KINDS[plural], f"/v1/{plural}", form, **wanted)
            case [plural, object_id] if plural in KINDS:
                return account.get(KINDS[plural], object_id)
        raise _unknown("GET", parts)

    def _write_customer(self, parts: list[str], form: Object) -> Object:  # noqa: PLR0911  # a table of routes
        account = self.account
        match parts:
            case ["checkout", "sessions"]:
                return checkout.make_session(account, form)
            case ["checkout", "sessions", session_id, "expire"]:
                return checkout.expire(account, checkout.current_session(account, session_id))
            case ["customers"]:
                fields = {name: form.get(name) for name in ("name", "email", "description")}
                created = account.make("customer", "cus", metadata=dict(form.get("metadata") or {}), **fields)
                account.emit("customer.created", created)
                return created
            case ["customers", customer]:
                fields = {name: form[name] for name in ("name", "email", "description", "metadata") if name in form}
                return account.change(account.customer(customer), **fields)
            case ["payment_methods"]:
                return intents.make_method(account, form)
            case ["payment_methods", method, "attach"]:
                return intents.attach(account, intents.named_method(account, method), required(form, "customer"))
            case ["payment_methods", method, "detach"]:
                return intents.detach(account, account.get("payment_method", method))
        raise _unknown("POST", parts)

    def _write_payment(self, parts: list[str], form: Object) -> Object:
        account = self.account
        match parts:
            case ["payment_intents"]:
                return intents.make_intent(account, form)
            case ["payment_intents", intent, ("confirm" | "capture" | "cancel") as action]:
                stored = account.get("payment_intent", intent)
                if action == "cancel":
                    return intents.cancel(account, stored)
                return (intents.confirm if action == "confirm" else intents.capture)(account, stored, form)
            case ["refunds"]:
                return intents.make_refund(account, form)
            case ["disputes", dispute]:
                return intents.answer_dispute(account, account.get("dispute", dispute), form)
            case ["disputes", dispute, "close"]:
                return intents.end_dispute(account, account.get("dispute", dispute), "lost")
        raise _unknown("POST", parts)


FILTERS = ("type", "payment_intent", "charge", "source", "customer")
"""Query parameters by which lists can be filtered."""
KINDS = {
    "balance_transactions": "balance_transaction",
    "charges": "charge",
    "customers": "customer",
    "disputes": "dispute",
    "events": "event",
    "payment_intents": "payment_intent",
    "payment_methods": "payment_method",
    "refunds": "refund",
    "setup_intents": "setup_intent",
}
"""The kind of object by the plural in its URL."""


def decode(encoded: str) -> Object:
    """Decode Stripe's form encoding: `a[b][0][c]=v` is {"a": {"b": [{"c": "v"}]}}."""
    root: Object = {}
    for name, value in parse_qsl(encoded, keep_blank_values=True):
        *parents, last = name.replace("]", "").split("[")
        target = root
        for parent in parents:
            target = target.setdefault(parent, {})
            if not isinstance(target, dict):
                raise Refused(f"Invalid parameter: {name}.")
        target[last] = value
    return {name: _with_lists(value) for name, value in root.items()}


def _with_lists(value: Any) -> Any:
    """Convert objects with the keys 0, 1, 2 … to lists."""
    if not isinstance(value, dict):
        return value
    items = {name: _with_lists(item) for name, item in value.items()}
    return list(items.values()) if items and all(name.isdecimal() for name in items) else items


def _parts(path: str) -> list[str]:
    """Return the parts of a path below /v1."""
    return [part for part in path.split("/") if part][1:]


def _unknown(method: str, parts: list[str]) -> Refused:
    message = f"Unrecognized request URL ({method}: /v1/{'/'.join(parts)})."
    return Refused(message, status=HTTPStatus.NOT_FOUND)
