"""PostgreSQL advisory locks: one reconciliation and one dispatcher for each cluster at a time, over all processes.

The locks belong to the database session, so PostgreSQL releases those of a process that dies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from django.db import connection

RECONCILE, DISPATCH, NEXT_DISPATCH, PACKAGES, COPIES = 7_411, 7_412, 7_413, 7_414, 7_415
"""First key of each lock; the second is a hash of the cluster's name. The numbers are arbitrary, but the same in every
version, so that the old and the new version exclude each other during an upgrade."""


@contextlib.contextmanager
def reconciliation_lock(cluster_name: str) -> Iterator[bool]:
    """Yield whether the caller got the cluster's lock; False while another process reconciles it."""
    is_ours = _call("pg_try_advisory_lock", RECONCILE, cluster_name)
    try:
        yield is_ours
    finally:
        if is_ours:
            _call("pg_advisory_unlock", RECONCILE, cluster_name)


@contextlib.contextmanager
def dispatch_lock(cluster_name: str) -> Iterator[bool]:
    """Wait for the cluster's dispatch lock and yield True; yield False at once if another caller already waits.

    No request is lost: the waiting caller starts its pass later, so it sees every change that was committed before this
    call. At most one process per cluster works, and one waits.
    """
    is_next = _call("pg_try_advisory_lock", NEXT_DISPATCH, cluster_name)
    if not is_next:
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


@contextlib.contextmanager
def packages_lock() -> Iterator[bool]:
    """Yield whether the caller may start and finish installations of packages; False while another process does."""
    is_ours = _call("pg_try_advisory_lock", PACKAGES, "")
    try:
        yield is_ours
    finally:
        if is_ours:
            _call("pg_advisory_unlock", PACKAGES, "")


@contextlib.contextmanager
def copies_lock() -> Iterator[bool]:
    """Yield whether the caller may copy checkpoints; False while another process does.

    The lock keeps long copies from occupying more than one worker process.
    """
    is_ours = _call("pg_try_advisory_lock", COPIES, "")
    try:
        yield is_ours
    finally:
        if is_ours:
            _call("pg_advisory_unlock", COPIES, "")


def _call(function: str, key: int, cluster_name: str) -> bool:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {function}(%s, hashtext(%s))", [key, cluster_name])
        return bool(cursor.fetchone()[0])
