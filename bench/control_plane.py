"""A queue of 10,000 jobs: claims per second, from free capacity to the next claim, memory; and after a long history.

make bench NAME=control_plane (QUICK=1 for fewer rounds and a shorter history)

Two worker processes, each with a database of its own on one durable embedded PostgreSQL: one has 1,000 finished jobs
behind it, the other 100,000. Both have 10,000 jobs waiting, of 50 organizations and four shapes, on a cluster that is
imagined in memory; everything else is the product's own code. Every figure is taken of both in each round, in random
order; the ratio of the two says whether a history slows the console down.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import operator
import os
import statistics
import tempfile
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import django

from bench import rounds

QUEUED = 2_000 if rounds.is_quick() else 10_000
HISTORIES = {"short": 1_000, "long": 10_000 if rounds.is_quick() else 100_000}
ROUNDS = 2 if rounds.is_quick() else 5
CLAIMS, ENDS, PASSES = (40, 10, 10) if rounds.is_quick() else (200, 50, 100)


def main() -> None:
    """Measure, print the table, and the JSON object last."""
    with tempfile.TemporaryDirectory(prefix="ty-bench-") as name, ExitStack() as open_things:
        environment = {"TRAINYARD_VAR": name, "DJANGO_SETTINGS_MODULE": "console.settings", "LOG_LEVEL": "WARNING"}
        for variable in ("DATABASE_URL", "REDIS_URL", "STRIPE_SECRET_KEY", "TRAINYARD_CLUSTERS"):
            os.environ.pop(variable, None)
        os.environ |= environment
        django.setup()
        from django.conf import settings  # noqa: PLC0415 - Django must be set up first
        from django.core.management import call_command  # noqa: PLC0415 - as above
        from django.db import connection  # noqa: PLC0415 - as above

        settings.EMBEDDED.start()
        open_things.callback(settings.EMBEDDED.stop)
        call_command("migrate", interactive=False, verbosity=0)
        connection.close()
        workers = {}
        for history, finished in HISTORIES.items():
            _copy_database(settings, history)
            url = settings.EMBEDDED.database_url.rpartition("/")[0] + f"/{history}"
            workers[history] = _start(open_things, environment | {"DATABASE_URL": url}, finished)
        before = {history: orders.recv() for history, orders in workers.items()}
        figures = rounds.measure([_variant(history, orders) for history, orders in workers.items()], ROUNDS, "claims/s")
        report(figures, before, workers)


TAKEN: dict[str, dict[str, list[float]]] = {}
"""What a variant measures beside its claims, by history."""


def _variant(history: str, orders: Connection) -> rounds.Variant:
    def measure() -> float:
        taken = TAKEN.setdefault(history, {"idle_pass_ms": [], "free_to_claim_ms": []})
        taken["idle_pass_ms"].append(_ask(orders, "idle_pass", PASSES))
        rate: float = _ask(orders, "claims", CLAIMS)
        taken["free_to_claim_ms"].append(_ask(orders, "free_to_claim", ENDS))
        _ask(orders, "calm")
        return rate

    return rounds.Variant(f"claims_{history}", measure)


def report(rates: dict[str, list[float]], before: dict[str, float], workers: dict[str, Connection]) -> None:
    """The table and the JSON object. The first round, which fills caches, counts nowhere."""
    figures = {name: rounds.summary(values) for name, values in rates.items()}
    for history, taken in TAKEN.items():
        figures |= {f"{name}_{history}": rounds.summary(values[1:]) for name, values in taken.items()}
        grown = _ask(workers[history], "memory") - before[history]
        figures[f"memory_grown_mib_{history}"] = rounds.summary([max(0.0, grown)])
        figures[f"memory_mib_{history}"] = rounds.summary([before[history] + grown])
    rounds.table(f"{QUEUED} jobs wait", figures)
    pairs = {"claims": (rates["claims_long"], rates["claims_short"])}
    pairs |= {name: (TAKEN["long"][name][1:], TAKEN["short"][name][1:]) for name in TAKEN["long"]}
    # Round by round: what else the machine does changes between rounds more than within one.
    ratios = {
        f"{name}_long_vs_short": round(statistics.median(map(operator.truediv, long, short)), 3)
        for name, (long, short) in pairs.items()
    }
    print(f"after {HISTORIES['long']} finished jobs against {HISTORIES['short']}: {ratios}")
    rounds.conclude("control_plane", figures, ratios)


def _copy_database(settings: Any, name: str) -> None:
    import psycopg  # noqa: PLC0415 - only here

    address = {"host": str(settings.EMBEDDED.socket_dir), "user": "postgres", "dbname": "postgres"}
    with psycopg.connect(**address, autocommit=True) as server:
        server.execute(f"CREATE DATABASE {name} TEMPLATE trainyard")


def _start(open_things: ExitStack, environment: dict[str, str], finished: int) -> Connection:
    from bench.full_queue import serve  # noqa: PLC0415 - it reads the environment

    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=serve, args=(theirs, environment, QUEUED, finished), daemon=True)
    process.start()
    theirs.close()
    open_things.callback(process.join, 30)
    open_things.callback(_dismiss, ours)
    return ours


def _dismiss(orders: Connection) -> None:
    with contextlib.suppress(BrokenPipeError):  # it has ended by itself, and said why
        orders.send(None)


def _ask(orders: Connection, *order: Any) -> Any:
    orders.send(order)
    return orders.recv()


if __name__ == "__main__":
    main()
