"""Update jobs to the state that their clusters report, and repair missed changes.

The watcher calls `follow` for each change of a run. Celery beat calls `reconcile` every few seconds: it asks for the
status of every open run, makes a scheduling pass, stops runs of ended attempts, and deletes runs without an attempt.
So a lost task, a dead worker or an outage of Redis delays a job at most until the next call of `reconcile`.
"""

from __future__ import annotations

import contextlib
import logging
import random
import re
import time
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta

import redis
from django.core.cache import cache
from django.db import transaction
from django.db.models import Q, QuerySet
from django.utils import timezone

from console.core import optional_cache
from console.core.enqueue import send, send_on_commit
from console.observability import context
from jobs import circuit_breaker, clusters, lifecycle, locks, results, run_specs, telemetry
from jobs.clusters import cluster, cluster_names, resolve_cluster_name
from jobs.dispatch import dispatch, dispatch_queue, log_fields, stop_run
from jobs.models import Attempt
from jobs.states import ACTIVE, EndReason, JobState
from jobs.usage import GRACE_SECONDS, STOP_SECONDS
from runtime.errors import BackendUnavailable, RunNotFound, RunUnreadable
from runtime.specs import Failure, FailureCode, RunPhase, RunStatus

logger = logging.getLogger(__name__)

RECONCILE_SECONDS = 20.0
"""After this time a reconciliation asks for no further status, so that a slow cluster cannot keep a worker process busy
for minutes. The jobs are read in random order, so that several reconciliations together reach all of them."""
UNREADABLE_PERIOD = timedelta(hours=1)
"""A run whose files cannot be read is ended when it has been unreadable for this long, and when it must have ended by
itself this long ago. An hour is enough to restart a file server or to free descriptors. Before that the run may
complete, and is then charged as usual."""
_UNREADABLE_MEMORY_SECONDS = 600
"""How long a failed read counts as the beginning of a period without a successful one. Each failed read, every few
seconds, renews this. A console that was away for longer begins a new period."""
RUN_NAME = re.compile(r"job-([0-9]+)-([0-9]+)")
"""`Attempt.run_name`: the id of the job and the number of the attempt."""


def follow(*, run_name: str) -> None:
    """Read a run's new output and update its job. Does nothing for a run without an open attempt."""
    attempt = _open_attempt(run_name)
    if attempt:
        _reconcile_attempt(attempt, reads_output=True)


def reconcile(cluster_name: str = "") -> None:
    """Reconcile one cluster, or all of them. Skip a cluster that another process reconciles."""
    for name in [cluster_name] if cluster_name else clusters.clusters_to_reconcile():
        with locks.reconciliation_lock(name) as has_lock:
            if has_lock:
                _reconcile_cluster(name)


def reconcile_job(*, job_pk: int) -> None:
    """Update one job to the state that its cluster reports."""
    attempt = _open_attempts().filter(job_id=job_pk).last()
    if attempt:
        _reconcile_attempt(attempt)


def stop(*, job_pk: int) -> None:
    """Ask the cluster to stop the run of a job that is cancelled or moved, and update the job."""
    must_stop = Q(job__state=JobState.STOPPING) | Q(move_requested_at__isnull=False)
    attempt = Attempt.objects.filter(must_stop, job_id=job_pk, finished_at=None).last()
    if attempt:
        try:
            # Not `stop_run`, which would describe the run too, as `reconcile_job` does below.
            cluster(attempt.backend).stop(attempt.run_name, GRACE_SECONDS)
        except BackendUnavailable:
            return  # the next reconciliation asks again
        reconcile_job(job_pk=job_pk)


def delete_old_runs() -> None:
    """Delete the files of ended runs after the retention time, and runs without an attempt. Safe to repeat.

    Also continue work for ended runs that a lost task or a killed worker left undone.
    """
    for name in clusters.clusters_to_reconcile():
        try:
            _clean_up_runs(name)
        except BackendUnavailable:
            continue  # the next call tries again


# --- One run ----------------------------------------------------------------------------------------------------------


@context.with_fields(log_fields)
def _reconcile_attempt(attempt: Attempt, *, reads_output: bool = False) -> None:
    """Update an attempt and its job to the run's status. Stop the run if its job is cancelled or moved."""
    try:
        status = cluster(attempt.backend).describe(attempt.run_name)
    except RunUnreadable as error:
        _end_unreadable(attempt, error)
        return
    except BackendUnavailable:
        return  # nothing is known about the run; the next reconciliation asks again
    except RunNotFound:
        _end_vanished(attempt)
        return
    if attempt.started_at is None:  # a run that waits for machines may be unreadable now and then
        optional_cache.delete(_unreadable_key(attempt))
    must_stop = attempt.job.state == JobState.STOPPING or attempt.move_requested_at
    if must_stop and status.phase in {RunPhase.STARTING, RunPhase.RUNNING}:
        stop_run(attempt.backend, attempt.run_name)
    elif attempt.job.is_notebook and status.phase is RunPhase.RUNNING:
        _update_deadline(attempt)
    has_rest = False
    if status.phase is RunPhase.ENDED:
        # Read before `_observe` ends the job, so that an ended job shows all of its progress. `ingest_all` stops after
        # a few seconds. If output is left then, `read_rest` reads it after the end.
        has_rest = telemetry.ingest_all(attempt=attempt)
    elif reads_output:
        telemetry.ingest(attempt=attempt)
    _observe(attempt, status)
    if has_rest:
        send(telemetry.read_rest, attempt.pk)


