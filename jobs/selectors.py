"""Reads of jobs: lists, one job as the API and pages show it, its events, metrics, nodes, environment.

No write here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db.models import Case, Count, F, OuterRef, Q, QuerySet, Subquery, Sum, When
from django.db.models.functions import Coalesce
from django.utils import timezone
from django.utils.translation import gettext as _

from billing.models import Receipt
from console.accounts.errors import NotFound
from console.accounts.models import Organization
from console.operations.kept import Kept, given
from jobs import clusters, queue, samples, usage
from jobs.backend import cluster, cluster_names, image_of
from jobs.dispatch import run_spec
from jobs.models import Attempt, Job, JobEvent, MetricPoint, Product, Room
from jobs.sentences import (
    again_sentence,
    efficiency_sentence,
    end_sentence,
    event_sentence,
    failure_sentence,
    joined,
    starting_sentence,
    straggler_sentence,
    unanswered_sentence,
    waiting_sentence,
)
from jobs.states import ACTIVE, ENDED, JobState
from runtime.errors import InvalidSpec, RuntimeFault
from runtime.specs import Capacity, LogChunk
from storage.models import Image

POINTS_SHOWN = 1000
"""Points of a curve sent at once; longer curves are thinned evenly."""


def products() -> QuerySet[Product]:
    """What can be bought."""
    return Product.objects.filter(is_active=True)


def jobs_for(organization: Organization) -> QuerySet[Job]:
    """An organization's jobs, newest first, with what a list shows."""
    waiting = (
        Job.objects.filter(state=JobState.QUEUED)
        .filter(Q(queued_at__lt=OuterRef("queued_at")) | Q(queued_at=OuterRef("queued_at"), pk__lt=OuterRef("pk")))
        .order_by()
        .values("state")
        .annotate(count=Count("pk"))
        .values("count")
    )
    if len(cluster_names()) > 1:
        waiting = waiting.filter(node_spec__cluster=OuterRef("node_spec__cluster"))
    running = (
        Attempt.objects.filter(finished_at=None, job__organization=OuterRef("organization"), job__state__in=ACTIVE)
        .order_by()
        .values("job__organization")
        .annotate(total=Sum("granted_nodes"))
        .values("total")
    )
    return (
        Job.objects.filter(organization=organization)
        .annotate(
            ahead=Case(When(state=JobState.QUEUED, then=Coalesce(Subquery(waiting), 0)), default=0),
            running_nodes=Case(When(state=JobState.QUEUED, then=Coalesce(Subquery(running), 0)), default=0),
        )
        .select_related("order__hold", "order__quote", "order__product", "order__placed_by")
        .select_related("node_spec__room", "image", "workspace", "organization__quota")
        .order_by("-id")
    )


def job_for(organization: Organization, pk: int) -> Job:
    """One job. Raises NotFound, for another organization's too."""
    job = _ONE.first(organization=organization, pk=pk)
    if job is None:
        raise NotFound
    return job


def job_row(organization: Organization, pk: int) -> Job:
    """One job without what belongs to it: enough for what its runs wrote. Raises NotFound, as `job_for`."""
    job = _ROW.first(organization=organization, pk=pk)
    if job is None:
        raise NotFound
    job.organization = organization
    return job


def job_again(job: Job) -> Job:
    """A job of `job_for`'s as it is now. What can't change about it is taken over, not read. Raises NotFound."""
    now = _AGAIN.first(pk=job.pk)
    room: Room | None = getattr(job.node_spec, "room", None)
    if now is None or now.state == JobState.QUEUED or (room is None and now.cluster_answers is not None):
        return job_for(job.organization, job.pk)  # why it waits in the queue depends on others
    now.organization, now.order = job.organization, job.order
    now.node_spec, now.image, now.workspace = job.node_spec, job.image, job.workspace
    now.order.hold.metered_minor = now.metered_minor
    if room is not None:
        room.answers = now.cluster_answers
    return now


_ONE = Kept(lambda: jobs_for(given("organization")).filter(pk=given("pk")))
_ROW = Kept(lambda: Job.objects.filter(organization=given("organization"), pk=given("pk")))
_AGAIN = Kept(
    lambda: Job.objects.filter(pk=given("pk")).annotate(
        metered_minor=F("order__hold__metered_minor"), cluster_answers=F("node_spec__room__answers")
    )
)
_ATTEMPTS = Kept(lambda: Attempt.objects.filter(job=given("job")))
_POINTS = Kept(
    lambda: (
        MetricPoint.objects.filter(job=given("job"), pk__gt=given("after"))
        .order_by("pk")
        .values_list("pk", "name", "step", "value")
    )
)


def attempts_at(job: Job) -> list[Attempt]:
    """What was tried of it, the first one first."""
    return _ATTEMPTS.all(job=job)


def open_jobs(organization: Organization) -> QuerySet[Job]:
    """Jobs that have not ended."""
    return jobs_for(organization).exclude(state__in=ENDED)


