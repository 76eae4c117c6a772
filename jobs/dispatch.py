"""Between the queue and the cluster: what starts next, what became of what runs, what is left behind.

Hides when to ask the backend and what its answers mean. The one rule: no call to the backend happens inside a database
transaction, and every step can be done again: a claim is compare-and-set, a run's name is its attempt's, submit adopts.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone

from console.accounts.hints import hint
from console.operations import context, tracing
from console.operations.kept import Kept, given
from jobs import bell, clusters, lifecycle, queue, telemetry, traces, usage
from jobs.backend import cluster, cluster_named, cluster_names, image_of, resources_of
from jobs.errors import StaleTransition
from jobs.handover import Handover, guarded
from jobs.models import Attempt, Job, JobDataset
from jobs.sentences import Cause, cause
from jobs.states import ACTIVE, ENDED, EndReason, JobState, OnHang
from runtime.errors import BackendUnavailable, InvalidSpec, NoCapacity, RunNotFound
from runtime.specs import Controller, Framework, PullSecret, RunPhase, RunSpec, RunStatus
from storage import mounts, registries
from storage.tasks import measure_workspace

logger = logging.getLogger(__name__)

GRACE_SECONDS = 10
WORKSPACE_TARGET = "/workspace"
DATASETS_TARGET = "/datasets"
SUBMIT_PATIENCE = timedelta(minutes=5)
"""A fault that nobody foresaw is tried again this long; then the attempt ends, free of charge."""
KEEP_RUNS = timedelta(days=30)
"""Logs and results of an ended run are kept at the backend this long."""
HANG_SECONDS = 120
"""A run that shows no sign of progress for as long has hung; the launcher may be sure sooner."""
SWEEP_SECONDS = 20.0
"""A sweep of a cluster that answers slowly looks at no more jobs after this long; which ones is chance."""


def _names(attempt: Attempt, **_options: Any) -> dict[str, str | int]:
    """What log lines and spans say of the attempt that is worked on."""
    return {"job": attempt.job_id, "run": attempt.run_name, "cluster": attempt.backend}


def dispatch_queue(cluster_name: str = "") -> None:
    """Start every waiting job that may start, oldest first on its cluster; and say why the others wait."""
    for name, node_specs in queue.waiting_specs(cluster_name).items():
        try:
            _start_what_fits(name, queue.Pass(node_specs, cluster(name).capacity()))
        except BackendUnavailable:
            queue.does_not_answer(node_specs)


def _start_what_fits(name: str, waiting: queue.Pass) -> None:
    with Handover(submit, at_once=cluster(name).submits_at_once) as handover:
        for job, nodes in waiting.startable():
            attempt = guarded(_claim, job.pk, job, nodes)
            if attempt is not None and handover.take(attempt):
                waiting.take(job, nodes)
            else:
                handover.settle()
                waiting.refresh(cluster(name).capacity())
        if not handover.settle():
            waiting.refresh(cluster(name).capacity())
    waiting.close()


def start(job: Job, nodes: int | None = None) -> bool:
    """Claim a waiting job for `nodes` nodes (all that were bought) and hand it to the backend. Gives whether it was."""
    attempt = _claim(job, nodes)
    return attempt is not None and submit(attempt)


def _claim(job: Job, nodes: int | None) -> Attempt | None:
    """The job's next attempt; None where somebody else has it, or its quota has no room."""
    try:
        with transaction.atomic():
            # One claim of an organization at a time: two workers at once can't both take its last nodes.
            job.organization.quota = queue.locked_quota(job.organization)
            room = queue.room_in_quota(job, queue.running_nodes(job.organization))
            if room < job.least_nodes:
                return None
            granted = min(nodes or job.nodes, room)
            return lifecycle.claim(job=job, backend=cluster_named(job.node_spec.cluster), nodes=granted)
    except StaleTransition:
        return None