def _update_deadline(attempt: Attempt) -> None:
    """Give the run of a notebook its job's deadline, which is later if the notebook was extended. Safe to repeat."""
    backend = cluster(attempt.backend)
    if backend.extends_runs:
        with contextlib.suppress(BackendUnavailable, RunNotFound):  # the next reconciliation tries again
            backend.extend(attempt.run_name, run_specs.deadline_seconds(attempt))


def _observe(attempt: Attempt, status: RunStatus) -> None:
    """Update the attempt and its job. If the attempt has ended, request a scheduling pass and count its files."""
    with transaction.atomic():
        job = lifecycle.observe(attempt=attempt, status=status)
        if job.is_ended or job.state == JobState.QUEUED:  # queued again for another attempt
            send_on_commit(dispatch, resolve_cluster_name(attempt.backend))
            send_on_commit(results.count_storage, job.pk)


def _end_vanished(attempt: Attempt) -> None:
    """End an attempt whose run the cluster does not have, unless the dispatcher has yet to submit it."""
    job = attempt.job
    if attempt.submitted_at is None and job.state == JobState.STARTING:
        return
    failure = None
    if job.state != JobState.STOPPING:
        reason = EndReason.NODE_LOST
        failure = Failure("The cluster no longer knows this run.", FailureCode.VANISHED)
    else:
        # If the run had started, its end is at an unknown time. That is a platform fault, so the run is free.
        reason = EndReason.NODE_LOST if attempt.started_at else EndReason.CANCELLED
    with transaction.atomic():
        lifecycle.end_attempt(attempt=attempt, reason=reason, failure=failure)
        send_on_commit(dispatch, resolve_cluster_name(attempt.backend))


def _end_unreadable(attempt: Attempt, error: RunUnreadable) -> None:
    """End an attempt whose run has stayed unreadable for UNREADABLE_PERIOD, free of charge; kill its processes before.

    Before that, stop the run if its job is cancelled or moved. The end is free because customer code has no access to
    the files that a backend reads.
    """
    unreadable_since = _unreadable_since(attempt, error)
    stop_requested_at = attempt.job.cancel_requested_at or attempt.move_requested_at
    if stop_requested_at:
        must_have_ended_at = stop_requested_at + timedelta(seconds=GRACE_SECONDS + STOP_SECONDS)
    else:
        # A run whose start was not seen had not started when it was last read.
        started_at = attempt.started_at or unreadable_since
        must_have_ended_at = started_at + timedelta(seconds=run_specs.deadline_seconds(attempt))
    if timezone.now() < max(must_have_ended_at, unreadable_since) + UNREADABLE_PERIOD:
        if stop_requested_at:
            stop_run(attempt.backend, attempt.run_name)
        return
    try:
        cluster(attempt.backend).kill(attempt.run_name)
    except BackendUnavailable as reason:
        logger.warning("%s cannot be ended: %s", attempt.run_name, reason)
        return  # it may still compute, so it keeps its nodes; the next reconciliation tries again
    logger.error("%s was unreadable since %s and is ended: %s", attempt.run_name, unreadable_since.isoformat(), error)
    failure = Failure(str(error), FailureCode.UNREADABLE)
    with transaction.atomic():
        lifecycle.end_attempt(attempt=attempt, reason=EndReason.PLATFORM_ERROR, failure=failure)
        send_on_commit(dispatch, resolve_cluster_name(attempt.backend))


def _unreadable_since(attempt: Attempt, error: RunUnreadable) -> datetime:
    """Return since when the files of the attempt's run cannot be read; log the first failed read."""
    key = _unreadable_key(attempt)
    try:
        since: datetime | None = cache.get(key)
        if since is None:
            since = timezone.now()
            logger.warning("%s on the cluster %s: %s", attempt.run_name, attempt.backend, error)
        cache.set(key, since, _UNREADABLE_MEMORY_SECONDS)
    except redis.RedisError:
        return timezone.now()  # the period begins when Redis answers
    return since


def _unreadable_key(attempt: Attempt) -> str:
    return f"run-unreadable:{attempt.pk}"


def _open_attempts() -> QuerySet[Attempt]:
    """Return the attempts whose runs a cluster may have."""
    return Attempt.objects.filter(finished_at=None, job__state__in=ACTIVE).select_related("job")


def _open_attempt(run_name: str) -> Attempt | None:
    """Return the open attempt with this run name; None for the name of a run that belongs to no job."""
    parts = RUN_NAME.fullmatch(run_name)
    return _open_attempts().filter(job_id=int(parts[1]), number=int(parts[2])).first() if parts else None


# --- One cluster ------------------------------------------------------------------------------------------------------


