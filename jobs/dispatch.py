"""Between the queue and the cluster: what starts next, what became of what runs, what is left behind.

Hides when to ask the backend and what its answers mean. The one rule: no call to the backend happens inside a database
transaction, and every step can be done again: a claim is compare-and-set, a run's name is its attempt's, submit adopts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import Q, QuerySet, Sum
from django.utils import timezone

from console.accounts.hints import hint
from console.accounts.models import Quota
from jobs import lifecycle, telemetry, usage
from jobs.backend import cluster, image_of, resources_of
from jobs.bell import publish_state
from jobs.errors import StaleTransition
from jobs.models import Attempt, Job
from jobs.sentences import Cause, cause
from jobs.states import ACTIVE, ENDED, EndReason, JobState, OnHang
from runtime.errors import BackendUnavailable, InvalidSpec, NoCapacity, RunNotFound
from runtime.specs import Capacity, Controller, Framework, RunPhase, RunSpec, RunStatus
from storage import mounts
from storage.tasks import measure_workspace

logger = logging.getLogger(__name__)

GRACE_SECONDS = 10
WORKSPACE_TARGET = "/workspace"
DATASETS_TARGET = "/datasets"
PATIENCE = timedelta(minutes=10)
"""Smaller jobs may overtake one that doesn't fit until it has waited this long; then room is kept free for it."""
SUBMIT_PATIENCE = timedelta(minutes=5)
"""A fault that nobody foresaw is tried again this long; then the attempt ends, free of charge."""
KEEP_RUNS = timedelta(days=30)
"""Logs and results of an ended run are kept at the backend this long."""
HANG_SECONDS = 120
"""A run that shows no sign of progress for as long has hung; the launcher may be sure sooner."""
TOO_LARGE = "too_large"


def dispatch_queue() -> None:
    """Start every waiting job that may start, oldest first, and write down why each other one waits."""
    ready = Q(not_before=None) | Q(not_before__lte=timezone.now())
    queued = Job.objects.filter(ready, state=JobState.QUEUED).order_by("queued_at", "id")
    if not queued.exists():
        return
    try:
        _start_what_fits(queued)
    except BackendUnavailable:
        queued.update(waiting_code="backend_unavailable", waiting_data={})


def _start_what_fits(queued: QuerySet[Job]) -> None:
    capacity, running = cluster().capacity(), _running_nodes()
    reserved = False
    for job in queued.select_related("node_spec", "image", "workspace", "organization__quota").iterator(chunk_size=200):
        room = _room_in_quota(job, running)
        blocked = _blocked_by_quota(job, running) or _blocked_by_capacity(job, capacity, reserved=reserved)
        if blocked is None:
            _start_guarded(job, min(job.nodes, room, capacity.nodes_now(resources_of(job.node_spec))))
            capacity, running = cluster().capacity(), _running_nodes()
            continue
        code, data = blocked
        if (job.waiting_code, job.waiting_data) != (code, data):
            Job.objects.filter(pk=job.pk, state=JobState.QUEUED).update(waiting_code=code, waiting_data=data)
            publish_state(job.pk)
        if code == TOO_LARGE and timezone.now() - datetime.fromisoformat(str(data["since"])) > PATIENCE:
            lifecycle.refuse(job=job, reason=EndReason.NO_CAPACITY)
        reserved = reserved or (code == "capacity" and timezone.now() - job.queued_at > PATIENCE)


def start(job: Job, nodes: int | None = None) -> bool:
    """Claim a waiting job for `nodes` nodes (all that were bought) and hand it to the backend. Gives whether it was."""
    try:
        with transaction.atomic():
            # One claim of an organization at a time: two workers at once can't both take its last nodes.
            job.organization.quota = Quota.objects.select_for_update().get(organization_id=job.organization_id)
            running = _running_nodes()
            if _blocked_by_quota(job, running):
                return False
            granted = min(nodes or job.nodes, _room_in_quota(job, running))
            attempt = lifecycle.claim(job=job, backend=settings.RUNTIME_BACKEND, nodes=granted)
    except StaleTransition:
        return False
    return submit(attempt)