@context.about(_names)
def submit(attempt: Attempt) -> bool:
    """Hand an attempt to the backend; one that it knows already is adopted. Gives whether the backend has it."""
    try:
        with tracing.span("dispatch.submit", parent=attempt.job.traceparent, attributes=traces.facts_of(attempt)):
            cluster(attempt.backend).submit(run_spec(attempt))
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
    versions = [item.version for item in _DATASETS.all(job=job)]
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
        node_kind=job.node_spec.name,
        organization_nodes=job.organization.quota.max_running_nodes,
        pull_secret=_pull_secret(job),
        traceparent=traces.place_of(attempt),
    )


def _pull_secret(job: Job) -> PullSecret | None:
    """What the customer stored for the registry of an image of their own."""
    if job.image.is_builtin:
        return None
    registry = registries.registry_for(organization=job.organization, reference=job.image.reference)
    if registry is None or not registry.username:
        return None
    return PullSecret(registry.host, registry.username, registries.password_of(registry))


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
    named = _named(run_name)
    attempt = _OPEN.first(**named) if named else None
    if attempt:
        _reconcile(attempt, reads=True)


@context.about(_names)
def _reconcile(attempt: Attempt, *, reads: bool = False) -> None:
    job = attempt.job
    try:
        status = cluster(attempt.backend).describe(attempt.run_name)
    except BackendUnavailable:
        return
    except RunNotFound:
        _vanished(attempt)
        dispatch_queue(cluster_named(attempt.backend))
        return
    if job.state == JobState.STOPPING and status.phase in {RunPhase.STARTING, RunPhase.RUNNING}:
        _quietly_stop(attempt.backend, attempt.run_name)
    if status.phase is RunPhase.ENDED:
        telemetry.ingest_all(attempt=attempt)
    elif reads:
        telemetry.ingest(attempt=attempt)
    _observe(attempt, status)


def _open_attempts() -> QuerySet[Attempt]:
    """Attempts that the backend may be running."""
    return Attempt.objects.filter(finished_at=None, job__state__in=ACTIVE).select_related("job")


_OPEN = Kept(lambda: _open_attempts().filter(job=given("job_id"), number=given("number")))
_DATASETS = Kept(lambda: JobDataset.objects.filter(job=given("job")).select_related("version__dataset"))
_STATE = Kept(lambda: Job.objects.filter(pk=given("pk")).values_list("state"))
_USERS = Kept(lambda: Job.objects.filter(workspace=given("workspace")).exclude(state__in=ENDED))


def _named(run_name: str) -> dict[str, int]:
    """The attempt that a run's name tells; empty for a stranger's."""
    parts = run_name.split("-")
    if len(parts) != 3 or parts[0] != "job" or not (parts[1].isdecimal() and parts[2].isdecimal()):
        return {}
    return {"job_id": int(parts[1]), "number": int(parts[2])}


def reconcile(cluster_name: str = "") -> None:
    """The sweep: every open job, then the queue, then what no row knows of; of every cluster or of one.

    One sweep of a cluster at a time: another that comes meanwhile leaves it to the first.
    """
    for name in [cluster_name] if cluster_name else clusters.to_sweep():
        with clusters.only_sweep(name) as is_mine:
            if is_mine:
                _sweep(name)


def _sweep(name: str) -> None:
    begun = time.monotonic()
    opened = list(Attempt.objects.filter(clusters.on(name), finished_at=None, job__state__in=ACTIVE).values_list("job"))
    random.shuffle(opened)
    for (pk,) in opened:
        try:
            reconcile_job(job_pk=pk)
        except Exception:
            # One job's fault, whatever it is, must not keep the sweep from the others.
            logger.exception("Job %s could not be reconciled; the next sweep tries again.", pk)
        if time.monotonic() - begun > SWEEP_SECONDS:
            logger.warning("The cluster %s answers slowly: the next sweep goes on.", name)
            break
    dispatch_queue(name)
    _sweep_runs(name)
    clusters.report(name)


