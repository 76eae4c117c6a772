"""Start waiting jobs: claim each in the queue's order, and submit it to its cluster.

The rows of queued jobs are the queue. The Celery task `dispatch` only requests a scheduling pass: orders, ends of runs
and cancellations send it after their commit. `reconciliation` makes a pass even if no task arrives. An advisory lock
allows one pass per cluster at a time.

Backends are never called inside a database transaction. Every step can be repeated: a claim is a compare-and-set, the
run's name is derived from its attempt, and a backend adopts a run that it already has.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

from celery import shared_task
from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone

from console.core.enqueue import send
from console.observability import context, tracing
from jobs import checkpoints, clusters, lifecycle, locks, quotas, scheduler, traces
from jobs.clusters import cluster, cluster_names, on_cluster, resolve_cluster_name
from jobs.errors import StaleTransition
from jobs.models import Attempt, Job
from jobs.run_specs import launch_spec
from jobs.scheduler import SchedulingPass
from jobs.states import ENDED, EndReason, JobState
from jobs.submit_pool import SubmitPool, call_and_log_errors
from jobs.usage import GRACE_SECONDS
from runtime.backends.base import Backend
from runtime.errors import BackendUnavailable, InvalidSpec, NoCapacity, RunNotFound, RunUnreadable
from runtime.specs import Failure, FailureCode, RunPhase

logger = logging.getLogger(__name__)

COPYING = "copying_checkpoints"
"""The waiting code (`Job.waiting_code`) of a job that starts once the checkpoints of another job are copied for it."""
NOT_SUBMITTED = "not_submitted"
"""The waiting code of a starting job whose last submission failed with BackendUnavailable."""
SUBMIT_RETRY_PERIOD = timedelta(minutes=5)
"""How long a submission that fails with unexpected errors is retried. Then the attempt ends, free of charge. An
administrator can restart what is broken within this time, and a customer does not wait for long."""


# `acks_late=False`: Celery does not deliver the task again if its worker dies. A lost task delays a start by seconds,
# but a task that kills every worker that takes it would block the whole queue.
@shared_task(acks_late=False)
def dispatch(cluster_name: str) -> None:
    """Start the waiting jobs that can start on a cluster."""
    dispatch_queue(cluster_name)


def log_fields(attempt: Attempt, **_options: Any) -> dict[str, str | int]:
    """Return the context fields of log lines and spans about an attempt.

    `context.with_fields` passes all arguments of the decorated function. Options other than `attempt` do not matter.
    """
    # The attempt's `backend` is the name of its cluster.
    return {"job": attempt.job_id, "run": attempt.run_name, "cluster": attempt.backend}


def dispatch_queue(cluster_name: str = "") -> None:
    """Start every waiting job that can start, oldest first, on one cluster (or on each), and store why others wait."""
    for name in [cluster_name] if cluster_name else cluster_names():
        with locks.dispatch_lock(name) as has_lock:
            if has_lock:
                _make_pass(name)


def claim(job: Job, nodes: int | None = None) -> Attempt | None:
    """Create the job's next attempt on at most `nodes` nodes, by default on all that it ordered.

    Return None if another process claimed the job, or the organization's quota has no room for it.
    """
    try:
        with transaction.atomic():
            # The lock allows one claim of an organization at a time: concurrent claims on two clusters could exceed the
            # quota.
            job.organization.quota = quotas.lock_quota(job.organization)
            free = quotas.free_nodes(job, quotas.running_nodes(job.organization))
            if free < job.least_nodes:
                return None
            granted = min(nodes or job.nodes, free)
            return lifecycle.claim(job=job, cluster_name=resolve_cluster_name(job.node_spec.cluster), nodes=granted)
    except StaleTransition:
        return None


@context.with_fields(log_fields)
def submit(attempt: Attempt) -> bool:
    """Submit an attempt to its cluster; a second submission adopts the run.

    Return whether the attempt uses its capacity now: the cluster has the run, or checkpoints are copied for it.
    """
    try:
        with tracing.span("dispatch.submit", parent=attempt.job.traceparent, attributes=traces.attributes_of(attempt)):
            checkpoints.finish_discard(attempt)
            if checkpoints.awaits_copy(attempt):
                # A task copies them, so that the pass does not wait. The attempt keeps its nodes until a later pass
                # submits it.
                starting = Job.objects.filter(pk=attempt.job_id, state=JobState.STARTING)
                starting.update(waiting_code=COPYING, waiting_data={"job": attempt.job.from_checkpoint_id})
                send(copy_checkpoints, attempt.pk)
                return True
            cluster(attempt.backend).submit(launch_spec(attempt))
    except NoCapacity:
        # Another run took the capacity since the pass read it.
        checkpoints.discard_copy(attempt)
        lifecycle.return_to_queue(attempt=attempt, waiting_code="capacity")
        return False
    except BackendUnavailable as error:
        _record_not_submitted(attempt, error)
        return False  # the attempt stays STARTING, and the next pass submits it again
    except InvalidSpec as error:
        _refuse(attempt, error)
        return False
    except Exception:
        _end_if_late(attempt)
        raise  # the caller logs it, and the next pass tries again
    Attempt.objects.filter(pk=attempt.pk, submitted_at=None).update(submitted_at=timezone.now())
    _stop_if_cancelled(attempt)
    return True


@shared_task(acks_late=False)  # a lost task need not be delivered again, because each pass sends it
def copy_checkpoints(attempt_pk: int) -> None:
    """Copy the checkpoints that an attempt starts from, and request a pass that submits it.

    Does nothing while another process copies checkpoints.
    """
    with locks.copies_lock() as has_lock:
        attempt = _unsubmitted_attempts().filter(pk=attempt_pk).first() if has_lock else None
        if attempt is None:
            return
        try:
            checkpoints.copy_for(attempt)
        except BackendUnavailable:
            return  # the next pass sends this task again
        except InvalidSpec as error:
            _refuse(attempt, error)
            return
        except Exception:
            _end_if_late(attempt)
            raise
        if not _unsubmitted_attempts().filter(pk=attempt_pk).exists():
            checkpoints.discard_copy(attempt)  # the job was cancelled meanwhile
            return
    send(dispatch, attempt.backend)


def stop_run(cluster_name: str, run_name: str) -> None:
    """Stop a run if it exists and has not ended. If the cluster does not answer, the next reconciliation asks again."""
    try:
        backend = cluster(cluster_name)
        try:
            has_ended = backend.describe(run_name).phase is RunPhase.ENDED
        except RunUnreadable:
            has_ended = False
        if not has_ended:
            backend.stop(run_name, GRACE_SECONDS)
    except (RunNotFound, BackendUnavailable):
        return


def _make_pass(cluster_name: str) -> None:
    """Make one pass. The caller holds the cluster's dispatch lock."""
    claimed = list(_attempts_claimed_earlier(cluster_name))
    specs = scheduler.waiting_specs(cluster_name)
    if not claimed and not specs:
        return
    try:
        backend = cluster(cluster_name)
        with SubmitPool(submit, max_concurrent=backend.parallel_submissions) as pool:
            # Submitted first, so that the capacity read below does not count the nodes of these attempts as free.
            for attempt in claimed:
                pool.add(attempt)
            pool.drain()
            if specs and (reason := clusters.drain_reason(cluster_name)):
                scheduler.save_drained(specs, reason)
            elif specs:
                # The cluster does not have these attempts yet, so it reports their nodes as free.
                copying = [attempt for attempt in claimed if checkpoints.awaits_copy(attempt)]
                _start_jobs(backend, pool, SchedulingPass(specs, backend.capacity(), copying))
    except BackendUnavailable:
        scheduler.save_unavailable(specs)


