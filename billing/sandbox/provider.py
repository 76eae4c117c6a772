"""Stripe's HTTP API at the sandbox, without HTTP: a request in, an answer out.

Hides routes, the form encoding and idempotency. The one rule: one request at a time, whole; what it changed is in the
journal before it is answered, and the same idempotency key replays the first answer.
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
from billing.sandbox.book import Book, Refused, required, shown
from billing.sandbox.store import Object, Store

KEY_SECONDS = 24 * 3600
"""How long an idempotency key is known, as at Stripe."""


@dataclass(frozen=True)
class Answer:
    """An answer of the API."""

    status: int
    body: Object
    replayed: bool = False


class Provider:
    """The whole provider. Thread-safe. `on_event` is called after each request, for whoever delivers its events."""

    def __init__(self, store: Store, *, base_url: str, clock: Callable[[], float] = time.time) -> None:
        self.book = Book(store, base_url=base_url, clock=clock)
        self.lock = threading.RLock()
        self.on_event: Callable[[], None] = lambda: None

    def handle(self, method: str, path: str, encoded: str = "", key: str = "") -> Answer:
        """One request to the API; `encoded` is the query or the form, `key` the idempotency key."""
        with self.lock:
            mark = hashlib.sha256(f"{method} {path} {encoded}".encode()).hexdigest()
            try:
                if key and method == "POST" and (known := self._known(key, mark)):
                    return known
                answer = Answer(HTTPStatus.OK, shown(self._route(method, _parts(path), decode(encoded))))
            except Refused as error:
                answer = Answer(error.status, error.answer)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                answer = Answer(400, Refused(f"Invalid request: {error}").answer)
            if key and method == "POST" and answer.status in {HTTPStatus.OK, HTTPStatus.PAYMENT_REQUIRED}:
                self._remember(key, mark, answer)
            self._done()
            return answer

    def session(self, session_id: str) -> Object:
        """A payment page as it is now. Raises Refused."""
        with self.lock:
            session = dict(checkout.current_session(self.book, session_id))
            self._done()
            return session

    def submit(self, session_id: str, form: Object) -> checkout.Step:
        """What a payer sent from a payment page. Raises Refused where there is no such page."""
        with self.lock:
            step = checkout.submit(self.book, checkout.current_session(self.book, session_id), form)
            self._done()
            return step

    def last_refusal(self, session: Object) -> str:
        """Why the last try to pay a page failed; empty where none did, or a later one did not."""
        with self.lock:
            store = self.book.store
            paying = store.get("payment_intent", str(session["payment_intent"])) or {}
            saving = store.get("setup_intent", str(session["setup_intent"])) or {}
            error = paying.get("last_payment_error") or saving.get("last_setup_error") or {}
            return str(error.get("message") or "")

    def challenged(self, intent_id: str) -> tuple[Object, Object]:
        """What a bank asks about: the intent and its session. Raises Refused."""
        with self.lock:
            intent, session = checkout.challenged(self.book, intent_id)
            return dict(intent), dict(session)

    def answer_challenge(self, intent_id: str, *, agreed: bool) -> checkout.Step:
        """What the payer told the bank. Raises Refused."""
        with self.lock:
            step = checkout.answer_challenge(self.book, intent_id, agreed=agreed)
            self._done()
            return step

    def events(self) -> list[Object]:
        """Every event, newest first."""
        with self.lock:
            return list(self.book.store.all("event", newest_first=True))

    def balance(self, currency: str) -> int:
        """What the account holds, in minor units."""
        with self.lock:
            return self.book.balance().get(currency.lower(), 0)

    def _done(self) -> None:
        self.book.store.commit()
        self.on_event()

    def _known(self, key: str, mark: str) -> Answer | None:
        record = self.book.store.get("key", key)
        if record is None or record["created"] < self.book.clock() - KEY_SECONDS:
            return None
        if record["mark"] != mark:
            raise Refused(
                "Keys for idempotent requests can only be used with the same parameters they were first used with. "
                f"Try using a key other than '{key}' if you meant to execute a different request.",
                kind="idempotency_error",
            )
        return Answer(record["status"], record["body"], replayed=True)

    def _remember(self, key: str, mark: str, answer: Answer) -> None:
        record = {"mark": mark, "status": answer.status, "body": dict(answer.body), "created": self.book.clock()}
        self.book.store.put("key", key, record)

    def _route(self, method: str, parts: list[str], form: Object) -> Object:
        if method == "GET":
            return self._read(parts, form)
        match method, parts:
            case "DELETE", ["customers", customer]:
                return intents.delete_customer(self.book, self.book.customer(customer))
            case "POST", [("checkout" | "customers" | "payment_methods"), *_rest]:
                return self._write_customer(parts, form)
            case "POST", _:
                return self._write_payment(parts, form)
        raise _unknown(method, parts)

    def _read(self, parts: list[str], form: Object) -> Object:  # noqa: PLR0911  # a table of routes
        book = self.book
        match parts:
            case ["checkout", "sessions", session_id]:
                return checkout.current_session(book, session_id)
            case ["checkout", "sessions"]:
                asked = {name: form[name] for name in ("payment_intent", "customer") if name in form}
                return book.listed("checkout.session", "/v1/checkout/sessions", form, **asked)
            case ["customers", customer, "payment_methods"]:
                book.customer(customer)
                return book.listed(
                    "payment_method", f"/v1/customers/{customer}/payment_methods", form, customer=customer
                )
            case ["payment_methods"]:
                return book.listed("payment_method", "/v1/payment_methods", form, customer=required(form, "customer"))
            case ["balance"]:
                held = [{"amount": amount, "currency": currency} for currency, amount in book.balance().items()]
                return {"object": "balance", "livemode": False, "available": held, "pending": []}
            case [plural] if plural in KINDS:
                equal = {name: form[name] for name in FILTERS if name in form}
                return book.listed(KINDS[plural], f"/v1/{plural}", form, **equal)
            case [plural, object_id] if plural in KINDS:
                return book.get(KINDS[plural], object_id)
        raise _unknown("GET", parts)

    def _write_customer(self, parts: list[str], form: Object) -> Object:  # noqa: PLR0911  # a table of routes
        book = self.book
        match parts:
            case ["checkout", "sessions"]:
                return checkout.make_session(book, form)
            case ["checkout", "sessions", session_id, "expire"]:
                return checkout.expire(book, checkout.current_session(book, session_id))
            case ["customers"]:
                fields = {name: form.get(name) for name in ("name", "email", "description")}
                made = book.make("customer", "cus", metadata=dict(form.get("metadata") or {}), **fields)
                book.emit("customer.created", made)
                return made
            case ["customers", customer]:
                fields = {name: form[name] for name in ("name", "email", "description", "metadata") if name in form}
                return book.change(book.customer(customer), **fields)
            case ["payment_methods"]:
                return intents.make_method(book, form)
            case ["payment_methods", method, "attach"]:
                return intents.attach(book, intents.named_method(book, method), required(form, "customer"))
            case ["payment_methods", method, "detach"]:
                return intents.detach(book, book.get("payment_method", method))
        raise _unknown("POST", parts)

    def _write_payment(self, parts: list[str], form: Object) -> Object:
        book = self.book
        match parts:
            case ["payment_intents"]:
                return intents.make_intent(book, form)
            case ["payment_intents", intent, ("confirm" | "capture" | "cancel") as act]:
                found = book.get("payment_intent", intent)
                if act == "cancel":
                    return intents.cancel(book, found)
                return (intents.confirm if act == "confirm" else intents.capture)(book, found, form)
            case ["refunds"]:
                return intents.make_refund(book, form)
            case ["disputes", dispute]:
                return intents.answer_dispute(book, book.get("dispute", dispute), form)
            case ["disputes", dispute, "close"]:
                return intents.end_dispute(book, book.get("dispute", dispute), "lost")
        raise _unknown("POST", parts)


FILTERS = ("type", "payment_intent", "charge", "source", "customer")
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


def decode(encoded: str) -> Object:
    """Stripe's form encoding: `a[b][0][c]=v` is {"a": {"b": [{"c": "v"}]}}."""
    root: Object = {}
    for name, value in parse_qsl(encoded, keep_blank_values=True):
        first, *inner = name.replace("]", "").split("[")
        place = root
        for step, following in zip([first, *inner], inner, strict=False):
            place = place.setdefault(step, {})
            if not isinstance(place, dict):
                raise Refused(f"Invalid parameter: {name} ({following}).")
        place[[first, *inner][-1]] = value
    return {name: _with_lists(value) for name, value in root.items()}


def _with_lists(value: Any) -> Any:
    """Objects whose names are 0, 1, 2 ... as lists."""
    if not isinstance(value, dict):
        return value
    whole = {name: _with_lists(inner) for name, inner in value.items()}
    return list(whole.values()) if whole and all(name.isdecimal() for name in whole) else whole


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part][1:]


def _unknown(method: str, parts: list[str]) -> Refused:
    sentence = f"Unrecognized request URL ({method}: /v1/{'/'.join(parts)})."
    return Refused(sentence, status=HTTPStatus.NOT_FOUND)