def waiting_for(job: Job) -> str:
    """Why a job waits in the queue, with its place there, or what its nodes wait for; else empty. For `jobs_for`'s."""
    if job.state == JobState.STARTING and not queue.cluster_answers(job):
        return unanswered_sentence()
    if job.state == JobState.STARTING:
        return starting_sentence(job.waiting_code, job.waiting_data)
    if job.state != JobState.QUEUED:
        return ""
    code, data = queue.why(job)
    told = waiting_sentence(
        code,
        data,
        nodes=job.nodes,
        spec=job.node_spec.title,
        ahead=job.ahead,  # type: ignore[attr-defined]  # an annotation of `jobs_for`
    )
    if job.waiting_code in queue.AGAIN and code != job.waiting_code:
        return joined(again_sentence(job.waiting_data), told)
    return told


def cost_minor(job: Job) -> int:
    """What the job has cost so far, or came to."""
    return job.order.hold.metered_minor


def progress(job: Job) -> dict[str, Any]:
    """How far a job is: fraction 0..1, epochs, and the seconds it still needs where they can be told."""
    return {
        "fraction": round(job.progress, 4),
        "epoch": job.epoch,
        "epochs": job.epochs,
        "eta_seconds": _eta_seconds(job),
    }


def summary(job: Job, attempts: Sequence[Attempt] | None = None) -> dict[str, Any]:
    """A job as the API shows it; `attempts` are its, where they are at hand."""
    attempts = list(job.attempts.all()) if attempts is None else attempts
    return {
        "id": job.pk,
        "name": job.name,
        "state": job.state,
        "reason": job.reason,
        "detail": _detail(job, attempts),
        "sentence": end_sentence(job.reason),
        "waiting_for": waiting_for(job),
        "progress": progress(job),
        "attempts": [_attempt(job, attempt) for attempt in attempts],
        "queued_at": job.queued_at,
        "started_at": job.started_at,
        "finished_at": job.finished_at,
        "currency": job.order.quote.currency,
        "cost_minor": cost_minor(job),
        "ceiling_minor": job.order.quote.ceiling_minor,
        "deadline_seconds": job.deadline_seconds,
        "product": job.order.product.name,
        "framework": job.framework,
        "image": job.image.name,
        "workspace": job.workspace.name,
        "code_path": job.code_path,
        "arguments": job.arguments,
        "epochs": job.epochs,
        "lr": job.lr,
        "batch_size": job.batch_size,
        "node_spec": job.node_spec.name,
        "nodes": job.nodes,
        "workers_per_node": job.workers_per_node,
        "rerun_of": job.rerun_of_id,
        "retries": job.retries,
        "retry_backoff_seconds": job.retry_backoff_seconds,
        "on_hang": job.on_hang,
        "min_nodes": job.min_nodes,
        "controller": job.controller,
        "collective_timeout_seconds": job.collective_timeout_seconds,
        "stall_check_seconds": job.stall_check_seconds,
        "not_before": job.not_before,
    }


@dataclass(frozen=True)
class EventRow:
    """An event with its words."""

    event: JobEvent
    sentence: str


def events(job: Job) -> list[EventRow]:
    """What happened, in order."""
    rows = job.events.select_related("actor")
    return [EventRow(event, event_sentence(event.kind, event.data)) for event in rows]


def metrics(job: Job, after: int = 0) -> tuple[dict[str, list[list[float]]], int]:
    """Curves as [step, value] pairs by name, of points written after the id `after`; and the last id."""
    curves: dict[str, list[list[float]]] = {}
    last = after
    for pk, name, step, value in _POINTS.all(job=job, after=after):
        curves.setdefault(name, []).append([step, value])
        last = pk
    return {name: _thinned(sorted(points)) for name, points in curves.items()}, last


def nodes(job: Job) -> list[dict[str, Any]]:
    """What the backend last said of each node of the latest attempt."""
    attempt = job.attempts.last()
    return list(attempt.nodes) if attempt else []


def environment(job: Job, rank: int = 0) -> dict[str, str]:
    """What a rank of the job sees, by the environment contract. Raises NotFound for a rank the job hasn't."""
    _require_rank(job, rank)
    attempt = job.attempts.last()
    number = attempt.number if attempt else 1
    spec = run_spec(Attempt(job=job, number=number, granted_nodes=job.nodes))
    return dict(sorted(cluster(job.node_spec.cluster).environment(spec, rank).items()))


def receipt(job: Job) -> Receipt | None:
    """What the job came to; None until it has ended."""
    return Receipt.objects.filter(hold=job.order.hold_id).first()