def _start_guarded(job: Job, nodes: int) -> None:
    try:
        start(job, nodes)
    except Exception:
        # One job's fault, whatever it is, must not keep the queue from the others.
        logger.exception("Job %s could not be started; the sweep goes on with it.", job.pk)


def submit(attempt: Attempt) -> bool:
    """Hand an attempt to the backend; one that it knows already is adopted. Gives whether the backend has it."""
    try:
        cluster().submit(run_spec(attempt))
    except NoCapacity:
        # Another run took the room between our look and our submit: wait again.
        lifecycle.give_back(attempt=attempt, waiting_code="capacity", waiting_data={})
        return False
    except BackendUnavailable:
        return False  # the attempt stays STARTING, and the sweep submits it again
    except InvalidSpec as error:
        # What a customer may choose was checked at the order; what is left is this installation's to mend,
        # except the customer's own script or folders, which may have gone since.
        reason = EndReason.CODE_FAILED if error.field in {"script", "mounts"} else EndReason.PLATFORM_ERROR
        _end(attempt, reason, cause(Cause.REFUSED, str(error), field=error.field), final=True)
        return False
    except Exception:
        if timezone.now() - attempt.claimed_at > SUBMIT_PATIENCE:
            _end(attempt, EndReason.PLATFORM_ERROR, cause(Cause.NOT_STARTED, "The platform could not start the run."))
        raise  # whoever asked logs it; the sweep tries again
    Attempt.objects.filter(pk=attempt.pk, submitted_at=None).update(submitted_at=timezone.now())
    _stop_if_unwanted(attempt)
    return True


