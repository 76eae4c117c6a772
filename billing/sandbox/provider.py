"""The sandbox's API without HTTP: routes, form decoding and idempotency.

Requests run one at a time. Their changes are written to the journal before the response. A repeated idempotency key
replays the first response.
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
from billing.sandbox.account import Form, Refused, StripeAccount, public_fields, required
from billing.sandbox.store import Store, StripeObject

IDEMPOTENCY_KEY_SECONDS = 24 * 3600
"""How long an idempotency key is kept: 24 hours, as at Stripe."""


@dataclass(frozen=True)
class Response:
    """A response of the API: status and JSON body. `is_replay` means that the idempotency key was used before."""

    status: int
    body: StripeObject
    is_replay: bool = False


class Provider:
    """The payment provider. Thread-safe.

    It calls `after_request` after each request. `billing.sandbox.delivery` replaces this function, so that a request
    wakes the delivery of its events.
    """

    def __init__(self, store: Store, *, base_url: str, clock: Callable[[], float] = time.time) -> None:
        self.account = StripeAccount(store, base_url=base_url, clock=clock)
        self.lock = threading.RLock()
        self.after_request: Callable[[], None] = lambda: None

    def handle(self, method: str, path: str, encoded: str = "", idempotency_key: str = "") -> Response:
        """Handle an API request. `encoded` is the query of the URL, or the form in the body of a POST request."""
        with self.lock:
            fingerprint = hashlib.sha256(f"{method} {path} {encoded}".encode()).hexdigest()
            try:
                if idempotency_key and method == "POST" and (replay := self._replay(idempotency_key, fingerprint)):
                    return replay
                response = Response(HTTPStatus.OK, public_fields(self._route(method, _parts(path), decode(encoded))))
            except Refused as error:
                response = Response(error.status, error.answer)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                # The routes do not check the structure of nested parameters, so malformed requests raise these errors.
                response = Response(HTTPStatus.BAD_REQUEST, Refused(f"Invalid request: {error}").answer)
            # As at Stripe, a decline is replayed, but a request refused as invalid may be corrected and sent again.
            if idempotency_key and method == "POST" and response.status in {HTTPStatus.OK, HTTPStatus.PAYMENT_REQUIRED}:
                self._remember(idempotency_key, fingerprint, response)
            self._commit()
            return response

    def session(self, session_id: str) -> StripeObject:
        """Return a copy of a payment page's session. Raises Refused (404)."""
        with self.lock:
            session = dict(checkout.current_session(self.account, session_id))
            self._commit()  # reading a session can expire it
            return session

    def submit(self, session_id: str, form: Form) -> checkout.FormResult:
        """Handle a payment page's form. Raises Refused if the page does not exist."""
        with self.lock:
            result = checkout.submit(self.account, checkout.current_session(self.account, session_id), form)
            self._commit()
            return result

    def last_refusal(self, session: StripeObject) -> str:
        """Return why the last payment attempt on a page failed, or an empty string."""
        with self.lock:
            store = self.account.store
            # A session has at most one of the two intents. The other is None, and no object has the id "None".
            payment = store.get("payment_intent", str(session["payment_intent"])) or {}
            setup = store.get("setup_intent", str(session["setup_intent"])) or {}
            error = payment.get("last_payment_error") or setup.get("last_setup_error") or {}
            return str(error.get("message") or "")

    def pending_challenge(self, intent_id: str) -> tuple[StripeObject, StripeObject]:
        """Return copies of the intent that the payer must confirm, and of its session. Raises Refused (404)."""
        with self.lock:
            intent, session = checkout.pending_challenge(self.account, intent_id)
            return dict(intent), dict(session)

    def answer_challenge(self, intent_id: str, *, is_agreed: bool) -> checkout.FormResult:
        """Handle the payer's answer to a challenge. Raises Refused (404)."""
        with self.lock:
            result = checkout.answer_challenge(self.account, intent_id, is_agreed=is_agreed)
            self._commit()
            return result

    def events(self) -> list[StripeObject]:
        """Return all events, newest first."""
        with self.lock:
            return list(self.account.store.all("event", newest_first=True))

    def balance(self, currency: str) -> int:
        """Return the account's balance in this currency, in minor units."""
        with self.lock:
            return self.account.balance().get(currency.lower(), 0)

    def _commit(self) -> None:
        """Write the changes of a request to the journal, then wake the delivery."""
        self.account.store.commit()
        self.after_request()

    def _replay(self, key: str, fingerprint: str) -> Response | None:
        """Return the response that an idempotency key got before, or None. Raises Refused if the request differs."""
        record = self.account.store.get("key", key)
        if record is None or record["created"] < self.account.clock() - IDEMPOTENCY_KEY_SECONDS:
            return None
        if record["mark"] != fingerprint:
            raise Refused(
                "Keys for idempotent requests can only be used with the same parameters they were first used with. "
                f"Try using a key other than '{key}' if you meant to execute a different request.",
                kind="idempotency_error",
            )
        return Response(record["status"], record["body"], is_replay=True)

    def _remember(self, key: str, fingerprint: str, response: Response) -> None:
        """Store the response, so that `_replay` can return it for later requests with this idempotency key."""
        record = {
            "mark": fingerprint,  # the name of the fingerprint in existing journals
            "status": response.status,
            "body": dict(response.body),
            "created": self.account.clock(),
        }
        self.account.store.put("key", key, record)

    def _route(self, method: str, parts: list[str], form: Form) -> StripeObject:
        """Serve a request and return the object to answer with. `parts` is the path without `v1`. Raises Refused."""
        match method, parts:
            case "GET", _:
                return self._read(parts, form)
            case "POST", _:
                return self._write(parts, form)
            case "DELETE", ["customers", customer_id]:
                return intents.delete_customer(self.account, self.account.customer(customer_id))
        raise _unknown_url(method, parts)

    def _read(self, parts: list[str], form: Form) -> StripeObject:
        account = self.account
        match parts:
            case ["checkout", "sessions", session_id]:
                return checkout.current_session(account, session_id)
            case ["checkout", "sessions"]:
                filters = {name: form[name] for name in ("payment_intent", "customer", "status") if name in form}
                return account.page("checkout.session", "/v1/checkout/sessions", form, **filters)
            case ["customers", customer_id, "payment_methods"]:
                account.customer(customer_id)  # raises Refused if there is none
                return account.page(
                    "payment_method", f"/v1/customers/{customer_id}/payment_methods", form, customer=customer_id
                )
            case [plural] if plural in KINDS:
                field_filters = {name: form[name] for name in FILTERS if name in form}
                return account.page(KINDS[plural], f"/v1/{plural}", form, **field_filters)
            case [plural, object_id] if plural in KINDS:
                return account.get(KINDS[plural], object_id)
        raise _unknown_url("GET", parts)

    def _write(self, parts: list[str], form: Form) -> StripeObject:  # noqa: PLR0911  # a table of routes
        account = self.account
        match parts:
            case ["checkout", "sessions"]:
                return checkout.make_session(account, form)
            case ["checkout", "sessions", session_id, "expire"]:
                return checkout.expire(account, checkout.current_session(account, session_id))
            case ["customers"]:
                fields = {name: form.get(name) for name in ("name", "email", "description")}
                customer = account.make("customer", "cus", metadata=dict(form.get("metadata") or {}), **fields)
                account.emit("customer.created", customer)
                return customer
            case ["payment_methods", method_id, "attach"]:
                return intents.attach(account, intents.resolve_method(account, method_id), required(form, "customer"))
            case ["payment_methods", method_id, "detach"]:
                return intents.detach(account, account.get("payment_method", method_id))
            case ["payment_intents"]:
                return intents.make_intent(account, form)
            case ["refunds"]:
                return intents.make_refund(account, form)
            case ["disputes", dispute_id]:
                return intents.answer_dispute(account, account.get("dispute", dispute_id), form)
        raise _unknown_url("POST", parts)


FILTERS = ("type", "payment_intent", "charge", "source", "customer")
"""Query parameters that filter a list: each is also a field of the listed objects."""
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
"""The kind of object by the plural that names it in URLs."""


def decode(encoded: str) -> Form:
    """Decode Stripe's form encoding: `a[b][0][c]=v` is {"a": {"b": [{"c": "v"}]}}."""
    root: Form = {}
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
    """Convert dictionaries whose keys are the indexes 0, 1, 2 … to lists in the order of the indexes."""
    if not isinstance(value, dict):
        return value
    items = {name: _with_lists(item) for name, item in value.items()}
    if items and all(name.isdecimal() for name in items):
        return [items[index] for index in sorted(items, key=int)]
    return items


def _parts(path: str) -> list[str]:
    """Split a path such as `/v1/refunds/re_1` and return the parts after `v1`."""
    return [part for part in path.split("/") if part][1:]


def _unknown_url(method: str, parts: list[str]) -> Refused:
    message = f"Unrecognized request URL ({method}: /v1/{'/'.join(parts)})."
    return Refused(message, status=HTTPStatus.NOT_FOUND)