def _reconcile_cluster(cluster_name: str) -> None:
    """Update the jobs of a cluster, make a scheduling pass, clean up its runs, and report its capacity."""
    started = time.monotonic()
    with contextlib.suppress(BackendUnavailable):  # `_stop_unwanted_runs` stores that the cluster does not answer
        circuit_breaker.close_if_reachable(cluster_name, cluster(cluster_name))
    attempts = Attempt.objects.filter(clusters.on_cluster(cluster_name), finished_at=None, job__state__in=ACTIVE)
    jobs = list(attempts.values_list("job", "job__state"))
    random.shuffle(jobs)
    # Jobs that are being cancelled come first, because their machines become free for others when they end.
    for pk, _state in sorted(jobs, key=lambda each: each[1] != JobState.STOPPING):
        try:
            reconcile_job(job_pk=pk)
        except Exception:
            # An error with one job must not stop the reconciliation of the others.
            logger.exception("Job %s could not be reconciled; the next reconciliation tries again.", pk)
        if time.monotonic() - started > RECONCILE_SECONDS:
            logger.warning("The cluster %s answers slowly; the next reconciliation continues.", cluster_name)
            break
    dispatch_queue(cluster_name)
    _stop_unwanted_runs(cluster_name)
    clusters.report_capacity(cluster_name)


def _stop_unwanted_runs(cluster_name: str) -> None:
    """Stop runs of ended attempts, and delete runs without an attempt. Store whether the cluster answered."""
    try:
        for run_name, attempt in _runs_on(cluster_name, live=True):
            if attempt is None:
                _delete_unknown(cluster_name, run_name)
            elif attempt.finished_at:
                stop_run(cluster_name, run_name)
    except BackendUnavailable as error:
        clusters.record_status(name=cluster_name, answers=False, detail=str(error))
    else:
        clusters.record_status(name=cluster_name, answers=True)


def _clean_up_runs(cluster_name: str) -> None:
    """Delete runs that are expired or unknown. Measure runs not counted yet, and let a task read unread output."""
    runs = _runs_on(cluster_name, live=False)
    for run_name, attempt in runs:
        if attempt is None:
            _delete_unknown(cluster_name, run_name)
        elif attempt.finished_at and results.is_expired(attempt.job) and not results.is_needed(attempt.job):
            with _logged_if_unreadable(run_name):
                results.delete_run(attempt)
        elif telemetry.has_rest(attempt):
            send(telemetry.read_rest, attempt.pk)
    # The loop above does not see attempts that were never submitted, but checkpoints may have been copied for them.
    ended_attempts = Attempt.objects.filter(clusters.on_cluster(cluster_name), finished_at__isnull=False)
    unsubmitted_with_copies = ended_attempts.filter(submitted_at=None, job__checkpoints_copied_at__isnull=False)
    for attempt in unsubmitted_with_copies.select_related("job__organization"):
        with _logged_if_unreadable(attempt.run_name):
            results.delete_unused_copy(attempt)
    results.measure_uncounted([attempt for _name, attempt in runs if attempt])


def _runs_on(cluster_name: str, *, live: bool) -> list[tuple[str, Attempt | None]]:
    """Return the names of a cluster's runs, each with its attempt; None if no attempt on this cluster has that name.

    Only runs of jobs: other runs install packages or check the cluster. `live`: only runs that have not ended. A run is
    left out if its attempt names a cluster that is no longer in the settings. That may be an old name of this cluster,
    so the run must not be deleted as unknown.
    """
    names = [run_name for run_name in cluster(cluster_name).names(live=live) if run_name.startswith("job-")]
    attempts = {attempt.run_name: attempt for attempt in _attempts_of(names)} if names else {}
    runs: list[tuple[str, Attempt | None]] = []
    for run_name in names:
        attempt = attempts.get(run_name)
        attempts_cluster = resolve_cluster_name(attempt.backend) if attempt else None
        if attempts_cluster == cluster_name:
            runs.append((run_name, attempt))
        elif attempts_cluster is None or attempts_cluster in cluster_names():
            runs.append((run_name, None))
    return runs


def _attempts_of(run_names: Iterable[str]) -> QuerySet[Attempt]:
    """Return all attempts of the jobs whose ids are in these run names."""
    job_ids = {int(parts[1]) for parts in map(RUN_NAME.fullmatch, run_names) if parts}
    return Attempt.objects.filter(job_id__in=job_ids).select_related("job")


def _delete_unknown(cluster_name: str, run_name: str) -> None:
    """Delete a run that no attempt explains, such as a run from after the backup that was restored."""
    logger.warning("The cluster %s has a run %s without an attempt; deleting it.", cluster_name, run_name)
    with _logged_if_unreadable(run_name):
        cluster(cluster_name).delete(run_name)


@contextlib.contextmanager
def _logged_if_unreadable(run_name: str) -> Iterator[None]:
    """Log that a run cannot be deleted in the `with` block, so that other runs are. A later call tries again."""
    try:
        yield
    except RunUnreadable as error:
        logger.warning("%s cannot be deleted: %s", run_name, error)
