"""Customers who pay, and a provider whose events come in any order: the payments of the money property.

Mixed into a Hypothesis machine that has `members`. The provider is the sandbox behind the gateway's real client, so
what it holds is counted by code that is independent of our ledger.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import stripe
from django.utils import timezone
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from billing import auto_topup, events, gateway, payments, refunds
from billing.customers import saved_cards
from billing.errors import BadSignature, PaymentUnavailable, RefundRefused
from billing.models import AutoTopUp, PaymentCustomer, StripeEvent, TopUp
from billing.sandbox import intents
from billing.selectors import wallet
from console.accounts.models import Membership, User
from tests.books import BROKEN_BOOKS, broken, cleared
from tests.crashes import crash_at
from tests.provider import ASKS_FOR_CONFIRMATION, DECLINED, DISPUTED, FAILS_LATER, GOOD, REFUND_FAILS, Stripe
from tests.racing import raised, together

PROVIDERS: list[Stripe] = []
"""The provider of the running example."""
WRONG: list[dict[str, Any]] = [{"amount_total": 1}, {"currency": "eur"}, {"livemode": True}, {"id": "cs_another"}]
"""Fields of a paid Checkout Session, or `livemode` of its event, that do not match the top-up."""
PERIODIC_TASKS: dict[str, Callable[[], Any]] = {
    "apply": events.apply_waiting,
    "fetch": events.fetch_undelivered,
    "charge": auto_topup.run_due,
    "refund": refunds.submit_waiting,
}
"""The periodic work on payments, by names for Hypothesis."""


class Payers:
    """Rules about payments in and back. What the provider was paid is never read from our rows."""

    members: list[Membership]
    provider: Stripe
    undelivered: list[dict[str, Any]]
    """Events of earlier deliveries that have not arrived yet. The newest are still at the provider."""

    threads = st.integers(1, 3)
    """How many calls are made at once."""
    which = st.integers(0, 5)
    """A row, counted from the newest."""
    customers = st.integers(0, 1)
    """The position of a customer in `members`."""

    def open_payments(self) -> None:
        """Begin an example, in which the provider's clock is `skew` seconds ahead of ours."""
        self.skew = 0.0
        self.provider = Stripe(clock=lambda: time.time() + self.skew)
        PROVIDERS[:] = [self.provider]
        self.undelivered = []
        self.cleared_before = cleared()  # by earlier examples: each has a provider of its own
        self.administrator = User.objects.create_user(f"administrator-{uuid.uuid4().hex}@example.com")

    @property
    def organizations(self) -> list[int]:
        """Return the ids of the customers' organizations."""
        return [member.organization_id for member in self.members]

    def member_of(self, organization_id: int) -> Membership:
        """Return the customer of an organization."""
        return next(member for member in self.members if member.organization_id == organization_id)

    def top_ups(self) -> list[TopUp]:
        """Return the top-ups of this example, newest first."""
        return list(TopUp.objects.filter(account__organization__in=self.organizations).order_by("-created_at", "-pk"))

    def with_page(self) -> list[TopUp]:
        """Return the top-ups with a payment page: not the automatic ones, nor those whose request failed."""
        return [row for row in self.top_ups() if row.session_id]

    def chosen(self, which: int, rows: list[Any]) -> Any:
        """Return one of the rows, or None if there are none."""
        return rows[which % len(rows)] if rows else None

    # What customers do

    # 500 is the smallest top-up (TOP_UP_MINIMUM_MINOR)
    @rule(customer=customers, amount=st.integers(500, 900), save=st.booleans())
    def begin_top_up(self, customer: int, amount: int, save: bool) -> None:
        member = self.members[customer]
        payments.start_top_up(
            account=wallet(member.organization), amount_minor=amount, user=member.user, save_card=save
        )

    @rule(
        which=which,
        card=st.sampled_from([GOOD, GOOD, GOOD, DISPUTED, REFUND_FAILS, DECLINED, ASKS_FOR_CONFIRMATION, FAILS_LATER]),
    )
    def pay(self, which: int, card: str) -> None:
        """Pay at the provider's page. The console does not know of the payment before an event comes."""
        if (top_up := self.chosen(which, self.with_page())) is None:
            return
        address = self.provider.pay(top_up.session_id, card)
        if "/challenge/" in address:
            # `which` decides here too, so that some payers refuse their bank's question
            self.provider.sandbox.answer_challenge(address.rsplit("/", 1)[1], is_agreed=which % 2 == 0)

    @rule(which=which)
    def leave_the_page(self, which: int) -> None:
        if (top_up := self.chosen(which, self.with_page())) is not None:
            gateway.expire_checkout(top_up.session_id)

    @rule(customer=customers, threshold=st.integers(1, 3000), amount=st.integers(500, 900))
    def switch_automatic_on(self, customer: int, threshold: int, amount: int) -> None:
        member = self.members[customer]
        saved = saved_cards(member.organization)
        if saved:
            auto_topup.switch_on(
                account=wallet(member.organization),
                threshold_minor=threshold,
                amount_minor=amount,
                method_id=saved[0].card.method_id,
                user=member.user,
            )

    @rule(customer=customers)
    def customer_is_deleted(self, customer: int) -> None:
        """Delete the customer at the provider's Dashboard. Cards and automatic top-ups end, and paying goes on."""
        row = PaymentCustomer.objects.filter(organization=self.members[customer].organization).first()
        if row and row.customer_id:
            self.provider.sandbox.handle("DELETE", f"/v1/customers/{row.customer_id}")

    # What comes back

    @rule(which=which, amount=st.integers(1, 900), threads=threads)
    def refund(self, which: int, amount: int, threads: int) -> None:
        """Refund as an administrator who clicks more than once."""
        paid = [row for row in self.top_ups() if row.state == TopUp.States.PAID]
        if (top_up := self.chosen(which, paid)) is None:
            return
        left = refunds.refundable_minor(top_up)
        outcomes = together(
            *[lambda: refunds.refund(top_up=top_up, amount_minor=amount, reason="Asked", user=self.administrator)]
            * threads
        )
        assert {type(error) for error in raised(outcomes)} <= {RefundRefused}
        done = [each for each in outcomes if not isinstance(each, Exception)]
        # A refund that failed gives its money back, so that one more may fit.
        assert len(done) == min(threads, left // amount) or any(each.state == "failed" for each in done)

    @rule(which=which, amount=st.integers(1, 900))
    def refund_at_the_dashboard(self, which: int, amount: int) -> None:
        charges = list(self.provider.sandbox.account.store.all("charge", newest_first=True))
        if (charge := self.chosen(which, charges)) is not None:
            self.provider.sandbox.handle("POST", "/v1/refunds", f"charge={charge['id']}&amount={amount}")

    @rule(which=which)
    def dispute(self, which: int) -> None:
        """The cardholder's bank takes a payment back."""
        stripe_account = self.provider.sandbox.account
        open_charges = [
            charge
            for charge in stripe_account.store.all("charge", newest_first=True)
            if not charge["disputed"] and charge["amount_refunded"] < charge["amount"]
            and not any(each["charge"] == charge["id"] for each in stripe_account.store.all("dispute"))
        ]  # fmt: skip
        if (charge := self.chosen(which, open_charges)) is not None:
            intents.open_dispute(stripe_account, charge)

    @rule(which=which, won=st.booleans())
    def end_dispute(self, which: int, won: bool) -> None:
        stripe_account = self.provider.sandbox.account
        undecided = [each for each in stripe_account.store.all("dispute") if each["status"] not in {"won", "lost"}]
        if (row := self.chosen(which, undecided)) is not None:
            intents.end_dispute(stripe_account, row, "won" if won else "lost")

    @rule(which=which)
    def bank_reopens_a_dispute(self, which: int) -> None:
        """The bank reopens a dispute that was won."""
        stripe_account = self.provider.sandbox.account
        won = [each for each in stripe_account.store.all("dispute") if each["status"] == "won"]
        if (row := self.chosen(which, won)) is not None:
            intents.reopen_dispute(stripe_account, row)

    # What the provider sends

    @rule(seed=st.integers(0, 2**16), share=st.integers(1, 3), copies=st.integers(1, 3))
    def events_arrive(self, seed: int, share: int, copies: int) -> None:
        """Deliver every `share`-th event in any order, each `copies` times and at once. Some others never arrive."""
        chance = random.Random(seed)
        waiting = self.undelivered + self.provider.fresh()
        chance.shuffle(waiting)
        arrived, rest = waiting[::share], [event for number, event in enumerate(waiting) if number % share]
        # A quarter of the rest never arrives, and must be fetched.
        self.undelivered = rest[: len(rest) - len(rest) // 4]
        if arrived:
            calls = [lambda event=event: self.receive_event(event) for event in arrived] * copies
            for number in range(0, len(calls), 6):  # six at once: each thread needs a database connection
                assert raised(together(*calls[number : number + 6])) == []

    @rule(seconds=st.sampled_from([0.0, 0.0, -7200.0, 7200.0, 86_400.0]))
    def clocks_differ(self, seconds: float) -> None:
        """The provider's clock is not ours."""
        self.skew = seconds

    # A signature may be 300 s old or early (SIGNATURE_TOLERANCE_SECONDS).
    @rule(which=which, wrong=st.sampled_from(WRONG), off=st.sampled_from([0, 250, -250, 400, -400, 90_000]))
    def something_is_wrong_with_an_event(self, which: int, wrong: dict[str, Any], off: int) -> None:
        """The console quarantines an event that does not match, and refuses a signature whose time is too far off."""
        if (top_up := self.chosen(which, self.with_page())) is None:
            return
        session = self.provider.sandbox.session(top_up.session_id) | {"payment_status": "paid", "status": "complete"}
        changes = dict(wrong)
        event = {
            "id": f"evt_{uuid.uuid4().hex}",
            "object": "event",
            "type": "checkout.session.completed",
            "created": 1,
            "livemode": changes.pop("livemode", False),
            "data": {"object": session | changes},
        }
        before = wallet(top_up.account.organization).posted_minor
        if abs(off) > gateway.SIGNATURE_TOLERANCE_SECONDS:
            self.refuse_event(event, off)
        else:
            self.receive_event(event, off)
            assert StripeEvent.objects.get(event_id=event["id"]).state == StripeEvent.States.QUARANTINED
        assert wallet(top_up.account.organization).posted_minor == before

    def receive_event(self, event: dict[str, Any], off: int = 0) -> None:
        """Receive a webhook: verify, store and apply it. `off` is how much later its signature is dated, in seconds."""
        body = json.dumps(event)
        header = stripe.WebhookSignature.generate_signature_header(
            body, gateway.sandbox_secret(), int(time.time()) + off
        )
        events.store(gateway.verify(body.encode(), header))
        events.apply(event_pk=StripeEvent.objects.get(event_id=event["id"]).pk)

    def refuse_event(self, event: dict[str, Any], off: int) -> None:
        with pytest.raises(BadSignature):
            self.receive_event(event, off)
        assert not StripeEvent.objects.filter(event_id=event["id"]).exists()

    # What the workers do, and how they crash

    @rule(task=st.sampled_from(sorted(PERIODIC_TASKS)), threads=threads)
    def work_on_payments(self, task: str, threads: int) -> None:
        assert raised(together(*[PERIODIC_TASKS[task]] * threads)) == []

    @rule(task=st.sampled_from(sorted(PERIODIC_TASKS)), statement=st.integers(1, 40))
    def a_worker_dies(self, task: str, statement: int) -> None:
        crash_at(statement, PERIODIC_TASKS[task])

    @rule(which=which, amount=st.integers(1, 900), statement=st.integers(1, 30))
    def the_administrator_loses_the_connection(self, which: int, amount: int, statement: int) -> None:
        paid = [row for row in self.top_ups() if row.state == TopUp.States.PAID]
        if (top_up := self.chosen(which, paid)) is not None and amount <= refunds.refundable_minor(top_up):
            crash_at(
                statement,
                lambda: refunds.refund(top_up=top_up, amount_minor=amount, reason="Asked", user=self.administrator),
            )

    @rule(task=st.sampled_from(sorted(PERIODIC_TASKS)), arrives=st.booleans(), customer=customers)
    def the_network_fails(self, task: str, arrives: bool, customer: int) -> None:
        """Lose each call before it arrives; or lose only its answer, so the console cannot know that it was done."""
        member = self.members[customer]
        with self.provider.network_failing("after" if arrives else "before"):
            with contextlib.suppress(PaymentUnavailable):
                payments.start_top_up(account=wallet(member.organization), amount_minor=600, user=member.user)
            with contextlib.suppress(PaymentUnavailable):
                PERIODIC_TASKS[task]()

    # What must hold

    @invariant()
    def the_books_are_whole(self) -> None:
        assert broken(BROKEN_BOOKS) == {}

    @invariant()
    def nothing_is_credited_that_was_not_paid(self) -> None:
        """Each of our paid top-ups has a payment of the same amount at the provider, which names the top-up."""
        store = self.provider.sandbox.account.store
        for row in self.top_ups():
            if row.state == TopUp.States.PAID:
                intent = store.get("payment_intent", row.payment_intent)
                assert intent is not None
                assert (intent["status"], intent["amount_received"]) == ("succeeded", row.amount_minor)
                assert intent["metadata"]["top_up"] == str(row.pk)

    @invariant()
    def nobody_is_charged_twice(self) -> None:
        """A top-up has at most one charge at the provider."""
        charged = [each["metadata"].get("top_up") for each in self.provider.sandbox.account.store.all("charge")]
        assert len(charged) == len(set(charged))

    def close_payments(self) -> None:
        """Deliver and apply everything; then both sides hold the same."""
        self.skew = 0.0
        AutoTopUp.objects.update(is_on=False)  # else each round would begin new payments
        for _ in range(3):  # what one round charges or refunds causes events, which the next round applies
            for task in ("charge", "refund", "fetch"):
                PERIODIC_TASKS[task]()
            StripeEvent.objects.filter(state=StripeEvent.States.PARKED).update(retry_at=timezone.now())
            while events.apply_waiting():
                pass
        self.the_books_are_whole()
        self.nothing_is_credited_that_was_not_paid()
        self.nobody_is_charged_twice()
        waiting = StripeEvent.objects.filter(state__in=events.OPEN_STATES)
        assert not waiting.exists(), list(waiting.values_list("type", "reason"))
        assert cleared() - self.cleared_before == self.provider.held()
