"""One process of `bench.simulation`: customers who buy, pay, are refunded and dispute, and a console that dies.

The one rule: what is checked is read by SQL, and what the provider holds is told by the provider (the sandbox, behind
the gateway's real client). Every random choice comes from the process's seed.
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

from bench.simulated_books import BOOKED, TOUCHED
from bench.simulated_office import BooksBroken, Customer, Office
from billing import (
    automatic,
    charges,
    customers,
    events,
    gateway,
    ledger,
    payments,
    pricebooks,
    pricing,
    quotes,
    reversals,
)
from billing.errors import BadSignature, BillingError, InsufficientFunds, PaymentUnavailable
from billing.models import AutoTopUp, PaymentCustomer, StripeEvent, TopUp
from billing.sandbox import intents
from console.accounts.models import Organization, User
from tests.crashes import crash_at
from tests.provider import ASKS, DECLINED, DISPUTED, FAILS_LATER, GOOD, REFUND_FAILS, Stripe, lost

CUSTOMERS = 12
PURCHASES_EACH = 150
"""A customer leaves after so many, so that looking at one account stays cheap."""
PURSES = (20_000, 4000, 1000)
"""The most that a customer pays in at once."""


class Town(Office):
    """The customers of one process, and their provider."""

    def __init__(self, seed: int, *, changes_prices: bool) -> None:
        self.seed = seed
        self.chance = random.Random(seed)  # noqa: S311  # a simulation is to be repeated
        self.skew = 0.0
        self.side = Stripe(clock=lambda: time.time() + self.skew)
        gateway._client = lambda: self.side.client  # noqa: SLF001  # the one seam: the client, not the gateway
        self.clerk = User.objects.create_superuser(f"clerk-{seed}@example.com")
        self.customers: list[Customer] = []
        self.post: list[dict[str, Any]] = []
        self.purchases = self.steps = self.crashes = self.left = 0
        self.acts: dict[Callable[[Customer], bool], int] = {
            self.buy: 40, self.end_run: 45, self.top_up: 18, self.post_comes: 14, self.work: 8, self.refund: 3,
            self.dispute: 2, self.end_dispute: 2, self.automatic: 2, self.forge: 2, self.grant: 1, self.clocks: 1,
            self.dashboard: 1, self.write_off: 3, self.expire: 1, self.invoice: 2, self.correct: 2,
            self.lose_customer: 1,
        }  # fmt: skip
        if changes_prices:
            self.acts[self.prices] = 1
        self.done = dict.fromkeys((act.__name__ for act in self.acts), 0)
        """How often each act found something to do."""

    def run(self, purchases: int) -> None:
        """Go on until so many more purchases have ended. Raises BooksBroken."""
        wanted = self.purchases + purchases
        while self.purchases < wanted:
            while len(self.customers) < CUSTOMERS:
                self.customers.append(self._newcomer())
            customer = self.chance.choice(self.customers)
            act = self.chance.choices(list(self.acts), list(self.acts.values()))[0]
            self.done[act.__name__] += act(customer)
            self.steps += 1
            self.post += self.side.fresh()
            self._look_at(customer, act.__name__)
            if customer.bought >= PURCHASES_EACH and not customer.holds:
                self.customers.remove(customer)
                self.left += 1

    def settle_down(self) -> int:
        """Everything is told and taken in. Gives what the provider then holds, and our books too."""
        self.side.wire.before = self.side.wire.after = lambda *_call: None
        self.skew = 0.0
        self.post += self.side.fresh()
        for event in self.post:
            self._take(event)
        self.post = []
        for _ in range(10):
            self._tell_mine()
            events.fetch_undelivered()
            if not self._apply_mine(newest=10**9):
                break
        held, booked, left = self.side.held(), self._booked(), self._left_over()
        if held != booked or left:
            told = f"the provider holds {held}, our clearing account says {booked} (seed {self.seed})"
            raise BooksBroken("\n".join([told, *left]))
        return held

    # What customers do

    def buy(self, customer: Customer) -> bool:
        """A quote and its hold; asked for twice, or cut off and asked for again."""
        seconds = self.chance.randint(60, 7200)
        try:
            quote = quotes.make_quote(
                organization=customer.organization,
                user=customer.user,
                purchase=pricing.Purchase("metered", pricing.Mode.METERED, "sim", self.chance.randint(1, 8), 1),
                payload={},
                estimate=pricing.Estimate(seconds / 2, seconds * 0.75, "reference"),
                headroom=Decimal(2),
                most_seconds=7 * 24 * 3600,
                max_seconds=seconds,
                ceiling_minor=None,
            )
            hold = lambda: charges.hold(quote=quote, reference=f"order:{quote.pk}", user=customer.user)
            self._perhaps_dying(hold)
            made = hold()
        except InsufficientFunds:
            return False
        customer.holds.append(made)
        return True

    def end_run(self, customer: Customer) -> bool:
        """A run is metered and ends; every message about it comes several times, perhaps from the dead."""
        if not customer.holds:
            return False
        hold = customer.holds.pop(self.chance.randrange(len(customer.holds)))
        used = self.chance.choice([0.0, self.chance.uniform(0, 3600), self.chance.uniform(0, 20_000)])
        usage = pricing.Usage(used, completed=self.chance.random() < 0.5)
        charges.meter(hold=hold, billable_seconds=used / 2)
        settle = lambda: charges.settle(hold=hold, usage=usage, title="A run")
        self._perhaps_dying(settle)
        first = settle()
        again = charges.settle(hold=hold, usage=pricing.Usage(used * 2, completed=True), title="Once more")
        if again.pk != first.pk or first.total_minor > hold.amount_minor:
            raise BooksBroken(f"hold {hold.pk} was settled twice, or over its ceiling (seed {self.seed})")
        customer.bought += 1
        self.purchases += 1
        return True

    def top_up(self, customer: Customer) -> bool:
        """A payment page; most are paid, one way or another."""
        begin = lambda: payments.start_top_up(
            account=customer.account,
            amount_minor=self.chance.randint(500, customer.purse),
            user=customer.user,
            save_card=self.chance.random() < 0.3,
        )
        if self._perhaps_dying(begin):
            return True
        top_up = begin()
        cards = [GOOD] * 12 + [DECLINED, DISPUTED, REFUND_FAILS, ASKS, FAILS_LATER]
        where = self.side.pay(top_up.session_id, self.chance.choice(cards))
        if "/challenge/" in where:
            self.side.provider.answer_challenge(where.rsplit("/", 1)[1], agreed=self.chance.random() < 0.7)
        if self.chance.random() < 0.1:
            gateway.expire_checkout(top_up.session_id)
        return True

    def automatic(self, customer: Customer) -> bool:
        """Switch automatic top-ups on, where a card is saved, and let them be due."""
        saved = [each.card for each in customers.saved_cards(customer.organization)]
        if saved:
            setup = automatic.switch_on(
                account=customer.account, threshold_minor=50_000, amount_minor=5_000,
                method_id=self.chance.choice(saved).method_id, user=customer.user,
            )  # fmt: skip
            self._perhaps_dying(lambda: self._charge(setup))
            self._charge(setup)
        return bool(saved)

    def lose_customer(self, customer: Customer) -> bool:
        """Somebody deletes the customer at the provider's own pages, cards and all."""
        row = PaymentCustomer.objects.filter(organization=customer.organization).exclude(customer_id="").first()
        if row is not None:
            self.side.provider.handle("DELETE", f"/v1/customers/{row.customer_id}")
        return row is not None

    # What comes back

    def refund(self, customer: Customer) -> bool:
        """By an administrator; the connection may be lost on the way."""
        paid = list(TopUp.objects.filter(account=customer.account, state=TopUp.States.PAID).order_by("pk")[:20])
        if not paid:
            return False
        top_up = self.chance.choice(paid)
        amount = self.chance.randint(1, top_up.amount_minor)
        self._with_faults(lambda: reversals.refund(top_up=top_up, amount_minor=amount, reason="Asked", user=self.clerk))
        return True

    def dashboard(self, _customer: Customer) -> bool:
        """A refund that is made at the provider's own pages."""
        if charge := self._some("charge"):
            amount = self.chance.randint(1, charge["amount"])
            self.side.provider.handle("POST", "/v1/refunds", f"charge={charge['id']}&amount={amount}")
        return charge is not None

    def dispute(self, _customer: Customer) -> bool:
        """A bank takes back what is left of a payment."""
        charge = self._some("charge")
        if charge is None or charge["disputed"] or charge["amount_refunded"] >= charge["amount"]:
            return False
        intents.open_dispute(self.side.provider.book, charge)
        return True

    def end_dispute(self, _customer: Customer) -> bool:
        """A bank decides, or does not agree with what was decided for us and takes the money once more."""
        found = self._some("dispute")
        if found is None or found["status"] == "lost":
            return False
        if found["status"] == "won":
            intents.reopen_dispute(self.side.provider.book, found)
        else:
            intents.end_dispute(self.side.provider.book, found, self.chance.choice(["won", "lost"]))
        return True

    # What the provider tells, and the workers do

    def post_comes(self, _customer: Customer) -> bool:
        """Events in any order, some twice, some later, some never."""
        self.chance.shuffle(self.post)
        came, self.post = self.post[: self.chance.randint(0, len(self.post))], self.post[len(self.post) // 2 :]
        for event in came:
            self._perhaps_dying(lambda event=event: self._take(event))
            for _ in range(self.chance.choice([1, 1, 2])):
                self._take(event)
        return bool(came)

    def work(self, _customer: Customer) -> bool:
        """The sweeps, which may die or find nobody."""
        for act in (self._apply_mine, self._tell_mine):
            self._with_faults(act)
        if self.chance.random() < 0.05:
            self._with_faults(events.fetch_undelivered)
        return True

    def forge(self, customer: Customer) -> bool:
        """An event that does not match is not acted on, one of another time or hand not even stored."""
        top_up = TopUp.objects.filter(account=customer.account).exclude(session_id="").order_by("?").first()
        if top_up is None:
            return False
        wrong = self.chance.choice([{"amount_total": 1}, {"currency": "eur"}, {"id": "cs_another"}, {}])
        session = self.side.provider.session(top_up.session_id) | {"payment_status": "paid"} | wrong
        event = {
            "id": f"evt_{uuid.uuid4().hex}", "object": "event", "type": "checkout.session.completed", "created": 1,
            "livemode": not wrong, "data": {"object": session},
        }  # fmt: skip
        off, secret = self.chance.choice([(0, ""), (900, ""), (-900, ""), (0, "whsec_forged")])
        taken = self._take(event, off=off, secret=secret)
        row = StripeEvent.objects.filter(event_id=event["id"]).first()
        if taken == bool(off or secret) or (row is not None and row.state != StripeEvent.States.QUARANTINED):
            raise BooksBroken(f"a forged event was taken: {event} (seed {self.seed})")
        return True

    def clocks(self, _customer: Customer) -> bool:
        """The provider's clock goes its own way."""
        self.skew = self.chance.choice([0.0, 0.0, 3600.0, -3600.0, 86_400.0])
        return True

    def prices(self, _customer: Customer) -> bool:
        """A new book, while runs are bought and go on."""
        draft = pricebooks.copy(book=pricebooks.current_book(currency="USD"))
        draft.prices.filter(kind="node_hour").update(amount=Decimal(self.chance.randint(2000, 40_000)) / 100)
        pricebooks.publish(book=draft)
        return True

    # Inside

    def _newcomer(self) -> Customer:
        name = f"sim-{self.seed}-{uuid.uuid4().hex[:12]}"
        organization = Organization.objects.create(name=name, slug=name)
        user = User.objects.create_user(f"{name}@example.com")
        account = ledger.wallet_account(organization_id=organization.pk, currency="USD")
        return Customer(organization, user, account, purse=self.chance.choice(PURSES))

    def _some(self, kind: str) -> dict[str, Any] | None:
        """One of the newest objects of the provider's, those with an event of ours."""
        things = self.side.provider.book.store.newest(kind, 40)
        return self.chance.choice(things) if things else None

    def _perhaps_dying(self, call: Callable[[], Any]) -> bool:
        """One time in eight the process dies at a random statement of the call; else nothing is called here."""
        if self.chance.random() > 0.125:
            return False
        died = crash_at(self.chance.randint(1, 30), call)
        self.crashes += died
        return died

    def _with_faults(self, call: Callable[[], Any]) -> None:
        """The network may fail before or after a call to the provider, or the process die."""
        fault = self.chance.random()
        if fault < 0.1:
            self.side.wire.before = lost
        elif fault < 0.2:
            self.side.wire.after = lost
        with contextlib.suppress(PaymentUnavailable, BillingError):
            if not self._perhaps_dying(call):
                call()
        self.side.wire.before = self.side.wire.after = lambda *_call: None

    def _charge(self, setup: AutoTopUp) -> None:
        automatic.begin(setup_pk=setup.pk)
        for row in TopUp.objects.filter(account=setup.account, origin="automatic", state=TopUp.States.CREATED):
            automatic.charge(top_up=row)

    def _tell_mine(self) -> None:
        """What `reversals.tell_waiting` and `automatic.sweep` do, for this town: the others have other providers."""
        owners = [customer.organization.pk for customer in self.customers]
        mine = {"account__organization__in": owners}
        for row in TopUp.objects.filter(origin="automatic", state=TopUp.States.CREATED, **mine):
            automatic.charge(top_up=row)
        clerks = reversals.Refund.objects.filter(state="created", requested_by=self.clerk).select_related("top_up")
        for refund in clerks:
            reversals.tell(refund=refund)

    def _booked(self) -> int:
        with connection.cursor() as cursor:
            cursor.execute(BOOKED, {"town": f"sim-{self.seed}-%"})
            return int(cursor.fetchone()[0])

    def _apply_mine(self, newest: int = 400) -> int:
        """What `events.apply_waiting` does, for this town's events, in any order, parked ones at once. How many."""
        due = list(self._mine(newest).filter(state__in=events.OPEN).order_by("?").values_list("pk", flat=True))
        for pk in due:
            events.apply(event_pk=pk)
        return len(due)

    def _mine(self, newest: int) -> QuerySet[StripeEvent]:
        known = [event["id"] for event in self.side.provider.book.store.newest("event", newest)]
        return StripeEvent.objects.filter(event_id__in=known)

    def _left_over(self) -> list[str]:
        """Events of the provider's own that nobody acted on: it tells the truth, so there should be none."""
        waiting = [*events.OPEN, StripeEvent.States.QUARANTINED]
        rows = self._mine(10**9).filter(state__in=waiting)
        return [f"{row.event_id} {row.type} is {row.state}: {row.reason}" for row in rows]

    def _take(self, event: dict[str, Any], *, off: int = 0, secret: str = "") -> bool:
        """A webhook: checked, stored, applied. False where it is refused at the door."""
        body = json.dumps(event)
        header = stripe.WebhookSignature.generate_signature_header(
            body, secret or gateway.sandbox_secret(), int(time.time()) + off
        )
        try:
            pk = events.store(gateway.verify(body.encode(), header), body)
        except BadSignature:
            return False
        if pk is not None:
            events.apply(event_pk=pk)
        return True

    def _look_at(self, customer: Customer, act: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(TOUCHED, {"owner": customer.organization.pk})
            if found := cursor.fetchall():
                raise BooksBroken(f"after {act} (seed {self.seed}, step {self.steps}): {found}")
