"""Customers who buy, pay, get refunds and dispute payments, while processes crash and messages are lost.

Each process of `bench.simulation` has a group of customers and their own payment provider: the sandbox, which the
gateway calls with its real client. SQL checks the ledger and compares it with the provider's balance. Every random
choice comes from the group's seed.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
import uuid
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import stripe
from django.db import connection
from django.db.models import QuerySet

from bench.ledger_queries import BROKEN_ACCOUNTS, CLEARING_BALANCE
from bench.simulated_administrator import Customer, InvariantBroken, SimulatedAdministrator
from billing import (
    auto_topup,
    charges,
    customers,
    events,
    gateway,
    ledger,
    payments,
    pricebooks,
    pricing,
    quotes,
    refunds,
)
from billing.errors import BadSignature, BillingError, InsufficientFunds, PaymentUnavailable
from billing.models import AutoTopUp, PaymentCustomer, StripeEvent, TopUp
from billing.sandbox import intents
from console.accounts.models import Organization, User
from tests.crashes import crash_at
from tests.provider import (
    ASKS_FOR_CONFIRMATION,
    DECLINED,
    DISPUTED,
    FAILS_LATER,
    GOOD,
    REFUND_FAILS,
    Stripe,
    fail_network,
)

CUSTOMERS = 12
"""How many customers a group has at a time. Another replaces one that leaves."""
PURCHASES_PER_CUSTOMER = 150
"""A customer is replaced after this number of purchases, so that the check of one account stays cheap."""
MAX_TOP_UPS_MINOR = (20_000, 4000, 1000)
"""Values of `Customer.max_top_up_minor`, chosen at random."""
CRASH_PROBABILITY = 0.125
"""Probability that `_maybe_crash` makes the call and tries to crash it."""
MAX_CRASH_STATEMENT = 30
"""The number of the last statement at which a call may crash. Most calls have fewer statements."""
ALL_EVENTS = 10**9
"""More events than a provider can have."""


class SimulatedCustomers(SimulatedAdministrator):
    """A group of customers and their payment provider. The actions below return whether they did anything."""

    def __init__(self, seed: int, *, changes_prices: bool) -> None:
        self.seed = seed
        self.chance = random.Random(seed)  # noqa: S311 - a simulation must be repeatable
        self.clock_offset = 0.0  # seconds by which the provider's clock is ahead of ours
        self.stripe = Stripe(clock=lambda: time.time() + self.clock_offset)
        gateway._client = lambda: self.stripe.client  # noqa: SLF001 - only the client is replaced, not the gateway
        self.administrator = User.objects.create_superuser(f"clerk-{seed}@example.com")
        self.customers: list[Customer] = []
        self.undelivered: list[dict[str, Any]] = []  # the provider's events that may still be delivered
        self.purchases = self.steps = self.crashes = 0  # purchases that have ended, actions taken, calls that crashed
        # How often each action is chosen, relative to the others: mostly purchases and ends of runs.
        self._weights: dict[Callable[[Customer], bool], int] = {
            self.buy: 40, self.end_run: 45, self.top_up: 18, self.deliver_events: 14, self.run_tasks: 8,
            self.refund: 3, self.refund_at_provider: 1, self.open_dispute: 2, self.decide_dispute: 2,
            self.top_up_automatically: 2, self.forge_event: 2, self.change_clock: 1, self.delete_provider_customer: 1,
            self.grant_credit: 1, self.expire_credit: 1, self.issue_invoice: 2, self.issue_credit_note: 2,
            self.write_off: 3,
        }  # fmt: skip
        if changes_prices:
            self._weights[self.change_prices] = 1
        self.action_counts = dict.fromkeys((action.__name__ for action in self._weights), 0)
        """How often each action did anything."""

    def run(self, purchases: int) -> None:
        """Take random actions until `purchases` more purchases have ended. Raises InvariantBroken."""
        last_purchase = self.purchases + purchases
        while self.purchases < last_purchase:
            while len(self.customers) < CUSTOMERS:
                self.customers.append(self._create_customer())
            customer = self.chance.choice(self.customers)
            action = self.chance.choices(list(self._weights), list(self._weights.values()))[0]
            self.action_counts[action.__name__] += action(customer)
            self.steps += 1
            self.undelivered += self.stripe.fresh()  # the events since the last call
            self._check_accounts(customer, action.__name__)
            if customer.purchases >= PURCHASES_PER_CUSTOMER and not customer.holds:
                self.customers.remove(customer)

    def finish(self) -> int:
        """Deliver all events, complete all tasks, and return the provider's balance. Raises InvariantBroken."""
        self._clear_faults()
        self.clock_offset = 0.0
        self.undelivered += self.stripe.fresh()
        for event in self.undelivered:
            self._receive(event)
        self.undelivered = []
        for _ in range(10):  # submitted charges and refunds cause new events; a few rounds apply all
            self._submit_waiting()
            events.fetch_undelivered()
            if not self._apply_waiting(newest=ALL_EVENTS):
                break
        held_minor, booked_minor, problems = self.stripe.held(), self._clearing_balance(), self._unapplied_events()
        if held_minor != booked_minor:
            problems.insert(0, f"the provider holds {held_minor}, our clearing account {booked_minor}")
        if problems:
            raise InvariantBroken("\n".join([f"seed {self.seed}:", *problems]))
        return held_minor

    # Customers

    def buy(self, customer: Customer) -> bool:
        """Buy a run. The order may be sent twice, the first time with a crash."""
        seconds = self.chance.randint(60, 7200)
        try:
            quote = quotes.make_quote(
                organization=customer.organization,
                user=customer.user,
                purchase=pricing.Purchase(
                    product="metered",
                    mode=pricing.Mode.METERED,
                    node_spec="sim",
                    nodes=self.chance.randint(1, 8),
                    epochs=1,
                ),
                payload={},
                estimate=pricing.Estimate(p50_seconds=seconds / 2, p90_seconds=seconds * 0.75, source="reference"),
                headroom=Decimal(2),
                max_deadline_seconds=7 * 24 * 3600,
                max_seconds=seconds,
                ceiling_minor=None,
            )
            hold = lambda: charges.hold(quote=quote, reference=f"order:{quote.pk}", user=customer.user)
            self._maybe_crash(hold)
            customer.holds.append(hold())
        except InsufficientFunds:
            return False
        return True

    def end_run(self, customer: Customer) -> bool:
        """Meter and settle a run. The messages about its end come several times, with different usage."""
        if not customer.holds:
            return False
        hold = customer.holds.pop(self.chance.randrange(len(customer.holds)))
        used_seconds = self.chance.choice([0.0, self.chance.uniform(0, 3600), self.chance.uniform(0, 20_000)])
        usage = pricing.Usage(used_seconds, completed=self.chance.random() < 0.5)
        charges.meter(hold=hold, billable_seconds=used_seconds / 2)
        settle = lambda: charges.settle(hold=hold, usage=usage, title="A run")
        self._maybe_crash(settle)
        receipt = settle()
        repeated = charges.settle(hold=hold, usage=pricing.Usage(used_seconds * 2, completed=True), title="Again")
        if repeated.pk != receipt.pk or receipt.total_minor > hold.amount_minor:
            raise InvariantBroken(f"hold {hold.pk} was settled twice, or over its ceiling (seed {self.seed})")
        customer.purchases += 1
        self.purchases += 1
        return True

    def top_up(self, customer: Customer) -> bool:
        """Open a payment page and pay with a random test card. Some pages expire afterwards."""
        start = lambda: payments.start_top_up(
            account=customer.account,
            amount_minor=self.chance.randint(500, customer.max_top_up_minor),
            user=customer.user,
            save_card=self.chance.random() < 0.3,
        )
        if self._maybe_crash(start):
            return True
        top_up = start()
        cards = [GOOD] * 12 + [DECLINED, DISPUTED, REFUND_FAILS, ASKS_FOR_CONFIRMATION, FAILS_LATER]
        result = self.stripe.pay(top_up.session_id, self.chance.choice(cards))
        if "/challenge/" in result:
            self.stripe.sandbox.answer_challenge(result.rsplit("/", 1)[1], is_agreed=self.chance.random() < 0.7)
        if self.chance.random() < 0.1:
            gateway.expire_checkout(top_up.session_id)
        return True

    def top_up_automatically(self, customer: Customer) -> bool:
        """Switch automatic top-ups on, if a card is saved, and charge the card."""
        cards = [saved.card for saved in customers.saved_cards(customer.organization)]
        if cards:
            setup = auto_topup.switch_on(
                account=customer.account,
                threshold_minor=50_000,
                amount_minor=5_000,
                method_id=self.chance.choice(cards).method_id,
                user=customer.user,
            )
            self._maybe_crash(lambda: self._charge_card(setup))
            self._charge_card(setup)
        return bool(cards)

    def delete_provider_customer(self, customer: Customer) -> bool:
        """Delete the provider's record of the customer, with its cards."""
        row = PaymentCustomer.objects.filter(organization=customer.organization).exclude(customer_id="").first()
        if row is not None:
            self.stripe.sandbox.handle("DELETE", f"/v1/customers/{row.customer_id}")
        return row is not None

    # Refunds and disputes

    def refund(self, customer: Customer) -> bool:
        """Refund a part of a top-up. The connection to the provider may fail."""
        top_ups = list(TopUp.objects.filter(account=customer.account, state=TopUp.States.PAID).order_by("pk")[:20])
        if not top_ups:
            return False
        top_up = self.chance.choice(top_ups)
        amount_minor = self.chance.randint(1, top_up.amount_minor)
        self._call_with_faults(
            lambda: refunds.refund(top_up=top_up, amount_minor=amount_minor, reason="Asked", user=self.administrator)
        )
        return True

    def refund_at_provider(self, _customer: Customer) -> bool:
        """Refund a payment in the provider's dashboard."""
        if charge := self._recent_object("charge"):
            amount = self.chance.randint(1, charge["amount"])
            self.stripe.sandbox.handle("POST", "/v1/refunds", f"charge={charge['id']}&amount={amount}")
        return charge is not None

    def open_dispute(self, _customer: Customer) -> bool:
        """Let a bank take back the rest of a payment."""
        charge = self._recent_object("charge")
        if charge is None or charge["disputed"] or charge["amount_refunded"] >= charge["amount"]:
            return False
        intents.open_dispute(self.stripe.sandbox.account, charge)
        return True

    def decide_dispute(self, _customer: Customer) -> bool:
        """Decide an open dispute, or reopen a dispute that the merchant has won."""
        dispute = self._recent_object("dispute")
        if dispute is None or dispute["status"] == "lost":
            return False
        if dispute["status"] == "won":
            intents.reopen_dispute(self.stripe.sandbox.account, dispute)
        else:
            intents.end_dispute(self.stripe.sandbox.account, dispute, self.chance.choice(["won", "lost"]))
        return True

    # Events and tasks

    def deliver_events(self, _customer: Customer) -> bool:
        """Deliver some events, in any order. Some come twice, some later, some never."""
        self.chance.shuffle(self.undelivered)
        delivered = self.undelivered[: self.chance.randint(0, len(self.undelivered))]
        # The first half is dropped, delivered or not. What was delivered of the second half may come again.
        self.undelivered = self.undelivered[len(self.undelivered) // 2 :]
        for event in delivered:
            self._maybe_crash(lambda event=event: self._receive(event))
            for _ in range(self.chance.choice([1, 1, 2])):
                self._receive(event)
        return bool(delivered)

    def run_tasks(self, _customer: Customer) -> bool:
        """Run the periodic tasks. They may crash, and the provider may not answer."""
        for task in (self._apply_waiting, self._submit_waiting):
            self._call_with_faults(task)
        if self.chance.random() < 0.05:
            self._call_with_faults(events.fetch_undelivered)
        return True

    def forge_event(self, customer: Customer) -> bool:
        """Send an event that contradicts the console's rows, is too old or too new, or has a forged signature."""
        top_ups = TopUp.objects.filter(account=customer.account).exclude(session_id="").order_by("created_at")
        if not top_ups:
            return False
        top_up = self.chance.choice(list(top_ups))
        wrong_fields = self.chance.choice([{"amount_total": 1}, {"currency": "eur"}, {"id": "cs_another"}, {}])
        session = self.stripe.sandbox.session(top_up.session_id) | {"payment_status": "paid"} | wrong_fields
        event = {"id": f"evt_{uuid.uuid4().hex}", "object": "event", "type": "checkout.session.completed"}
        # If no field is wrong, the event claims to be a live one, which the sandbox never sends.
        event |= {"created": 1, "livemode": not wrong_fields, "data": {"object": session}}
        # 900 s are beyond `gateway.SIGNATURE_TOLERANCE_SECONDS`. An empty secret stands for the right one.
        time_offset, secret = self.chance.choice([(0, ""), (900, ""), (-900, ""), (0, "whsec_forged")])
        is_accepted = self._receive(event, time_offset=time_offset, secret=secret)
        row = StripeEvent.objects.filter(event_id=event["id"]).first()
        is_applied = row is not None and row.state != StripeEvent.States.QUARANTINED
        has_valid_signature = not time_offset and not secret
        if is_accepted != has_valid_signature or is_applied:
            raise InvariantBroken(f"a forged event was accepted: {event} (seed {self.seed})")
        return True

    def change_clock(self, _customer: Customer) -> bool:
        """Set the provider's clock right, an hour or a day ahead, or an hour behind."""
        self.clock_offset = self.chance.choice([0.0, 0.0, 3600.0, -3600.0, 86_400.0])
        return True

    def change_prices(self, _customer: Customer) -> bool:
        """Publish a new price book while runs are open."""
        draft = pricebooks.copy(book=pricebooks.current_book(currency="USD"))
        draft.prices.filter(kind="node_hour").update(amount=Decimal(self.chance.randint(2000, 40_000)) / 100)
        pricebooks.publish(book=draft)
        return True

    # Helpers

    def _create_customer(self) -> Customer:
        name = f"sim-{self.seed}-{uuid.uuid4().hex[:12]}"
        organization = Organization.objects.create(name=name, slug=name)
        user = User.objects.create_user(f"{name}@example.com")
        account = ledger.wallet_account(organization_id=organization.pk, currency="USD")
        return Customer(organization, user, account, max_top_up_minor=self.chance.choice(MAX_TOP_UPS_MINOR))

    def _recent_object(self, kind: str) -> dict[str, Any] | None:
        """Return one of the provider's 40 newest objects of a kind, None if there are none."""
        objects = self.stripe.sandbox.account.store.newest(kind, 40)
        return self.chance.choice(objects) if objects else None

    def _maybe_crash(self, call: Callable[[], Any]) -> bool:
        """With CRASH_PROBABILITY, make the call and crash at a random statement; else do nothing.

        A call with fewer statements completes, and counts as not crashed.
        """
        if self.chance.random() > CRASH_PROBABILITY:
            return False
        has_crashed = crash_at(self.chance.randint(1, MAX_CRASH_STATEMENT), call)
        self.crashes += has_crashed
        return has_crashed

    def _call_with_faults(self, call: Callable[[], Any]) -> None:
        """Make the call. The network may fail before or after a request to the provider, or the process may crash."""
        fault = self.chance.random()
        if fault < 0.1:
            self.stripe.wire.before = fail_network
        elif fault < 0.2:
            self.stripe.wire.after = fail_network
        with contextlib.suppress(PaymentUnavailable, BillingError):
            if not self._maybe_crash(call):
                call()
        self._clear_faults()

    def _clear_faults(self) -> None:
        self.stripe.wire.before = self.stripe.wire.after = lambda *_call: None

    def _charge_card(self, setup: AutoTopUp) -> None:
        auto_topup.create_if_due(setup_pk=setup.pk)
        for top_up in TopUp.objects.filter(account=setup.account, origin="automatic", state=TopUp.States.CREATED):
            auto_topup.charge(top_up=top_up)

    def _submit_waiting(self) -> None:
        """Submit this group's waiting charges and refunds. The product's tasks would submit those of all groups."""
        organizations = [customer.organization.pk for customer in self.customers]
        top_ups = TopUp.objects.filter(origin="automatic", state=TopUp.States.CREATED)
        for top_up in top_ups.filter(account__organization__in=organizations):
            auto_topup.charge(top_up=top_up)
        waiting = refunds.Refund.objects.filter(state="created", requested_by=self.administrator)
        for refund in waiting.select_related("top_up"):
            refunds.submit(refund=refund)

    def _apply_waiting(self, newest: int = 400) -> int:
        """Apply this group's waiting events, in any order; return how many. The product's tasks would apply all.

        Only the provider's `newest` events are considered, because looking up all would slow each step.
        """
        waiting = self._stored_events(newest).filter(state__in=events.OPEN_STATES).order_by("pk")
        event_pks = list(waiting.values_list("pk", flat=True))
        self.chance.shuffle(event_pks)
        for event_pk in event_pks:
            events.apply(event_pk=event_pk)
        return len(event_pks)

    def _stored_events(self, newest: int) -> QuerySet[StripeEvent]:
        """Return the console's rows for the provider's newest events."""
        event_ids = [event["id"] for event in self.stripe.sandbox.account.store.newest("event", newest)]
        return StripeEvent.objects.filter(event_id__in=event_ids)

    def _unapplied_events(self) -> list[str]:
        """Describe the provider's events that were not applied. All are genuine, so there should be none."""
        states = [*events.OPEN_STATES, StripeEvent.States.QUARANTINED]
        rows = self._stored_events(ALL_EVENTS).filter(state__in=states)
        return [f"{row.event_id} {row.type} is {row.state}: {row.reason}" for row in rows]

    def _receive(self, event: dict[str, Any], *, time_offset: int = 0, secret: str = "") -> bool:
        """Receive an event as the webhook does: verify, store, apply. Returns False if its signature is refused."""
        body = json.dumps(event)
        signature = stripe.WebhookSignature.generate_signature_header(
            body, secret or gateway.sandbox_secret(), int(time.time()) + time_offset
        )
        try:
            events.store(gateway.verify(body.encode(), signature))
        except BadSignature:
            return False
        events.apply(event_pk=StripeEvent.objects.get(event_id=event["id"]).pk)
        return True

    def _clearing_balance(self) -> int:
        with connection.cursor() as cursor:
            cursor.execute(CLEARING_BALANCE, {"slugs": f"sim-{self.seed}-%"})
            return int(cursor.fetchone()[0])

    def _check_accounts(self, customer: Customer, action: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(BROKEN_ACCOUNTS, {"organization": customer.organization.pk})
            if rows := cursor.fetchall():
                raise InvariantBroken(f"after {action} (seed {self.seed}, step {self.steps}): {rows}")
