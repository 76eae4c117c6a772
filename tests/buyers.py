"""Customers who quote, buy, rerun and repeat orders: the orders of the money property.

Mixed into a Hypothesis machine. `jobs` are the jobs that were bought, oldest first.
"""

from __future__ import annotations

import uuid
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import rule

from billing.errors import InsufficientFunds
from billing.models import Quote
from billing.selectors import wallet
from jobs import orders
from jobs.models import Job, Order
from jobs.states import OnHang
from storage.models import Workspace
from tests.payers import Payers
from tests.racing import raised, together


class Buyers(Payers):
    """Rules about orders. A key or a quote buys once, however often it is used.

    `which` counts jobs from the newest, and `threads` says how many calls are made at once. In all rules, a value that
    `sampled_from` lists twice is drawn more often.
    """

    bought: dict[str, uuid.UUID]
    jobs: list[int]

    customers, threads, which = Payers.customers, Payers.threads, Payers.which

    def job(self, which: int) -> int | None:
        """Return the id of a job, or None if none was bought."""
        return self.jobs[-1 - which % len(self.jobs)] if self.jobs else None

    def form(self, customer: int, **choices: Any) -> dict[str, Any]:
        """Return what a customer chooses for a training."""
        return {
            "product": "metered",
            "framework": "pytorch",
            "image": "pytorch",
            "workspace": Workspace.objects.get(organization=self.members[customer].organization).name,
            "code_path": "train.py",
            "epochs": 100,
            "batch_size": 8,
            "node_spec": "nano",
            "nodes": 1,
            "workers_per_node": 1,
        } | choices

    def quote(self, customer: int, product: str, nodes: int, seconds: int, **more: Any) -> Quote:
        data = self.form(customer, product=product, nodes=nodes, max_seconds=seconds, lr="0.1", **more)
        return orders.quote_order(membership=self.members[customer], data=data)

    def remember(self, order: Order) -> None:
        """Add the job of an order, whose key must not have bought another one."""
        assert self.bought.setdefault(order.idempotency_key, order.pk) == order.pk
        self.jobs.append(order.job.pk)

    @rule(
        customer=customers,
        product=st.sampled_from(["metered", "metered", "fixed"]),
        nodes=st.integers(1, 5),
        seconds=st.integers(60, 7200),
        resilience=st.one_of(
            st.just({}),
            st.fixed_dictionaries(
                {
                    "retries": st.integers(1, 3),
                    "retry_backoff_seconds": st.sampled_from([0, 0, 3600]),
                    "on_hang": st.sampled_from(OnHang),
                    "min_nodes": st.integers(0, 1),  # 0: the run is not elastic
                }
            ),
        ),
        threads=threads,
    )
    def buy(
        self, *, customer: int, product: str, nodes: int, seconds: int, resilience: dict[str, Any], threads: int
    ) -> None:
        """Order one quote several times at once with the same key: one order, or only refusals."""
        member, quote = self.members[customer], self.quote(customer, product, nodes, seconds, **resilience)
        available = wallet(member.organization).available_minor
        key = uuid.uuid4().hex
        outcomes = together(
            *[lambda: orders.place_order(membership=member, quote=quote, idempotency_key=key)] * threads
        )
        if available < quote.ceiling_minor:
            assert {type(outcome) for outcome in outcomes} == {InsufficientFunds}
            return
        assert not raised(outcomes)
        bought = {order.pk: order for order in outcomes if isinstance(order, Order)}
        assert len(bought) == 1
        self.remember(*bought.values())
        self.order_again(which=0, threads=1)

    @rule(customer=customers, time_limits=st.lists(st.integers(600, 7200), min_size=2, max_size=4))
    def buy_several(self, customer: int, time_limits: list[int]) -> None:
        """Order different quotes at once from one wallet that may not cover them all."""
        member = self.members[customer]
        offers = [self.quote(customer, "metered", 2, seconds) for seconds in time_limits]
        available = wallet(member.organization).available_minor
        outcomes = together(*(lambda q=q: orders.place_order(membership=member, quote=q) for q in offers))
        assert {type(error) for error in raised(outcomes)} <= {InsufficientFunds}
        bought = [order for order in outcomes if isinstance(order, Order)]
        spent = sum(order.quote.ceiling_minor for order in bought)
        assert spent <= available
        refused = [offer for offer in offers if offer.pk not in {order.quote_id for order in bought}]
        assert all(offer.ceiling_minor > available - spent for offer in refused)  # the rest covers none of them
        for order in sorted(bought, key=lambda order: order.job.pk):
            self.remember(order)

    @rule(which=which, threads=threads)
    def run_again(self, which: int, threads: int) -> None:
        """Rerun a job several times at once with the same key: at most one new order."""
        if (job := self.job(which)) is None:
            return
        row = Job.objects.select_related("order__quote").get(pk=job)
        member = self.member_of(row.organization_id)
        key = uuid.uuid4().hex
        outcomes = together(
            *[lambda: orders.rerun(membership=member, job=row, changes={}, idempotency_key=key)] * threads
        )
        assert {type(error) for error in raised(outcomes)} <= {InsufficientFunds}
        rerun = {order.pk: order for order in outcomes if isinstance(order, Order)}
        assert len(rerun) <= 1
        for order in rerun.values():
            self.remember(order)

    @rule(which=which, threads=threads)
    def order_again(self, which: int, threads: int) -> None:
        """Repeat an order with its key much later: it is the same order in any state."""
        if (job := self.job(which)) is None:
            return
        order = Order.objects.select_related("quote", "organization").get(job=job)
        member = self.member_of(order.organization_id)
        key = order.idempotency_key
        call = lambda: orders.place_order(membership=member, quote=order.quote, idempotency_key=key).pk
        assert together(*[call] * threads) == [order.pk] * threads