def _start_jobs(backend: Backend, pool: SubmitPool, scheduling_pass: SchedulingPass) -> None:
    """Claim and submit the jobs that fit. After a failed claim or submission, read the capacity again."""
    for job, nodes in scheduling_pass.startable_jobs():
        attempt = call_and_log_errors(claim, job.pk, job, nodes)  # `job.pk` is for the log, the rest for `claim`
        if attempt is not None and pool.add(attempt):
            scheduling_pass.allocate(job, nodes)
        else:
            pool.drain()
            scheduling_pass.update_capacity(backend.capacity())
    if not pool.drain():  # a submission failed, so the pass no longer knows what is free
        scheduling_pass.update_capacity(backend.capacity())
    scheduling_pass.save_snapshots()


def _attempts_claimed_earlier(cluster_name: str) -> QuerySet[Attempt]:
    """Return attempts that an earlier pass claimed and that are not known to be submitted.

    Either the process of that pass died, or the cluster did not answer, or the attempt waits for its checkpoints. If
    the process died just after the submission, the backend adopts the run when it is submitted again.
    """
    return _unsubmitted_attempts().filter(on_cluster(cluster_name))


def _unsubmitted_attempts() -> QuerySet[Attempt]:
    """Return claimed attempts that are not known to be submitted, with the related rows that a submission reads."""
    related = ("image", "workspace", "node_spec", "organization__quota", "order__product", "order__hold__quote")
    attempts = Attempt.objects.filter(finished_at=None, submitted_at=None, job__state=JobState.STARTING)
    return attempts.select_related(*(f"job__{each}" for each in related))


