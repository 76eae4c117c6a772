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
from django.db.models import QuerySet, Sum
from django.utils import timezone

from console.accounts.hints import hint
from console.accounts.models import Quota
from jobs import lifecycle, telemetry
from jobs.backend import cluster, image_of, resources_of
from jobs.bell import publish_state
from jobs.errors import StaleTransition
from jobs.models import Attempt, Job
from jobs.states import ACTIVE, ENDED, EndReason, JobState
from runtime.errors import BackendUnavailable, InvalidSpec, NoCapacity, RunNotFound
from runtime.specs import Capacity, Framework, RunPhase, RunSpec, RunStatus
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
STRAY_AGE = timedelta(hours=1)
TOO_LARGE = "too_large"


def dispatch_queue() -> None:
    """Start every waiting job that may start, oldest first, and write down why each other one waits."""
    queued = Job.objects.filter(state=JobState.QUEUED).order_by("queued_at", "id")
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
        blocked = _blocked_by_quota(job, running) or _blocked_by_capacity(job, capacity, reserved=reserved)
        if blocked is None:
            _start_guarded(job)
            capacity, running = cluster().capacity(), _running_nodes()
            continue
        code, data = blocked
        if (job.waiting_code, job.waiting_data) != (code, data):
            Job.objects.filter(pk=job.pk, state=JobState.QUEUED).update(waiting_code=code, waiting_data=data)
            publish_state(job.pk)
        if code == TOO_LARGE and timezone.now() - datetime.fromisoformat(str(data["since"])) > PATIENCE:
            lifecycle.refuse(job=job, reason=EndReason.NO_CAPACITY, detail="")
        reserved = reserved or (code == "capacity" and timezone.now() - job.queued_at > PATIENCE)


def start(job: Job) -> bool:
    """Claim a waiting job and hand it to the backend. Gives whether it was."""
    try:
        with transaction.atomic():
            # One claim of an organization at a time: two workers at once can't both take its last nodes.
            job.organization.quota = Quota.objects.select_for_update().get(organization_id=job.organization_id)
            if _blocked_by_quota(job, _running_nodes()):
                return False
            attempt = lifecycle.claim(job=job, backend=settings.RUNTIME_BACKEND)
    except StaleTransition:
        return False
    return submit(attempt)


def _start_guarded(job: Job) -> None:
    try:
        start(job)
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
        _end(attempt, reason, str(error), final=True)
        return False
    except Exception:
        if timezone.now() - attempt.claimed_at > SUBMIT_PATIENCE:
            _end(attempt, EndReason.PLATFORM_ERROR, "The platform could not start the run.")
        raise  # whoever asked logs it; the sweep tries again
    Attempt.objects.filter(pk=attempt.pk, submitted_at=None).update(submitted_at=timezone.now())
    _stop_if_unwanted(attempt)
    return True


def run_spec(attempt: Attempt) -> RunSpec:
    """The attempt as the backend needs it."""
    job = attempt.job
    versions = [item.version for item in job.job_datasets.select_related("version__dataset")]
    return RunSpec(
        name=attempt.run_name,
        framework=Framework(job.framework),
        image=image_of(job.image),
        nodes=job.nodes,
        workers_per_node=job.workers_per_node,
        resources=resources_of(job.node_spec),
        script=job.code_path,
        deadline_seconds=job.deadline_seconds,
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
        grace_seconds=min(GRACE_SECONDS, job.deadline_seconds // 4),
        checkpoint_key=_checkpoint_key(job.pk),
        labels={"organization": job.organization.slug, "job": str(job.pk)},
    )


def reconcile_job(*, job_pk: int) -> None:
    """Bring one job up to what the backend says of its run."""
    job = Job.objects.select_related("node_spec", "image", "workspace", "organization").filter(pk=job_pk).first()
    attempt = lifecycle.open_attempt(job) if job else None
    if job is None or attempt is None:
        return
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
    _observe(attempt, status)


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
            hint(measure_workspace, job.workspace_id)


def _running_nodes() -> dict[int, int]:
    """Nodes in use by organization."""
    rows = Job.objects.filter(state__in=ACTIVE).order_by().values_list("organization_id").annotate(total=Sum("nodes"))
    return dict(rows)


def _blocked_by_quota(job: Job, running_nodes: Mapping[int, int]) -> tuple[str, dict[str, Any]] | None:
    most, running = job.organization.quota.max_running_nodes, running_nodes.get(job.organization_id, 0)
    return ("quota", {"running": running, "most": most}) if running + job.nodes > most else None


def _blocked_by_capacity(job: Job, capacity: Capacity, *, reserved: bool) -> tuple[str, dict[str, Any]] | None:
    resources = resources_of(job.node_spec)
    if not capacity.fits_ever(resources, job.nodes):
        # The cluster has shrunk since the order. It may grow again; until then nothing is kept free for this job.
        seen = job.waiting_data.get("since") if job.waiting_code == TOO_LARGE else None
        return TOO_LARGE, {"most": capacity.nodes_ever(resources), "since": seen or timezone.now().isoformat()}
    free = capacity.nodes_now(resources)
    if free >= job.nodes and not reserved:
        return None
    return "reserved" if free >= job.nodes else "capacity", {"free": free}


def _vanished(attempt: Attempt) -> None:
    """The backend knows no such run: it was never handed over, or it is lost with its node."""
    job = attempt.job
    if job.state == JobState.STOPPING:
        # One that ran was lost while it was being stopped, at a time nobody knows: that is the platform's fault.
        _end(attempt, EndReason.NODE_LOST if attempt.started_at else EndReason.CANCELLED, "")
    elif attempt.submitted_at is None and job.state == JobState.STARTING:
        submit(attempt)
    else:
        _end(attempt, EndReason.NODE_LOST, "The cluster no longer knows this run.")


def _end(attempt: Attempt, reason: EndReason, detail: str, *, final: bool = False) -> None:
    with transaction.atomic():
        locked = lifecycle.lock(attempt)
        if locked and locked.finished_at is None and not locked.job.is_ended:
            lifecycle.end_attempt(attempt=locked, reason=reason, detail=detail, final=final)


def _stop_if_unwanted(attempt: Attempt) -> None:
    """A cancel may have come between the claim and the submit."""
    attempt.job.refresh_from_db(fields=["state"])
    if JobState(attempt.job.state) in {JobState.STOPPING} | ENDED:
        _quietly_stop(attempt.run_name)


def _sweep_runs() -> None:
    """End runs whose attempt has ended or is unknown, and forget those that are old."""
    try:
        names = cluster().names()
        known = {attempt.run_name: attempt for attempt in _attempts_named(names)}
        for name in names:
            _sweep_run(name, known.get(name))
    except BackendUnavailable:
        return  # there is a next sweep


def _sweep_run(name: str, attempt: Attempt | None) -> None:
    now = timezone.now()
    if attempt is None:
        if name.startswith("job-"):
            logger.warning("The cluster has a run %s that no row knows of: it is removed.", name)
            cluster().delete(name)
    elif attempt.finished_at and now - attempt.finished_at > KEEP_RUNS:
        cluster().delete(name)
        cluster().delete_checkpoints(_checkpoint_key(attempt.job_id))
    elif attempt.finished_at and now - attempt.finished_at < STRAY_AGE:
        _quietly_stop(name)


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
