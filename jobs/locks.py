"""PostgreSQL advisory locks: at most one process at a time reconciles a cluster, dispatches its jobs, and so on.

The locks belong to the database session, so PostgreSQL releases those of a process that dies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

from django.db import connection

RECONCILE, DISPATCH, NEXT_DISPATCH, PACKAGES, COPIES = 7_411, 7_412, 7_413, 7_414, 7_415
"""The first key of each kind of lock; the second key is a hash of the cluster's name, which is "" for PACKAGES and
COPIES: they apply to the whole installation. The numbers are arbitrary, but the same in every version, so that
processes of two versions exclude each other during an upgrade. NEXT_DISPATCH is the lock of the one process that waits
for DISPATCH."""


def reconciliation_lock(cluster_name: str) -> AbstractContextManager[bool]:
    """Yield whether the caller may reconcile the cluster; False while another process does."""
    return _try_lock(RECONCILE, cluster_name)


@contextlib.contextmanager
def dispatch_lock(cluster_name: str) -> Iterator[bool]:
    """Wait for the cluster's dispatch lock and yield True; yield False at once if another caller already waits.

    No request for a pass is lost: the caller that already waits starts its pass later, so it sees every change that was
    committed before this call. At most one process per cluster makes a pass, and at most one waits.
    """
    if not _call("pg_try_advisory_lock", NEXT_DISPATCH, cluster_name):
        yield False
        return
    try:
        _call("pg_advisory_lock", DISPATCH, cluster_name)
    finally:
        _call("pg_advisory_unlock", NEXT_DISPATCH, cluster_name)
    try:
        yield True
    finally:
        _call("pg_advisory_unlock", DISPATCH, cluster_name)


def packages_lock() -> AbstractContextManager[bool]:
    """Yield whether the caller may install and remove packages of runs; False while another process does."""
    return _try_lock(PACKAGES)


def copies_lock() -> AbstractContextManager[bool]:
    """Yield whether the caller may copy checkpoints; False while another process does.

    The lock keeps long copies from occupying more than one worker process.
    """
    return _try_lock(COPIES)


@contextlib.contextmanager
def _try_lock(key: int, cluster_name: str = "") -> Iterator[bool]:
    """Yield whether the caller holds the lock; False at once while another database session holds it."""
    has_lock = _call("pg_try_advisory_lock", key, cluster_name)
    try:
        yield has_lock
    finally:
        if has_lock:
            _call("pg_advisory_unlock", key, cluster_name)


def _call(function: str, key: int, cluster_name: str) -> bool:
    """Return the result of a PostgreSQL function for advisory locks."""
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {function}(%s, hashtext(%s))", [key, cluster_name])
        return bool(cursor.fetchone()[0])
