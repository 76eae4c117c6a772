"""What every part of the sandbox works on: objects with ids, the events about them, and the money that moved.

The one rule: a change that Stripe tells of has an event here, with the object as it was at that moment.
"""

from __future__ import annotations

import copy
import secrets
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from billing.sandbox.store import Object, Store

API_VERSION = "2026-10-28.endive"


class Refused(Exception):
    """A request that Stripe would refuse; `answer` is the error's body."""

    def __init__(
        self, message: str, *, code: str = "", status: int = HTTPStatus.BAD_REQUEST, kind: str = "", **more: Any
    ) -> None:
        super().__init__(message)
        self.status = int(status)
        error = {"type": kind or "invalid_request_error", "message": message} | ({"code": code} if code else {}) | more
        self.answer = {"error": error}


class Book:
    """The provider's objects. `clock` gives Unix time; `base_url` is where its pages are."""

    def __init__(self, store: Store, *, base_url: str, clock: Callable[[], float] = time.time) -> None:
        self.store = store
        self.base_url = base_url
        self.clock = clock

    @property
    def now(self) -> int:
        """Unix time in whole seconds, as Stripe gives it."""
        return int(self.clock())

    def make(self, kind: str, prefix: str, **fields: Any) -> Object:
        """A new object, kept."""
        thing: Object = {
            "id": f"{prefix}_{secrets.token_hex(12)}",
            "object": kind,
            "created": self.now,
            "livemode": False,
        } | fields
        return self.store.put(kind, thing["id"], thing)

    def get(self, kind: str, object_id: Any) -> Object:
        """An object. Raises Refused (404) where there is none."""
        found = self.store.get(kind, str(object_id))
        if found is None:
            sentence = f"No such {kind}: '{object_id}'"
            raise Refused(sentence, code="resource_missing", status=HTTPStatus.NOT_FOUND)
        return found

    def customer(self, customer_id: Any) -> Object:
        """A customer who was not deleted. Raises Refused (404), in Stripe's words."""
        found = self.store.get("customer", str(customer_id))
        if found is None or found.get("_deleted"):
            sentence = f"No such customer: '{customer_id}'"
            raise Refused(sentence, code="resource_missing", status=HTTPStatus.NOT_FOUND, param="customer")
        return found

    def change(self, thing: Object, **fields: Any) -> Object:
        """Change an object and keep it."""
        thing.update(fields)
        return self.store.put(thing["object"], thing["id"], thing)

    def emit(self, kind: str, thing: Object) -> None:
        """Tell of a change; the event waits for its delivery."""
        event = self.make(
            "event",
            "evt",
            api_version=API_VERSION,
            type=kind,
            pending_webhooks=1,
            data={"object": copy.deepcopy(shown(thing))},
        )
        self.store.put("delivery", event["id"], {"id": event["id"], "tries": 0, "next_at": 0.0})

    def move(self, kind: str, source: str, amount: int, currency: str) -> Object:
        """Money that came to the account (positive) or left it. The sandbox takes no fee."""
        return self.make(
            "balance_transaction", "txn", type=kind, source=source, amount=amount, net=amount, fee=0, currency=currency
        )

    def balance(self) -> dict[str, int]:
        """What the account holds, by currency (in Stripe's small letters)."""
        held: dict[str, int] = {}
        for moved in self.store.all("balance_transaction"):
            held[moved["currency"]] = held.get(moved["currency"], 0) + moved["amount"]
        return held

    def listed(self, kind: str, url: str, form: Object, **equal: Any) -> Object:
        """A page of a list, newest first, by Stripe's parameters `limit`, `starting_after` and `created[gte]`."""
        created = form.get("created")
        since = integer(created, "gte", default=0) if isinstance(created, dict) else 0
        things = [
            thing
            for thing in self.store.all(kind, newest_first=True)
            if thing["created"] >= since
            and not thing.get("_deleted")
            and all(thing.get(name) == value for name, value in equal.items())
        ]
        if after := form.get("starting_after"):
            ids = [thing["id"] for thing in things]
            things = things[ids.index(after) + 1 :] if after in ids else []
        limit = min(integer(form, "limit", default=10), 100)
        return {
            "object": "list",
            "url": url,
            "has_more": len(things) > limit,
            "data": [shown(thing) for thing in things[:limit]],
        }


def shown(thing: Object) -> Object:
    """An object without what is the sandbox's own (names that begin with an underscore); a deleted one as its id."""
    if thing.get("_deleted"):
        return {"id": thing["id"], "object": thing["object"], "deleted": True}
    return {name: value for name, value in thing.items() if not name.startswith("_")}


def required(form: Object, name: str) -> str:
    """A parameter that must be there. Raises Refused."""
    value = form.get(name)
    if not isinstance(value, str) or not value:
        raise Refused(f"Missing required param: {name}.", code="parameter_missing", param=name)
    return value


def integer(form: Object, name: str, *, default: int | None = None) -> int:
    """A parameter that is a whole number. Raises Refused."""
    value = form.get(name)
    if value is None and default is not None:
        return default
    try:
        return int(str(value))
    except ValueError:
        raise Refused(f"Invalid integer: {value}", code="parameter_invalid_integer", param=name) from None


STEPS = {"isk": 100, "ugx": 100, "bhd": 10, "jod": 10, "kwd": 10, "omr": 10, "tnd": 10}
"""Currencies whose amounts are multiples of something: Stripe's "special cases" and three-decimal currencies."""


def money_of(form: Object, name: str, currency: str, most: int = 99_999_999) -> int:
    """An amount of a currency, from 1 to `most`, as fine as it may be. Raises Refused."""
    amount, step = amount_of(form, name, most), STEPS.get(currency, 1)
    if amount % step:
        sentence = f"Invalid amount: the amount in {currency} must be a multiple of {step}."
        raise Refused(sentence, code="parameter_invalid_integer", param=name)
    return amount


def amount_of(form: Object, name: str, most: int = 99_999_999) -> int:
    """A whole number from 1 to `most`. Raises Refused."""
    amount = integer(form, name)
    if amount < 1:
        raise Refused("This value must be greater than or equal to 1.", code="parameter_invalid_integer", param=name)
    if amount > most:
        raise Refused(f"Amount must be no more than {most}.", code="amount_too_large", param=name)
    return amount


def true(form: Object, name: str) -> bool:
    """A parameter that is a truth value."""
    return form.get(name) == "true"
