"""The Stripe account that the sandbox imitates: its objects, events and balance.

The functions below the class read the parameters of a request.
"""

from __future__ import annotations

import copy
import secrets
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from billing.sandbox.store import Store, StripeObject

Form = dict[str, Any]
"""The decoded parameters of a request: strings, lists and nested dictionaries."""
API_VERSION = "2026-10-28.endive"
"""The version of Stripe's API that events name. It must equal `billing.gateway.API_VERSION`."""


class Refused(Exception):
    """A request that Stripe would refuse. `answer` is the body of the response.

    `kind` is the error's type (default: `invalid_request_error`), `code` its code, `status` the HTTP status. `more` are
    further fields of the error.
    """

    def __init__(
        self, message: str, *, code: str = "", status: int = HTTPStatus.BAD_REQUEST, kind: str = "", **more: Any
    ) -> None:
        super().__init__(message)
        self.status = int(status)
        error = {"type": kind or "invalid_request_error", "message": message} | ({"code": code} if code else {}) | more
        self.answer = {"error": error}


class StripeAccount:
    """The objects of one Stripe account. `clock` returns Unix time; `base_url` is the address of the payment pages.

    Not thread-safe: `Provider` holds a lock.
    """

    def __init__(self, store: Store, *, base_url: str, clock: Callable[[], float] = time.time) -> None:
        self.store = store
        self.base_url = base_url
        self.clock = clock

    @property
    def now(self) -> int:
        """Return Unix time in whole seconds, the unit of Stripe's timestamps."""
        return int(self.clock())

    def make(self, kind: str, prefix: str, **fields: Any) -> StripeObject:
        """Create and store an object. `prefix` begins its id, for example `ch` for a charge."""
        created: StripeObject = {
            "id": f"{prefix}_{secrets.token_hex(12)}",
            "object": kind,
            "created": self.now,
            "livemode": False,
        } | fields
        return self.store.put(kind, created["id"], created)

    def get(self, kind: str, object_id: Any) -> StripeObject:
        """Return an object. Raises Refused (404) if it does not exist."""
        stored = self.store.get(kind, str(object_id))
        if stored is None:
            message = f"No such {kind}: '{object_id}'"
            raise Refused(message, code="resource_missing", status=HTTPStatus.NOT_FOUND)
        return stored

    def customer(self, customer_id: Any) -> StripeObject:
        """Return a customer that was not deleted. Raises Refused (404) with Stripe's message."""
        stored = self.store.get("customer", str(customer_id))
        if stored is None or stored.get("_deleted"):
            message = f"No such customer: '{customer_id}'"
            raise Refused(message, code="resource_missing", status=HTTPStatus.NOT_FOUND, param="customer")
        return stored

    def change(self, stored: StripeObject, **fields: Any) -> StripeObject:
        """Change fields of an object, store it and return it."""
        stored.update(fields)
        return self.store.put(stored["object"], stored["id"], stored)

    def emit(self, event_type: str, changed: StripeObject) -> None:
        """Create an event about a changed object, and schedule the event's webhook to be delivered at once."""
        event = self.make(
            "event",
            "evt",
            api_version=API_VERSION,
            type=event_type,
            pending_webhooks=1,
            data={"object": copy.deepcopy(public_fields(changed))},
        )
        self.store.put("delivery", event["id"], {"id": event["id"], "tries": 0, "next_at": 0.0})

    def add_balance_transaction(self, kind: str, source_id: str, amount: int, currency: str) -> StripeObject:
        """Add a balance transaction about the object `source_id`. A positive amount is money that the account receives.

        The sandbox charges no fees.
        """
        return self.make(
            "balance_transaction",
            "txn",
            type=kind,
            source=source_id,
            amount=amount,
            net=amount,
            fee=0,
            currency=currency,
        )

    def balance(self) -> dict[str, int]:
        """Return the balance in minor units by currency. Currencies are lower case, as Stripe writes them."""
        amounts: dict[str, int] = {}
        for transaction in self.store.all("balance_transaction"):
            amounts[transaction["currency"]] = amounts.get(transaction["currency"], 0) + transaction["amount"]
        return amounts

    def page(self, kind: str, url: str, form: Form, **filters: Any) -> StripeObject:
        """Return a page of the objects whose fields equal `filters`, newest first, as Stripe's list object.

        `url` is the path of the list. `form` may have Stripe's parameters `limit`, `starting_after` and `created[gte]`.
        """
        created = form.get("created")
        since = integer(created, "gte", default=0) if isinstance(created, dict) else 0
        matching = [
            stored
            for stored in self.store.all(kind, newest_first=True)
            if stored["created"] >= since
            and not stored.get("_deleted")
            and all(stored.get(name) == value for name, value in filters.items())
        ]
        if after := form.get("starting_after"):
            ids = [stored["id"] for stored in matching]
            matching = matching[ids.index(after) + 1 :] if after in ids else []
        limit = min(integer(form, "limit", default=10), 100)  # Stripe's default and its largest page
        return {
            "object": "list",
            "url": url,
            "has_more": len(matching) > limit,
            "data": [public_fields(stored) for stored in matching[:limit]],
        }


