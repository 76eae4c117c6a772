"""At least 100,000 simulated purchases, and not a cent lost or doubled.

make bench NAME=simulation (QUICK=1 for 2,000; SEED=<number> repeats a run)

Processes of customers (`bench.simulated`) share one embedded PostgreSQL. Runs are bought and settled, paid by cards
that work, fail, ask, are disputed, and whose refunds fail; workers die at random statements; the network fails before
and after calls; events and tasks come twice, late, in any order, or never; clocks part; prices change under open runs;
credit is given and expires, runs are invoiced with a tax and corrected, debts are made and given up.
After each step the accounts that it touched are checked by SQL, regularly the whole books (`tests.books`), and at the
end of each town the provider's side equals the clearing account. The first broken rule ends the run with its seed.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections import Counter
from typing import Any

import django

from bench import rounds

PURCHASES = int(os.environ.get("PURCHASES") or (2_000 if rounds.is_quick() else 100_000))
TOWN = min(PURCHASES, 500 if rounds.is_quick() else 2_000)
PROCESSES = max(2, os.cpu_count() or 2)
LOOK_SECONDS = 60.0
ENOUGH = 300
"""Purchases: in so many of them each act has found something to do."""


def town(seed: int, orders: Any, done: Any) -> None:
    """A process: towns of so many purchases, one after the other, until there is no more order."""
    django.setup()
    from bench.simulated import Town  # noqa: PLC0415 - Django must be set up first

    number = 0
    while (purchases := orders.get()) is not None:
        number += 1
        place = Town(seed * 1000 + number, changes_prices=seed % PROCESSES == 0)
        try:
            place.run(purchases)
            held = place.settle_down()
        except BaseException:
            done.put({"failed": traceback.format_exc()})
            raise
        told = {"purchases": place.purchases, "steps": place.steps, "crashes": place.crashes, "held": held}
        done.put(told | {"acts": place.done})


def main() -> None:
    """Simulate, check, and print the JSON object last."""
    with tempfile.TemporaryDirectory(prefix="ty-sim-") as name:
        os.environ |= {"TRAINYARD_VAR": name, "DJANGO_SETTINGS_MODULE": "console.settings", "LOG_LEVEL": "ERROR"}
        for variable in ("DATABASE_URL", "REDIS_URL", "STRIPE_SECRET_KEY"):
            os.environ.pop(variable, None)
        django.setup()
        from django.conf import settings  # noqa: PLC0415 - Django must be set up first
        from django.core.management import call_command  # noqa: PLC0415 - as above

        settings.EMBEDDED.start()
        try:
            call_command("migrate", interactive=False, verbosity=0)
            prepare()
            simulate(int(os.environ.get("SEED") or time.time()) % 1_000_000)
        finally:
            settings.EMBEDDED.stop()


def prepare() -> None:
    """A node spec, a first price, and a tax that comes on top: what a wallet does not hold of it is owed."""
    from decimal import Decimal  # noqa: PLC0415 - with the rest

    from billing import pricebooks  # noqa: PLC0415 - Django must be set up first
    from billing.models import BillingPolicy, NodeSpec, Price, PriceBook  # noqa: PLC0415 - as above

    spec = NodeSpec.objects.create(name="sim", title="Sim", cpus=1, memory_mib=1024)
    book = PriceBook.objects.create(name="First", currency="USD")
    Price.objects.create(book=book, kind="node_hour", node_spec=spec, amount=Decimal(120))
    pricebooks.publish(book=book)
    BillingPolicy.objects.create(tax_percent=Decimal("8.25"), tax_inclusive=False)


def simulate(seed: int) -> None:
    """Start the processes, look at the whole books now and then, and add up."""
    from django.db import connection  # noqa: PLC0415 - Django must be set up first

    from tests.books import BROKEN_BOOKS, broken, cleared  # noqa: PLC0415 - as above

    print(f"SEED={seed}: {PURCHASES} purchases in towns of {TOWN}, {PROCESSES} processes", flush=True)
    connection.close()
    spawn = multiprocessing.get_context("spawn")
    orders, done = spawn.Queue(), spawn.Queue()
    towns = -(-PURCHASES // TOWN)
    for _ in range(towns):
        orders.put(TOWN)
    for _ in range(PROCESSES):
        orders.put(None)
    workers = [
        spawn.Process(target=town, args=(seed * PROCESSES + number, orders, done), daemon=True)
        for number in range(PROCESSES)
    ]
    for worker in workers:
        worker.start()
    total = {"purchases": 0, "steps": 0, "crashes": 0, "held": 0}
    acts: Counter[str] = Counter()
    begun, looked, looks = time.monotonic(), time.monotonic(), 0
    for number in range(1, towns + 1):
        told = done.get()
        if "failed" in told:
            raise SystemExit(told["failed"])
        total = {name: total[name] + told[name] for name in total}
        acts.update(told["acts"])
        if time.monotonic() - looked > LOOK_SECONDS or number == towns:
            looked, looks = time.monotonic(), looks + 1
            if found := broken(BROKEN_BOOKS):
                raise SystemExit(f"SEED={seed}: {found}")
        print(
            f"{total['purchases']:7} purchases, {total['steps']} steps, {total['crashes']} deaths: all whole",
            flush=True,
        )
    for worker in workers:
        worker.join()
    if cleared() != total["held"]:
        raise SystemExit(f"SEED={seed}: the providers hold {total['held']}, our clearing account says {cleared()}")
    print("acts that found something to do:", dict(sorted(acts.items())), flush=True)
    if total["purchases"] >= ENOUGH and (idle := [act for act, count in acts.items() if not count]):
        raise SystemExit(f"SEED={seed}: in {total['purchases']} purchases nobody ever came to {', '.join(idle)}")
    seconds = time.monotonic() - begun
    counts = {**total, "looks_at_the_whole": looks, "seconds": round(seconds, 1), "seed": seed} | census()
    figures = {name: {"median": count, "min": count, "max": count} for name, count in counts.items()}
    rounds.conclude("simulation", figures, {"provider_vs_clearing": 1.0, "broken_rules": 0.0})


def census() -> dict[str, int]:
    """How much of what there was."""
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