def log(job: Job, rank: int, offset: int, attempt: int | None = None) -> LogChunk:
    """A piece of a rank's output. Raises NotFound for a rank the job hasn't; empty before its run begins."""
    _require_rank(job, rank)
    chosen = job.attempts.filter(number=attempt).first() if attempt else job.attempts.last()
    if chosen is None:
        return LogChunk("", offset, eof=job.is_ended)
    try:
        return cluster(chosen.backend).logs(chosen.run_name, rank, offset)
    except RuntimeFault:
        return LogChunk("", offset, eof=job.is_ended)


def telemetry(job: Job, attempt: int | None = None) -> dict[str, Any]:
    """What an attempt's nodes and ranks used, and what that means, in words; as the API shows it."""
    found = samples.telemetry(job, attempt)
    sentences = [straggler_sentence(each) for each in found.stragglers]
    if found.efficiency:
        sentences.append(efficiency_sentence(found.efficiency))
    return {
        "attempt": found.attempt,
        "nodes": [vars(node) for node in found.nodes],
        "ranks": [
            {
                "rank": each.rank,
                "node": each.node,
                "cpu": each.cpu,
                "memory": each.memory,
                "steps": round(each.steps),
                "seconds_per_step": each.seconds_per_step,
                "comm_share": each.comm_share,
                "is_slow": each.rank in {slow.rank for slow in found.stragglers},
            }
            for each in found.ranks
        ],
        "efficiency": vars(found.efficiency) if found.efficiency else None,
        "sentences": sentences,
    }


def stacks(job: Job, attempt: int | None = None) -> list[dict[str, Any]]:
    """Where each rank stood when an attempt (the latest) was found hung, by rank; empty where none was."""
    chosen = job.attempts.filter(number=attempt).first() if attempt else job.attempts.last()
    if chosen is None:
        return []
    try:
        found = cluster(chosen.backend).stacks(chosen.run_name)
    except RuntimeFault:
        return []
    return [{"rank": rank, "node": rank // job.workers_per_node, "text": text} for rank, text in sorted(found.items())]


def is_runnable(image: Image) -> bool:
    """Whether runs of an image can start on some cluster as it is; one that does not answer is believed to run it."""
    return any(_is_runnable(image, name) for name in cluster_names())


def _is_runnable(image: Image, name: str) -> bool:
    try:
        if clusters.does_answer(name):
            cluster(name).check_image(image_of(image))
    except InvalidSpec:
        return False
    except RuntimeFault:
        return True
    return True


def capacity_now(name: str = "") -> Capacity | None:
    """A cluster (the first) as it is; None where it does not answer."""
    try:
        return cluster(name).capacity() if clusters.does_answer(name) else None
    except RuntimeFault:
        return None


def capacities_now() -> dict[str, Capacity]:
    """Every cluster that answers, as it is."""
    found = {name: capacity_now(name) for name in cluster_names()}
    return {name: capacity for name, capacity in found.items() if capacity}


def _require_rank(job: Job, rank: int) -> None:
    if not 0 <= rank < job.nodes * job.workers_per_node:
        raise NotFound(_("This job has the ranks 0 to %(last)d.") % {"last": job.nodes * job.workers_per_node - 1})


def _detail(job: Job, attempts: Sequence[Attempt]) -> str:
    """The first cause of a job's end, in the reader's language."""
    failure = attempts[-1].failure if attempts and job.detail else None
    return failure_sentence(failure) if failure else ""


def _attempt(job: Job, attempt: Attempt) -> dict[str, Any]:
    now = timezone.now()
    return {
        "number": attempt.number,
        "reason": attempt.reason,
        "detail": failure_sentence(attempt.failure) if attempt.failure else "",
        "failure": attempt.failure,
        "claimed_at": attempt.claimed_at,
        "started_at": attempt.started_at,
        "finished_at": attempt.finished_at,
        "granted_nodes": attempt.granted_nodes,
        "spans": [
            {"nodes": count, "started_at": began, "finished_at": ended}
            for count, began, ended in usage.spans(attempt, attempt.finished_at or now)
        ],
        "restarts": attempt.restarts,
        "progress_at": attempt.progress_at,
        "checkpoint_at": attempt.checkpoint_at,
        "lost_seconds": usage.lost_seconds(attempt),
        "billed_seconds": usage.billable_seconds(job, [attempt], now),
    }


def _eta_seconds(job: Job) -> int | None:
    """From the epochs done, else from the quote's estimate; never past the deadline."""
    if job.state != JobState.RUNNING or job.started_at is None:
        return None
    elapsed = (timezone.now() - job.started_at) / timedelta(seconds=1)
    if job.progress > 0:
        left = elapsed * (1 - job.progress) / job.progress
    else:
        left = max(0.0, float(job.order.quote.basis["p50_seconds"]) - elapsed)
    return math.ceil(max(0.0, min(left, job.deadline_seconds - elapsed)))


def _thinned(points: list[list[float]]) -> list[list[float]]:
    if len(points) <= POINTS_SHOWN:
        return points
    stride = math.ceil(len(points) / POINTS_SHOWN)
    return [*points[:-1:stride], points[-1]]
