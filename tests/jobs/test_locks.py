"""Locks: one reconciliation and one dispatcher per cluster over all processes.

A connection to the database holds a lock. Each thread here has a connection of its own, as another process would.
"""

import threading

import pytest
from django.db import connection

from jobs import locks
from tests.console.processes import wait_for
from tests.jobs.gates import PATIENCE, Gate, join
from tests.racing import together

pytestmark = pytest.mark.usefixtures("database_without_rows")


def is_free(cluster, lock=locks.reconciliation_lock):
    with lock(cluster) as is_ours:
        return is_ours


def test_each_cluster_is_reconciled_by_one_process_at_a_time_independently_of_others():
    for lock in (locks.reconciliation_lock, locks.dispatch_lock):
        with lock("west") as is_ours:
            assert is_ours
            assert together(lambda lock=lock: is_free("east", lock)) == [True]  # `together` calls on another thread
    with locks.reconciliation_lock("west"):
        assert together(lambda: is_free("west")) == [False]
    assert is_free("west")


def test_a_lock_is_released_with_its_connection():
    def die():
        with locks.reconciliation_lock("west"):
            connection.close()

    together(die)
    wait_for(lambda: is_free("west"), PATIENCE)  # PostgreSQL notices a closed connection a moment later


class Dispatchers:
    """Threads that each try to make a pass over the same cluster; the gate holds those in a pass."""

    def __init__(self):
        self.gate, self.refused, self.threads = Gate(), 0, []

    def start(self):
        self.threads.append(threading.Thread(target=self._work))
        self.threads[-1].start()

    def _work(self):
        try:
            with locks.dispatch_lock("west") as is_ours:
                if is_ours:
                    self.gate.hold("pass")
                    return
            with self.gate.changed:
                self.refused += 1
                self.gate.changed.notify_all()
        finally:
            connection.close()

    def end(self):
        self.gate.release()
        join(*self.threads)
        assert self.gate.most == 1, "two dispatchers of one cluster"


def test_while_one_dispatcher_makes_a_pass_one_waits_and_the_others_return_at_once():
    dispatchers = Dispatchers()
    dispatchers.start()
    dispatchers.gate.until_entered(1)
    for _ in range(4):
        dispatchers.start()
    # One of these four waits, and the others leave: the pass that follows serves them.
    dispatchers.gate.until(lambda: dispatchers.refused == 3)
    assert len(dispatchers.gate.entered) == 1
    for passes in (2, 3):
        dispatchers.gate.release()
        dispatchers.gate.until_entered(passes)
        if passes == 2:
            dispatchers.start()  # a request during the second pass gets a third
    dispatchers.end()
    assert (len(dispatchers.gate.entered), dispatchers.refused) == (3, 3)
