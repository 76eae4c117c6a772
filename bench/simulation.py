"""At least 100,000 simulated purchases, after each of which the ledger must be correct to the cent.

make bench NAME=simulation (QUICK=1 for 2,000; SEED=<number> repeats a run; PURCHASES=<number>)

Processes with groups of customers (`bench.simulated_customers`) share one embedded PostgreSQL. Runs are bought and
settled. Cards work, fail, ask for confirmation or are disputed, and refunds fail. Processes crash at random statements.
The network fails before and after requests. Events and tasks come twice, late, in any order, or never. Clocks differ.
Prices change while runs are open. Credit is granted and expires, runs are invoiced with tax and corrected, debts arise
and are written off.

SQL checks the accounts of the customer after each step, and regularly the whole ledger (`tests.books`). At the end of
each group the provider's balance must equal the clearing account. The first broken invariant ends the simulation and
prints its seed.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections import Counter
from typing import Any, NamedTuple

import django

from bench import rounds
from bench.environment import temporary_installation

PURCHASES = int(os.environ.get("PURCHASES") or (2_000 if rounds.is_quick() else 100_000))
PURCHASES_PER_GROUP = min(PURCHASES, 500 if rounds.is_quick() else 2_000)
"""Purchases after which a group ends, and its provider's balance is checked."""
PROCESSES = max(2, os.cpu_count() or 2)
"""At least two, so that transactions of different processes meet."""
LEDGER_CHECK_SECONDS = 60.0
"""Interval between two checks of the whole ledger, which take seconds."""
MIN_PURCHASES_FOR_ALL_ACTIONS = 300
"""With this number of purchases, every action must have had an effect at least once."""


class GroupResult(NamedTuple):
    """Results of one group of customers: purchases that ended, actions taken, and how often a call crashed.

    `held_minor` is the amount that the group's provider holds at the end, `action_counts` how often each action did
    anything.
    """

    purchases: int
    steps: int
    crashes: int
    held_minor: int
    action_counts: dict[str, int]


def run_groups(seed: int, commands: Any, results: Any, changes_prices: bool) -> None:
    """Run one process. A command is a number of purchases for a new group. A failure is returned as text."""
    django.setup()
    from bench.simulated_customers import SimulatedCustomers  # noqa: PLC0415 - Django must be set up first

    number = 0
    while (purchases := commands.get()) is not None:
        number += 1
        group = SimulatedCustomers(seed * 1000 + number, changes_prices=changes_prices)
        try:
            group.run(purchases)
            held_minor = group.finish()
        except BaseException:
            results.put(traceback.format_exc())
            raise
        results.put(GroupResult(group.purchases, group.steps, group.crashes, held_minor, group.action_counts))


def main() -> None:
    """Simulate, check, and print the JSON object."""
    with temporary_installation(LOG_LEVEL="ERROR"):
        create_prices()
        simulate(int(os.environ.get("SEED") or time.time()) % 1_000_000)


def create_prices() -> None:
    """Create a node spec, its price, and a tax on top. If a wallet cannot pay the tax, the customer owes it."""
    from decimal import Decimal  # noqa: PLC0415 - with the rest

    from billing import pricebooks  # noqa: PLC0415 - Django must be set up first
    from billing.models import BillingPolicy, NodeSpec, Price, PriceBook  # noqa: PLC0415 - as above

    spec = NodeSpec.objects.create(name="sim", title="Sim", cpus=1, memory_mib=1024)
    book = PriceBook.objects.create(name="First", currency="USD")
    Price.objects.create(book=book, kind="node_hour", node_spec=spec, amount=Decimal(120))
    pricebooks.publish(book=book)
    BillingPolicy.objects.create(tax_percent=Decimal("8.25"), tax_inclusive=False)


def simulate(seed: int) -> None:
    """Run all groups in several processes, and check the whole ledger regularly."""
    from tests.books import BROKEN_BOOKS, broken, cleared  # noqa: PLC0415 - Django must be set up first

    print(f"SEED={seed}: {PURCHASES} purchases, {PURCHASES_PER_GROUP} per group, {PROCESSES} processes", flush=True)
    spawn = multiprocessing.get_context("spawn")
    commands, results = spawn.Queue(), spawn.Queue()
    groups = -(-PURCHASES // PURCHASES_PER_GROUP)  # rounded up
    for _ in range(groups):
        commands.put(PURCHASES_PER_GROUP)
    for _ in range(PROCESSES):
        commands.put(None)
    processes = [
        # No two processes have the same seed. All groups share the price books, so only the first process changes them.
        spawn.Process(target=run_groups, args=(seed * PROCESSES + number, commands, results, number == 0), daemon=True)
        for number in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    total = {"purchases": 0, "steps": 0, "crashes": 0, "held": 0}
    action_counts: Counter[str] = Counter()
    started_at = checked_at = time.monotonic()
    checks = 0
    for number in range(1, groups + 1):
        result = results.get()
        if isinstance(result, str):
            raise SystemExit(result)
        group = {"purchases": result.purchases, "steps": result.steps, "crashes": result.crashes}
        group["held"] = result.held_minor
        total = {name: total[name] + group[name] for name in total}
        action_counts.update(result.action_counts)
        if time.monotonic() - checked_at > LEDGER_CHECK_SECONDS or number == groups:
            checked_at, checks = time.monotonic(), checks + 1
            if problems := broken(BROKEN_BOOKS):
                raise SystemExit(f"SEED={seed}: {problems}")
        print(f"{total['purchases']:7} purchases, {total['steps']} steps, {total['crashes']} crashes", flush=True)
    for process in processes:
        process.join()
    if cleared() != total["held"]:
        raise SystemExit(f"SEED={seed}: the providers hold {total['held']}, our clearing account {cleared()}")
    print("actions that found something to do:", dict(sorted(action_counts.items())), flush=True)
    unused = [action for action, count in action_counts.items() if not count]
    if total["purchases"] >= MIN_PURCHASES_FOR_ALL_ACTIONS and unused:
        raise SystemExit(f"SEED={seed}: {total['purchases']} purchases never came to {', '.join(unused)}")
    seconds = round(time.monotonic() - started_at, 1)
    counts = {**total, "ledger_checks": checks, "seconds": seconds, "seed": seed} | count_rows()
    # `print_result` expects figures of repeated measurements, but each count is a single value. The ratios are
    # constants, because otherwise the checks above would have ended the simulation.
    figures = {name: {"median": count, "min": count, "max": count} for name, count in counts.items()}
    rounds.print_result("simulation", figures, ratios={"provider_vs_clearing": 1.0, "broken_rules": 0.0})


def count_rows() -> dict[str, int]:
    """Return the number of rows of each kind."""
    from billing import models  # noqa: PLC0415 - Django must be set up first

    return {
        "top_ups": models.TopUp.objects.count(),
        "refunds": models.Refund.objects.count(),
        "disputes": models.Dispute.objects.count(),
        "events": models.StripeEvent.objects.count(),
        "transactions": models.Transaction.objects.count(),
        "entries": models.Entry.objects.count(),
        "price_books": models.PriceBook.objects.count(),
        "write_offs": models.WriteOff.objects.count(),
        "invoices": models.Invoice.objects.filter(kind="invoice").count(),
        "credit_notes": models.Invoice.objects.filter(kind="note").count(),
    }


if __name__ == "__main__":
    main()