def stop(*, job_pk: int) -> None:
    """Ask the backend to end a job's run, and take in what it says."""
    attempt = Attempt.objects.filter(job_id=job_pk, job__state=JobState.STOPPING, finished_at=None).last()
    if attempt:
        try:
            cluster(attempt.backend).stop(attempt.run_name, GRACE_SECONDS)
        except BackendUnavailable:
            return  # the sweep asks again
        reconcile_job(job_pk=job_pk)


def _observe(attempt: Attempt, status: RunStatus) -> None:
    with transaction.atomic():
        job = lifecycle.observe(attempt=attempt, status=status)
        if job.is_ended or job.state == JobState.QUEUED:
            transaction.on_commit(lambda: _wake_queue(cluster_named(attempt.backend)))
            if not _USERS.exists(workspace=job.workspace_id):  # the last one to end has the workspace measured
                hint(measure_workspace, job.workspace_id)


def _wake_queue(name: str) -> None:
    """There is room on a cluster: have what waits for it started by whoever hears of it, or else here."""
    if not bell.ring_queue(name):
        dispatch_queue(name)


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
    (state,) = _STATE.get(pk=attempt.job_id)
    if JobState(state) in {JobState.STOPPING} | ENDED:
        _quietly_stop(attempt.backend, attempt.run_name)


def forget_runs() -> None:
    """Remove what ended runs left at their clusters, once it is old, and runs that no row knows of."""
    for name in clusters.to_sweep():
        try:
            _forget_runs(name)
        except BackendUnavailable:
            continue  # there is a next time


def _forget_runs(name: str) -> None:
    oldest = timezone.now() - KEEP_RUNS
    for run_name, attempt in _held_runs(name, live=False):
        if attempt is None:
            _remove_unknown(name, run_name)
        elif attempt.finished_at and attempt.finished_at < oldest:
            cluster(name).delete(run_name)
            cluster(name).delete_checkpoints(_checkpoint_key(attempt.job_id))


def _sweep_runs(name: str) -> None:
    """End runs that go on though their attempt has ended, however long ago, or is unknown. Notes whether it answers."""
    try:
        for run_name, attempt in _held_runs(name, live=True):
            if attempt is None:
                _remove_unknown(name, run_name)
            elif attempt.finished_at:
                _quietly_stop(name, run_name)
    except BackendUnavailable as error:
        clusters.note(name=name, answers=False, detail=str(error))  # there is a next sweep
    else:
        clusters.note(name=name, answers=True)


def _held_runs(name: str, *, live: bool) -> list[tuple[str, Attempt | None]]:
    """The runs that a cluster holds, each with its attempt; None where that is another cluster's, or nobody's.

    Runs whose cluster settings no longer name are left out: this may be the same one under a new name.
    """
    names = [run_name for run_name in cluster(name).names(live=live) if run_name.startswith("job-")]
    known = {attempt.run_name: attempt for attempt in _attempts_named(names)} if names else {}
    homes = {run_name: cluster_named(attempt.backend) for run_name, attempt in known.items()}
    return [
        (run_name, known[run_name] if homes.get(run_name) == name else None)
        for run_name in names
        if homes.get(run_name, name) in {name, *cluster_names()}
    ]


def _remove_unknown(name: str, run_name: str) -> None:
    logger.warning("The cluster %s has a run %s that no row knows of: it is removed.", name, run_name)
    cluster(name).delete(run_name)


def _checkpoint_key(job_pk: int) -> str:
    """All attempts at a job share its checkpoints."""
    return f"job-{job_pk}"


def _quietly_stop(name: str, run_name: str) -> None:
    """Stop a run if it is there. Where the cluster doesn't answer, the next sweep asks again."""
    try:
        if cluster(name).describe(run_name).phase is not RunPhase.ENDED:
            cluster(name).stop(run_name, GRACE_SECONDS)
    except (RunNotFound, BackendUnavailable):
        return


def _attempts_named(run_names: Iterable[str]) -> QuerySet[Attempt]:
    job_ids = {int(part[1]) for each in run_names if len(part := each.split("-")) == 3 and part[1].isdecimal()}
    return Attempt.objects.filter(job_id__in=job_ids)