def public_fields(stored: StripeObject) -> StripeObject:
    """Return an object as Stripe's API shows it: without our own fields. A deleted object has only its id and kind."""
    if stored.get("_deleted"):
        return {"id": stored["id"], "object": stored["object"], "deleted": True}
    return {name: value for name, value in stored.items() if not name.startswith("_")}


def required(form: Form, name: str) -> str:
    """Return a parameter that must be a string. Raises Refused if it is missing or empty."""
    value = form.get(name)
    if not isinstance(value, str) or not value:
        raise Refused(f"Missing required param: {name}.", code="parameter_missing", param=name)
    return value


def integer(form: Form, name: str, *, default: int | None = None) -> int:
    """Return an integer parameter, or `default` if it is missing. Raises Refused."""
    value = form.get(name)
    if value is None and default is not None:
        return default
    try:
        return int(str(value))
    except ValueError:
        raise Refused(f"Invalid integer: {value}", code="parameter_invalid_integer", param=name) from None


STEPS = {"isk": 100, "ugx": 100, "bhd": 10, "jod": 10, "kwd": 10, "omr": 10, "tnd": 10}
"""Minor units that an amount must be a multiple of; 1 for all other currencies. Not taken from `billing.currencies`:
the sandbox must notice a mistake there, as Stripe would."""
LARGEST_AMOUNT = 99_999_999
"""Stripe's largest amount in minor units: eight digits in every currency."""


def money_of(form: Form, name: str, currency: str, maximum: int = LARGEST_AMOUNT) -> int:
    """Return an amount in minor units from 1 to `maximum` that is a multiple of the currency's step. Raises Refused.

    `name` is the parameter of `form` that has the amount; `currency` is in lower case.
    """
    amount, step = amount_of(form, name, maximum), STEPS.get(currency, 1)
    if amount % step:
        message = f"Invalid amount: the amount in {currency} must be a multiple of {step}."
        raise Refused(message, code="parameter_invalid_integer", param=name)
    return amount


def amount_of(form: Form, name: str, maximum: int = LARGEST_AMOUNT) -> int:
    """Return an integer parameter, such as an amount or a quantity, from 1 to `maximum`. Raises Refused."""
    amount = integer(form, name)
    if amount < 1:
        raise Refused("This value must be greater than or equal to 1.", code="parameter_invalid_integer", param=name)
    if amount > maximum:
        raise Refused(f"Amount must be no more than {maximum}.", code="amount_too_large", param=name)
    return amount


def boolean(form: Form, name: str) -> bool:
    """Return a boolean parameter, False if it is missing. Stripe's form encoding writes booleans as words."""
    return form.get(name) == "true"