def _record_not_submitted(attempt: Attempt, error: BackendUnavailable) -> None:
    """Store that the run could not be submitted. Log why, but not again at each pass.

    After a timeout the cluster may have the run nevertheless. The next submission adopts it.
    """
    starting = Job.objects.filter(pk=attempt.job_id, state=JobState.STARTING).exclude(waiting_code=NOT_SUBMITTED)
    if starting.update(waiting_code=NOT_SUBMITTED, waiting_data={}):
        logger.warning(
            "Could not submit %s to the cluster %s. The next pass tries again: %s",
            attempt.run_name,
            attempt.backend,
            error,
        )


def _refuse(attempt: Attempt, error: InvalidSpec) -> None:
    """End an attempt whose spec the cluster refused, free of charge and without a retry."""
    checkpoints.discard_copy(attempt)
    # The order checked what the customer chose. Since then the customer can only have deleted the script, a folder or
    # the checkpoints, or used up the storage quota. Any other refusal is the platform's fault.
    is_customer_error = error.field in {"script", "mounts", "from_checkpoint"}
    reason = EndReason.CODE_FAILED if is_customer_error else EndReason.PLATFORM_ERROR
    failure = Failure(str(error), FailureCode.REFUSED, {"field": error.field})
    lifecycle.end_attempt(attempt=attempt, reason=reason, failure=failure, is_final=True)


def _end_if_late(attempt: Attempt) -> None:
    """End an attempt, free of charge, if unexpected errors have kept it from starting for SUBMIT_RETRY_PERIOD."""
    # The period begins after the copy of checkpoints, which may take longer than the period.
    copied_at = Job.objects.values_list("checkpoints_copied_at", flat=True).get(pk=attempt.job_id)
    if timezone.now() - max(attempt.claimed_at, copied_at or attempt.claimed_at) > SUBMIT_RETRY_PERIOD:
        failure = Failure("The platform could not start the run.", FailureCode.NOT_STARTED)
        lifecycle.end_attempt(attempt=attempt, reason=EndReason.PLATFORM_ERROR, failure=failure)


def _stop_if_cancelled(attempt: Attempt) -> None:
    """Stop a run whose job was cancelled between the claim and the submission."""
    state = Job.objects.values_list("state", flat=True).get(pk=attempt.job_id)
    if JobState(state) in {JobState.STOPPING} | ENDED:
        stop_run(attempt.backend, attempt.run_name)
