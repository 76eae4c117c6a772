"""A queue of 10,000 jobs with a short and a long history: claims per second, delays and memory.

make bench NAME=control_plane (QUICK=1 for fewer rounds and a shorter history)

There are two worker processes, each with its own database on one durable embedded PostgreSQL. One has 1,000 finished
jobs, the other 100,000. In both, 10,000 jobs of 50 organizations and four shapes (node spec and number of nodes) wait.
The cluster is simulated in memory; all other code is the product's. Each round measures both workers, in random order.
The ratio of the two shows whether a long history slows the console down.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import operator
import statistics
from contextlib import ExitStack
from typing import Any

import psycopg

from bench import rounds
from bench.environment import temporary_installation
from bench.queue_worker import run_worker

QUEUED = 2_000 if rounds.is_quick() else 10_000
FINISHED = {"short": 1_000, "long": 10_000 if rounds.is_quick() else 100_000}
"""The number of finished jobs in each history."""
ROUNDS = 2 if rounds.is_quick() else 5
CORES, RUN_ENDS, PASSES = (40, 10, 10) if rounds.is_quick() else (200, 50, 100)
"""The cores that jobs claim in a round, and how many ends of runs and scheduling passes a round measures."""
STOP_SECONDS = 30
"""How long to wait for the end of a worker process."""


class Worker:
    """A worker process with one history. `milliseconds` has the durations that each round measures.

    `idle_pass_ms` is the median duration of a scheduling pass that starts nothing, since the cluster is full.
    `run_end_to_claim_ms` is the median time from the end of a run to the submission of another in its place.
    """

    def __init__(self, resources: ExitStack, history: str, environment: dict[str, str]) -> None:
        self.history = history
        self.milliseconds: dict[str, list[float]] = {"idle_pass_ms": [], "run_end_to_claim_ms": []}
        self._connection, remote = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=run_worker, args=(remote, environment, QUEUED, FINISHED[history]), daemon=True
        )
        process.start()
        remote.close()
        # Callbacks run in reverse order: first `_stop`, then `join`.
        resources.callback(process.join, STOP_SECONDS)
        resources.callback(self._stop)

    def wait_until_ready(self) -> None:
        """Wait until the process has filled its database with all jobs."""
        self.memory_at_start_mib = self._connection.recv()

    def measure(self) -> float:
        """Measure one round; return claims per second."""
        self.milliseconds["idle_pass_ms"].append(self.call("idle_pass_milliseconds", PASSES))
        claims_per_second: float = self.call("claims_per_second", CORES)
        self.milliseconds["run_end_to_claim_ms"].append(self.call("run_end_to_claim_milliseconds", RUN_ENDS))
        self.call("end_all_runs")
        return claims_per_second

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the `QueueWorker` in the process."""
        self._connection.send((method, arguments))
        return self._connection.recv()

    def _stop(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # the process has already ended, and printed its error
            self._connection.send(None)


def main() -> None:
    """Measure, then print the table and the JSON object."""
    with ExitStack() as resources:
        settings = resources.enter_context(temporary_installation())
        database_server, _, _database = settings.EMBEDDED.database_url.rpartition("/")
        workers = []
        for number, history in enumerate(FINISHED, 1):
            copy_database(settings, history)
            # With one message broker for both, each worker would receive messages about the other's jobs.
            redis_url = settings.EMBEDDED.redis_url.replace("?db=0", f"?db={number}")
            environment = {"DATABASE_URL": f"{database_server}/{history}", "REDIS_URL": redis_url}
            workers.append(Worker(resources, history, environment))
        for worker in workers:
            worker.wait_until_ready()
        variants = [rounds.Variant(f"claims_{worker.history}", worker.measure) for worker in workers]
        rates = rounds.measure(variants, ROUNDS, "claims/s")
        report(rates, workers)


def copy_database(settings: Any, name: str) -> None:
    """Copy the migrated database. No connection to it may be open."""
    from django.db import connection  # noqa: PLC0415 - Django must be set up first

    connection.close()
    address = {"host": str(settings.EMBEDDED.socket_dir), "user": "postgres", "dbname": "postgres"}
    with psycopg.connect(**address, autocommit=True) as server:
        server.execute(f"CREATE DATABASE {name} TEMPLATE trainyard")


def report(rates: dict[str, list[float]], workers: list[Worker]) -> None:
    """Print the table, the ratios and the JSON object."""
    values = dict(rates)
    for worker in workers:
        # `rounds.measure` has already left the first round out of `rates`. It fills caches, so it does not count.
        values |= {f"{name}_{worker.history}": durations[1:] for name, durations in worker.milliseconds.items()}
        memory_mib = worker.call("memory_mib")
        values[f"memory_grown_mib_{worker.history}"] = [max(0.0, memory_mib - worker.memory_at_start_mib)]
        values[f"memory_mib_{worker.history}"] = [memory_mib]
    figures = rounds.summaries(values)
    rounds.print_table(f"{QUEUED} jobs wait", figures)
    # Ratios of each round, since other load on the machine changes between rounds more than within one.
    ratios = {
        f"{name}_long_vs_short": round(
            statistics.median(map(operator.truediv, values[f"{name}_long"], values[f"{name}_short"])), 3
        )
        for name in ("claims", "idle_pass_ms", "run_end_to_claim_ms")
    }
    print(f"after {FINISHED['long']} finished jobs against {FINISHED['short']}: {ratios}")
    rounds.print_result("control_plane", figures, ratios)


if __name__ == "__main__":
    main()