def run_spec(attempt: Attempt) -> RunSpec:
    """The attempt as the backend needs it; the same whenever it is asked for."""
    job, nodes = attempt.job, attempt.granted_nodes
    versions = [item.version for item in job.job_datasets.select_related("version__dataset")]
    return RunSpec(
        name=attempt.run_name,
        framework=Framework(job.framework),
        image=image_of(job.image),
        nodes=nodes,
        workers_per_node=job.workers_per_node,
        resources=resources_of(job.node_spec),
        script=job.code_path,
        builtin_script=job.builtin_script,
        deadline_seconds=(deadline := _deadline_seconds(attempt)),
        arguments=tuple(job.arguments),
        epochs=job.epochs,
        lr=job.lr,
        batch_size=job.batch_size,
        datasets=tuple(version.dataset.name for version in versions),
        mounts=mounts.mounts_for(
            workspace=job.workspace,
            dataset_versions=versions,
            workspace_target=WORKSPACE_TARGET,
            datasets_target=DATASETS_TARGET,
        ),
        workspace_target=WORKSPACE_TARGET,
        datasets_target=DATASETS_TARGET,
        restart_count=attempt.number - 1,
        grace_seconds=min(GRACE_SECONDS, deadline // 4),
        checkpoint_key=_checkpoint_key(job.pk),
        min_nodes=min(job.min_nodes, nodes),
        controller=Controller(job.controller),
        collective_timeout_seconds=job.collective_timeout_seconds,
        stall_check_seconds=job.stall_check_seconds,
        hang_seconds=0 if job.on_hang == OnHang.IGNORE else HANG_SECONDS,
        labels={"organization": job.organization.slug, "job": str(job.pk)},
    )


def _deadline_seconds(attempt: Attempt) -> int:
    """What earlier attempts have left of the job's time; fewer nodes may take longer."""
    job = attempt.job
    if attempt.number == 1 and attempt.granted_nodes == job.nodes:
        return job.deadline_seconds
    earlier = job.attempts.filter(number__lt=attempt.number)
    longest = lifecycle.longest_seconds(job)
    return max(1, usage.left_seconds(job, earlier, nodes=attempt.granted_nodes, longest_seconds=longest))


def reconcile_job(*, job_pk: int) -> None:
    """Bring one job up to what the backend says of its run."""
    attempt = _open_attempts().filter(job_id=job_pk).last()
    if attempt:
        _reconcile(attempt)


def follow(*, run_name: str) -> None:
    """A run changed: take in what it wrote, and how it goes. A run of an ended attempt, or of nobody, is nothing."""
    attempt = _open_attempts().filter(**_named(run_name)).first() if _named(run_name) else None
    if attempt:
        _reconcile(attempt, reads=True)


def _reconcile(attempt: Attempt, *, reads: bool = False) -> None:
    job = attempt.job
    try:
        status = cluster().describe(attempt.run_name)
    except BackendUnavailable:
        return
    except RunNotFound:
        _vanished(attempt)
        dispatch_queue()
        return
    if job.state == JobState.STOPPING and status.phase in {RunPhase.STARTING, RunPhase.RUNNING}:
        _quietly_stop(attempt.run_name)
    if status.phase is RunPhase.ENDED:
        telemetry.ingest_all(attempt=attempt)
    elif reads:
        telemetry.ingest(attempt=attempt)
    _observe(attempt, status)


def _open_attempts() -> QuerySet[Attempt]:
    """Attempts that the backend may be running, with what it takes to submit one again."""
    return Attempt.objects.filter(finished_at=None, job__state__in=ACTIVE).select_related(
        "job__node_spec", "job__image", "job__workspace", "job__organization"
    )


def _named(run_name: str) -> dict[str, int]:
    """The attempt that a run's name tells; empty for a stranger's."""
    parts = run_name.split("-")
    if len(parts) != 3 or parts[0] != "job" or not (parts[1].isdecimal() and parts[2].isdecimal()):
        return {}
    return {"job_id": int(parts[1]), "number": int(parts[2])}


def reconcile() -> None:
    """The sweep: every open job, then the queue, then what no row knows of."""
    for pk in Job.objects.filter(state__in=ACTIVE).values_list("pk", flat=True):
        try:
            reconcile_job(job_pk=pk)
        except Exception:
            # One job's fault, whatever it is, must not keep the sweep from the others.
            logger.exception("Job %s could not be reconciled; the next sweep tries again.", pk)
    dispatch_queue()
    _sweep_runs()


def stop(*, job_pk: int) -> None:
    """Ask the backend to end a job's run, and take in what it says."""
    attempt = Attempt.objects.filter(job_id=job_pk, job__state=JobState.STOPPING, finished_at=None).last()
    if attempt:
        try:
            cluster().stop(attempt.run_name, GRACE_SECONDS)
        except BackendUnavailable:
            return  # the sweep asks again
        reconcile_job(job_pk=job_pk)


def _observe(attempt: Attempt, status: RunStatus) -> None:
    with transaction.atomic():
        job = lifecycle.observe(attempt=attempt, status=status)
        if job.is_ended or job.state == JobState.QUEUED:
            transaction.on_commit(dispatch_queue)
            others = Job.objects.filter(workspace_id=job.workspace_id).exclude(state__in=ENDED)
            if not others.exists():  # the last one to end has the workspace measured
                hint(measure_workspace, job.workspace_id)


def _running_nodes() -> dict[int, int]:
    """Nodes in use by organization: what open attempts were granted."""
    attempts = Attempt.objects.filter(finished_at=None, job__state__in=ACTIVE).order_by()
    return dict(attempts.values_list("job__organization_id").annotate(total=Sum("granted_nodes")))


def _room_in_quota(job: Job, running_nodes: Mapping[int, int]) -> int:
    return job.organization.quota.max_running_nodes - running_nodes.get(job.organization_id, 0)


def _blocked_by_quota(job: Job, running_nodes: Mapping[int, int]) -> tuple[str, dict[str, Any]] | None:
    if _room_in_quota(job, running_nodes) >= job.least_nodes:
        return None
    running = running_nodes.get(job.organization_id, 0)
    return "quota", {"running": running, "most": job.organization.quota.max_running_nodes}


def _blocked_by_capacity(job: Job, capacity: Capacity, *, reserved: bool) -> tuple[str, dict[str, Any]] | None:
    resources = resources_of(job.node_spec)
    if not capacity.fits_ever(resources, job.least_nodes):
        # The cluster has shrunk since the order. It may grow again; until then nothing is kept free for this job.
        seen = job.waiting_data.get("since") if job.waiting_code == TOO_LARGE else None
        return TOO_LARGE, {"most": capacity.nodes_ever(resources), "since": seen or timezone.now().isoformat()}
    free = capacity.nodes_now(resources)
    if free >= job.least_nodes and not reserved:
        return None
    return "reserved" if free >= job.least_nodes else "capacity", {"free": free}


def _vanished(attempt: Attempt) -> None:
    """The backend knows no such run: it was never handed over, or it is lost with its node."""
    job = attempt.job
    if job.state == JobState.STOPPING:
        # One that ran was lost while it was being stopped, at a time nobody knows: that is the platform's fault.
        _end(attempt, EndReason.NODE_LOST if attempt.started_at else EndReason.CANCELLED)
    elif attempt.submitted_at is None and job.state == JobState.STARTING:
        submit(attempt)
    else:
        _end(attempt, EndReason.NODE_LOST, cause(Cause.VANISHED, "The cluster no longer knows this run."))


def _end(attempt: Attempt, reason: EndReason, failure: dict[str, Any] | None = None, *, final: bool = False) -> None:
    with transaction.atomic():
        locked = lifecycle.lock(attempt)
        if locked and locked.finished_at is None and not locked.job.is_ended:
            lifecycle.end_attempt(attempt=locked, reason=reason, failure=failure, final=final)


def _stop_if_unwanted(attempt: Attempt) -> None:
    """A cancel may have come between the claim and the submit."""
    attempt.job.refresh_from_db(fields=["state"])
    if JobState(attempt.job.state) in {JobState.STOPPING} | ENDED:
        _quietly_stop(attempt.run_name)


def forget_runs() -> None:
    """Remove what ended runs left at the backend, once it is old, and runs that no row knows of."""
    oldest = timezone.now() - KEEP_RUNS
    try:
        for name, attempt in _held_runs(live=False):
            if attempt is None:
                _remove_unknown(name)
            elif attempt.finished_at and attempt.finished_at < oldest:
                cluster().delete(name)
                cluster().delete_checkpoints(_checkpoint_key(attempt.job_id))
    except BackendUnavailable:
        return  # there is a next time


def _sweep_runs() -> None:
    """End runs that go on though their attempt has ended, however long ago, or is unknown."""
    try:
        for name, attempt in _held_runs(live=True):
            if attempt is None:
                _remove_unknown(name)
            elif attempt.finished_at:
                _quietly_stop(name)
    except BackendUnavailable:
        return  # there is a next sweep


def _held_runs(*, live: bool) -> list[tuple[str, Attempt | None]]:
    names = [name for name in cluster().names(live=live) if name.startswith("job-")]
    known = {attempt.run_name: attempt for attempt in _attempts_named(names)} if names else {}
    return [(name, known.get(name)) for name in names]


def _remove_unknown(name: str) -> None:
    logger.warning("The cluster has a run %s that no row knows of: it is removed.", name)
    cluster().delete(name)


def _checkpoint_key(job_pk: int) -> str:
    """All attempts at a job share its checkpoints."""
    return f"job-{job_pk}"


def _quietly_stop(name: str) -> None:
    """Stop a run if it is there. Where the backend doesn't answer, the next sweep asks again."""
    try:
        if cluster().describe(name).phase is not RunPhase.ENDED:
            cluster().stop(name, GRACE_SECONDS)
    except (RunNotFound, BackendUnavailable):
        return


def _attempts_named(names: Iterable[str]) -> QuerySet[Attempt]:
    job_ids = {int(part[1]) for name in names if len(part := name.split("-")) == 3 and part[1].isdecimal()}
    return Attempt.objects.filter(job_id__in=job_ids)
