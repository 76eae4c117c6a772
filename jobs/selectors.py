"""Read jobs for pages and API: lists of jobs, and a job's events, curves, nodes, output and environment.

While a cluster does not answer, output, resource usage and stacks of its runs are empty, so that pages still work.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from operator import itemgetter
from typing import Any, NamedTuple

from django.db.models import Case, Count, F, OuterRef, Q, QuerySet, Subquery, Sum, When
from django.db.models.functions import Coalesce
from django.utils import timezone
from django.utils.translation import gettext as _

from billing.models import Quote, Receipt
from console.accounts.models import Organization
from console.core.errors import NotFound
from jobs import clusters, resource_usage, results, usage, waiting
from jobs.clusters import cluster, cluster_names, resolved_name
from jobs.messages import (
    efficiency_sentence,
    end_sentence,
    event_sentence,
    failure_sentence,
    join_sentences,
    operator_stop_sentence,
    retry_sentence,
    starting_sentence,
    straggler_sentence,
    unanswered_sentence,
    waiting_sentence,
)
from jobs.models import Attempt, Job, JobEvent, MetricPoint, Product
from jobs.purchase import FREE_ESTIMATE_MARK
from jobs.run_specs import run_spec
from jobs.states import ACTIVE, ENDED, OPEN, EndReason, JobState, pays_for_hang
from runtime.errors import RuntimeFault
from runtime.specs import Capacity, LogChunk
from storage.models import Allocation

LOG_BYTES = 65536
"""Bytes of a log in one response, unless the request names another number: several hundred lines."""
SEARCH_STEP_BYTES = 1 << 20
"""Bytes of a log that a search reads at a time and holds in memory."""
SEARCH_BYTES = 64 << 20
"""Bytes of a log that one request searches: all of the largest log on shared storage. A longer log, which a cluster
without shared storage may have, needs several requests."""
MAX_CHARACTER_BYTES = 4
"""Bytes of the longest UTF-8 character, which may be cut off at the end of a chunk."""
ERRORS = (
    "Traceback (most recent call last)", "Error: ", "Exception: ", "FATAL", "CRITICAL", "Segmentation fault",
)  # fmt: skip
"""Texts that mark an error in a log: from Python's tracebacks, from loggers, and from crashed programs. Colon and space
follow the name of an exception in a traceback, so a word such as `ErrorHandler` does not match."""
POINTS_SHOWN = 1000
"""Points per curve in one response. Longer curves are thinned evenly; a chart has fewer pixels than this."""


def products() -> QuerySet[Product]:
    """Return the products on offer."""
    return Product.objects.filter(is_active=True)


def jobs_for(organization: Organization) -> QuerySet[Job]:
    """Return an organization's jobs, newest first, with their related rows.

    A queued job also has `ahead` and `running_nodes`. `ahead` is the number of queued jobs before it on its cluster, of
    any organization. `running_nodes` is the number of nodes that its organization runs. Both are 0 for other jobs.
    """
    # A subquery must return one row. All its jobs have the same state, so grouping by the state gives one: the count.
    queued_before = (
        Job.objects.filter(state=JobState.QUEUED)
        .filter(Q(queued_at__lt=OuterRef("queued_at")) | Q(queued_at=OuterRef("queued_at"), pk__lt=OuterRef("pk")))
        .order_by()
        .values("state")
        .annotate(count=Count("pk"))
        .values("count")
    )
    if len(cluster_names()) > 1:  # the only cluster runs all jobs, also those whose node specs do not name it
        own_cluster = resolved_name("node_spec__cluster")
        queued_before = queued_before.alias(cluster_name=own_cluster).filter(cluster_name=OuterRef("cluster_name"))
    running = (
        Attempt.objects.filter(finished_at=None, job__organization=OuterRef("organization"), job__state__in=ACTIVE)
        .order_by()
        .values("job__organization")
        .annotate(total=Sum("granted_nodes"))
        .values("total")
    )
    return (
        _jobs_with_relations(organization)
        .alias(cluster_name=resolved_name("node_spec__cluster"))
        .annotate(
            ahead=Case(When(state=JobState.QUEUED, then=Coalesce(Subquery(queued_before), 0)), default=0),
            running_nodes=Case(When(state=JobState.QUEUED, then=Coalesce(Subquery(running), 0)), default=0),
        )
        .order_by("-id")
    )


def job_for(organization: Organization, pk: int) -> Job:
    """Return a job of the organization. Raises NotFound."""
    # Not `first`: it would add an ORDER BY, for which Django hashes each of the 150 columns.
    try:
        job = _jobs_with_relations(organization).get(pk=pk)
        # Only a queued job needs the annotations of `jobs_for`, which are a third of the cost of that query.
        return jobs_for(organization).get(pk=pk) if job.state == JobState.QUEUED else job
    except Job.DoesNotExist as error:
        raise NotFound from error


def _jobs_with_relations(organization: Organization) -> QuerySet[Job]:
    """Return an organization's jobs with their related rows, without annotations.

    `organization.jobs` sets `job.organization` without a join: each join costs PostgreSQL time for planning.
    """
    return organization.jobs.select_related(
        "order__hold", "order__quote", "order__product", "order__placed_by", "node_spec__capacity_snapshot",
        "image", "workspace", "trial",
    )  # fmt: skip


def jobs_with_files(organization: Organization, limit: int) -> QuerySet[Job]:
    """Return the ended trainings among the latest `limit` jobs with kept files, newest first, with ids and names."""
    allocations = Allocation.objects.filter(organization=organization, kind=Allocation.Kinds.RUN).order_by("-pk")
    with_files = [row.job_pk for row in allocations.only("kind", "key")[:limit]]
    jobs = Job.objects.filter(organization=organization, pk__in=with_files)
    # A built-in script runs image checks and notebooks, which are no trainings.
    return jobs.filter(state__in=ENDED, builtin_script="").order_by("-pk").only("name")


def job_without_relations(organization: Organization, pk: int) -> Job:
    """Return a job without its related objects except the organization: enough to read its output. Raises NotFound."""
    job = Job.objects.filter(organization=organization, pk=pk).first()
    if job is None:
        raise NotFound
    job.organization = organization  # saves a query
    return job


def refresh_job(job: Job) -> Job:
    """Return a job from `job_for` with its columns read again and its related objects reused. Raises NotFound."""
    fresh = (
        Job.objects.filter(pk=job.pk)
        .annotate(
            held_minor=F("order__hold__amount_minor"),
            metered_minor=F("order__hold__metered_minor"),
            cluster_answers=F("node_spec__capacity_snapshot__answers"),
        )
        .first()
    )
    snapshot = waiting.snapshot_of(job)
    if fresh is None or fresh.state == JobState.QUEUED or (snapshot is None and fresh.cluster_answers is not None):
        # The annotations of a queued job depend on other jobs. If the first snapshot is new, `job` lacks it.
        return job_for(job.organization, job.pk)
    fresh.organization, fresh.order = job.organization, job.order
    fresh.node_spec, fresh.image, fresh.workspace = job.node_spec, job.image, job.workspace
    # The extension of a notebook raises `amount_minor`.
    fresh.order.hold.amount_minor, fresh.order.hold.metered_minor = fresh.held_minor, fresh.metered_minor
    if snapshot is not None:
        snapshot.answers = fresh.cluster_answers
    return fresh


def attempts_of(job: Job) -> list[Attempt]:
    """Return the job's attempts in order."""
    return list(Attempt.objects.filter(job=job))


def open_jobs(organization: Organization) -> QuerySet[Job]:
    """Return the organization's jobs that have not ended, as `jobs_for` does."""
    return jobs_for(organization).filter(state__in=OPEN)


@dataclass(frozen=True)
class OpenTotals:
    """Numbers of an organization's open jobs and of their nodes."""

    running: int
    """Jobs that run, start or stop."""
    running_nodes: int
    """Nodes that these jobs bought. An elastic run may have fewer."""
    waiting: int


def open_totals(organization: Organization) -> OpenTotals:
    """Return how many jobs run and wait, and how many nodes the running jobs bought."""
    open_jobs = Job.objects.filter(organization=organization, state__in=OPEN).order_by()
    totals = open_jobs.values_list("state").annotate(Count("pk"), Sum("nodes"))
    return OpenTotals(
        running=sum(count for state, count, _nodes in totals if state in ACTIVE),
        running_nodes=sum(nodes for state, _count, nodes in totals if state in ACTIVE),
        waiting=sum(count for state, count, _nodes in totals if state == JobState.QUEUED),
    )


def waiting_for(job: Job) -> str:
    """Return why a queued or starting job waits, with its place in the queue; empty in other states.

    `job` comes from `job_for` or `jobs_for`.
    """
    if job.state == JobState.STARTING and not waiting.cluster_answers(job):
        return unanswered_sentence()
    if job.state == JobState.STARTING:
        return starting_sentence(job.waiting_code, job.waiting_data, has_cost=cost_minor(job) > 0)
    if job.state != JobState.QUEUED:
        return ""
    reason = waiting.waiting_reason(job)
    sentence = waiting_sentence(
        reason.code,
        reason.data,
        nodes=job.least_nodes,
        spec=job.node_spec.title,
        ahead=job.ahead,  # type: ignore[attr-defined]  # an annotation of `jobs_for`
    )
    if job.waiting_code in waiting.RETRY_CODES and reason.code != job.waiting_code:
        # A retry that waits for something else, such as capacity, has both sentences.
        return join_sentences(retry_sentence(job.waiting_data), sentence)
    return sentence


def title_of(job: Job, *, is_free_estimate: bool | None = None) -> str:
    """Return a job's name as pages show it. Names of checks and free estimates are in the reader's language.

    `is_free_estimate` None: read it from the quote, which may cost a query.
    """
    if job.is_check:
        return _("Check of %(image)s") % {"image": job.image.name}
    if is_free_estimate or (is_free_estimate is None and measures_purchase(job)):
        return _("Free estimate of %(script)s") % {"script": job.code_path.rsplit("/", 1)[-1]}
    return job.name


def measures_purchase(job: Job) -> bool:
    """Whether the job is a free estimate. Reads its quote, which may cost a query."""
    return FREE_ESTIMATE_MARK in job.order.quote.purchase


def cost_minor(job: Job) -> int:
    """Return the job's cost so far in minor units; its final cost if it has ended."""
    return job.order.hold.metered_minor


def progress(job: Job, *, p50_seconds: float) -> dict[str, Any]:
    """Return a job's progress: `fraction` 0..1, epochs, and the estimated seconds left (None if unknown).

    `p50_seconds` is the time that the job's quote estimated.
    """
    return {
        "fraction": round(job.progress, 4),
        "epoch": job.epoch,
        "epochs": job.epochs,
        "eta_seconds": _eta_seconds(job, p50_seconds),
    }


def summary(job: Job, attempts: Sequence[Attempt] | None = None) -> dict[str, Any]:
    """Return a job as the API shows it. A caller that has the attempts passes them, which saves a query."""
    attempts = list(job.attempts.all()) if attempts is None else attempts
    return {
        "id": job.pk,
        "name": job.name,
        "tags": job.tags,
        "notes": job.notes,
        # A job that has not ended has no deletion time yet, but the customer may have chosen a time.
        "keep_until": results.deletion_time(job) or job.keep_until,
        "state": job.state,
        "reason": job.reason,
        "detail": _detail(job, attempts),
        "sentence": end_sentence(
            job.reason,
            is_hang_charged=pays_for_hang(attempts[-1].failure if attempts else None),
            is_free=cost_minor(job) == 0,
            is_notebook=job.is_notebook,
        ),
        "waiting_for": waiting_for(job),
        # `basis` is the stored estimate.
        "progress": progress(job, p50_seconds=float(job.order.quote.basis["p50_seconds"])),
        "attempts": [_attempt(job, attempt) for attempt in attempts],
        "queued_at": job.queued_at,
        "started_at": job.started_at,
        "finished_at": job.finished_at,
        "currency": job.order.quote.currency,
        "cost_minor": cost_minor(job),
        "ceiling_minor": job.order.hold.amount_minor,
        "deadline_seconds": job.deadline_seconds,
        "product": job.order.product.name,
        "framework": job.framework,
        "image": job.image.name,
        "image_digest": job.image_digest,
        "workspace": job.workspace.name,
        "code_path": job.code_path,
        "arguments": job.arguments,
        "requirements": job.requirements_path,
        "datasets": datasets_of(job.order.quote),
        "models": models_of(job.order.quote),
        "environment": job.environment,
        "secrets": job.secrets,
        "local_rank_argument": job.local_rank_argument,
        "epochs": job.epochs,
        "lr": job.lr,
        "lr_scaling": job.lr_scaling,
        "warmup_epochs": job.warmup_epochs,
        "batch_size": job.batch_size,
        "node_spec": job.node_spec.name,
        "nodes": job.nodes,
        "workers_per_node": job.workers_per_node,
        "rerun_of": job.rerun_of_id,
        "from_checkpoint": job.from_checkpoint_id,
        "retries": job.retries,
        "retry_backoff_seconds": job.retry_backoff_seconds,
        "on_hang": job.on_hang,
        "min_nodes": job.min_nodes,
        "controller": job.controller,
        "collective_timeout_seconds": job.collective_timeout_seconds,
        "stall_check_seconds": job.stall_check_seconds,
        "not_before": job.not_before,
    }


def models_of(quote: Quote) -> list[str]:
    """Return the model versions of a quote as `name@number`."""
    return list(quote.purchase.get("resolved_models", ()))


def datasets_of(quote: Quote) -> list[str]:
    """Return the dataset versions of a quote as `name@number`. A quote of version 0.2.0 has only the names."""
    return list(quote.purchase.get("resolved_datasets", quote.purchase.get("datasets", ())))


@dataclass(frozen=True)
class EventRow:
    """An event with its sentence."""

    event: JobEvent
    sentence: str


def events(job: Job) -> list[EventRow]:
    """Return the job's events in order."""
    rows = list(job.events.select_related("actor"))
    # `costs_nothing`: nothing can be charged. `is_free`: nothing was charged, for example after a platform fault.
    costs_nothing = job.order.quote.ceiling_minor == 0
    is_free = costs_nothing or any(event.kind == "settled" and not event.data["total_minor"] for event in rows)
    return [
        EventRow(
            event,
            event_sentence(
                event.kind, event.data, is_free=is_free, costs_nothing=costs_nothing, is_notebook=job.is_notebook
            ),
        )
        for event in rows
    ]


class Metrics(NamedTuple):
    """Points of a job's curves by name, and the id of the last point that was read.

    A curve is a list of [step, value], sorted by step. If the script restarts its count of steps, the steps continue
    (`MetricPoint.position`).
    """

    curves: dict[str, list[list[float]]]
    last: int


def metrics(job: Job, after: int = 0) -> Metrics:
    """Return the curves of a job from points with an id above `after`. `last` is `after` if there are none."""
    curves: dict[str, list[list[float]]] = {}
    last = after
    points = MetricPoint.objects.filter(job=job, pk__gt=after).order_by("pk")
    for pk, name, position, value in points.values_list("pk", "name", "position", "value"):
        curves.setdefault(name, []).append([position, value])
        last = pk
    return Metrics({name: _thinned(sorted(curve, key=itemgetter(0))) for name, curve in curves.items()}, last)


def nodes(job: Job) -> list[dict[str, Any]]:
    """Return the last reported status of each node of the latest attempt, as `runtime.specs.NodeStatus`."""
    attempt = _latest_attempt(job)
    return list(attempt.nodes) if attempt else []


def environment(job: Job, rank: int = 0) -> dict[str, str]:
    """Return a rank's environment variables: the platform's and those of the order, but no secrets.

    Raises NotFound for an unknown rank.
    """
    _require_rank(job, rank)
    attempt = _latest_attempt(job)
    number = attempt.number if attempt else 1
    # The attempt is not saved. It stands for the latest attempt, or for the first one of a job that has not run yet.
    spec = run_spec(Attempt(job=job, number=number, granted_nodes=job.nodes))
    return dict(sorted({**cluster(job.node_spec.cluster).environment(spec, rank), **job.environment}.items()))


def receipt(job: Job) -> Receipt | None:
    """Return the job's receipt; None until it has ended."""
    try:
        return Receipt.objects.get(hold=job.order.hold_id)
    except Receipt.DoesNotExist:
        return None


def log(
    job: Job,
    rank: int,
    offset: int,
    attempt_number: int | None = None,
    *,
    limit: int = LOG_BYTES,
    at_line: bool = False,
    with_times: bool = False,
) -> LogChunk:
    """Return up to `limit` bytes of a rank's output from byte `offset`; a negative offset counts from the end.

    The chunk is empty before the run. `attempt_number` None: the latest attempt. `at_line`: leave out an incomplete
    line at the beginning. `with_times`: add the times of the lines. Raises NotFound for an unknown rank.
    """
    _require_rank(job, rank)
    attempt = _attempt_numbered(job, attempt_number)
    return _read_log(job, attempt, rank, offset, limit, at_line=at_line, with_times=with_times)


def logs_of_ranks(
    job: Job, offsets: Mapping[int, int], attempt_number: int | None = None, *, with_times: bool = False
) -> dict[int, LogChunk]:
    """Return a chunk of the output of each rank in `offsets`, from its offset as in `log`.

    A chunk whose offset counts from the end begins with a whole line.
    """
    attempt = _attempt_numbered(job, attempt_number)
    return {
        rank: _read_log(job, attempt, rank, offset, LOG_BYTES, at_line=offset < 0, with_times=with_times)
        for rank, offset in offsets.items()
    }


@dataclass(frozen=True)
class LogMatch:
    """Where a search of a log ended.

    `offset` is the byte where the match begins; None if there is no match. A further search begins at `next_offset`.
    `eof`: the log was searched up to its end.
    """

    offset: int | None
    next_offset: int
    eof: bool


def search_log(job: Job, rank: int, query: str, offset: int = 0, attempt_number: int | None = None) -> LogMatch:
    """Return where `query` first occurs in a rank's output from byte `offset` on, regardless of upper and lower case.

    An empty query finds the first of ERRORS. `attempt_number` None: the latest attempt. At most SEARCH_BYTES are read.
    Invalid UTF-8 before the match makes its offset some bytes too large, because each replacement character takes
    three. Raises NotFound for an unknown rank.
    """
    _require_rank(job, rank)
    attempt = _attempt_numbered(job, attempt_number)
    texts = (query,) if query else ERRORS
    longest = max(len(text) for text in texts)
    position, end = offset, offset + SEARCH_BYTES
    while position < end:
        chunk = _read_log(job, attempt, rank, position, SEARCH_STEP_BYTES)
        match = _find_first(chunk.text, texts, any_case=bool(query))
        if match is not None:
            character, length_bytes = match
            match_offset = chunk.offset + len(chunk.text[:character].encode("utf-8", "replace"))
            return LogMatch(match_offset, match_offset + length_bytes, eof=False)
        # A chunk that is not full is the last one. A full one may lack the bytes of a character at its end.
        if chunk.next_offset - chunk.offset < SEARCH_STEP_BYTES - MAX_CHARACTER_BYTES:
            # A match may begin at the end of a log that still grows.
            rest_bytes = 0 if chunk.eof else _size_of_end(chunk.text, longest - 1)
            return LogMatch(offset=None, next_offset=max(offset, chunk.next_offset - rest_bytes), eof=True)
        # Read the end of this chunk again, because a match may begin there and end in the next chunk.
        position = chunk.next_offset - _size_of_end(chunk.text, longest)
    return LogMatch(offset=None, next_offset=position, eof=False)


def _size_of_end(text: str, characters: int) -> int:
    """Return the size in bytes of the last characters of a text."""
    return len(text[-characters:].encode("utf-8", "replace")) if characters else 0


def _find_first(text: str, texts: Sequence[str], *, any_case: bool) -> tuple[int, int] | None:
    """Return the index of the first match of any of `texts`, and its length in bytes; None if there is no match.

    `str.find` is used, because it is many times as fast as a regular expression.
    """
    if any_case:
        lower = text.lower()
        if len(lower) != len(text):  # a few letters become two in lower case, so the indexes would differ
            match = re.search(re.escape(texts[0]), text, re.IGNORECASE)  # a search in any case has one text: the query
            return (match.start(), len(match[0].encode("utf-8", "replace"))) if match else None
        text, texts = lower, [each.lower() for each in texts]
    matches = [(index, len(each.encode("utf-8", "replace"))) for each in texts if (index := text.find(each)) >= 0]
    return min(matches, default=None)


def _attempt_numbered(job: Job, number: int | None) -> Attempt | None:
    """Return the job's attempt with this number, by default the latest; None if the job has no such attempt."""
    return job.attempts.filter(number=number).first() if number else job.attempts.last()


def _read_log(
    job: Job,
    attempt: Attempt | None,
    rank: int,
    offset: int,
    limit: int,
    *,
    at_line: bool = False,
    with_times: bool = False,
) -> LogChunk:
    """Return a part of a rank's output; empty without an attempt, or if the cluster does not answer."""
    times = () if with_times else None
    empty_chunk = LogChunk("", max(0, offset), eof=job.is_ended, offset=max(0, offset), times=times)
    if attempt is None:
        return empty_chunk
    try:
        return cluster(attempt.backend).logs(
            attempt.run_name, rank, offset, limit, at_line=at_line, with_times=with_times
        )
    except RuntimeFault:
        return empty_chunk


def resource_usage_data(job: Job, attempt_number: int | None = None) -> dict[str, Any]:
    """Return the resource usage of an attempt, by default the latest, as the API shows it, with sentences about it."""
    attempt_usage = resource_usage.usage_of(job, attempt_number)
    sentences = [straggler_sentence(each) for each in attempt_usage.stragglers]
    if efficiency := attempt_usage.efficiency:
        sentences.append(efficiency_sentence(efficiency))
    return {
        "attempt": attempt_usage.attempt,
        "nodes": [vars(node) for node in attempt_usage.nodes],
        "ranks": [
            {
                "rank": each.rank,
                "node": each.node,
                "cpu": each.cpu,
                "memory": each.memory,
                "steps": round(each.steps),
                "seconds_per_step": each.seconds_per_step,
                "comm_share": each.comm_share,
                "is_slow": each.rank in {slow.rank for slow in attempt_usage.stragglers},
            }
            for each in attempt_usage.ranks
        ],
        "efficiency": efficiency
        and {"value": efficiency.value, "nodes": efficiency.nodes, "job": efficiency.job_id, "by": efficiency.by},
        "sentences": sentences,
    }


def stacks(job: Job, attempt_number: int | None = None) -> list[dict[str, Any]]:
    """Return the stack of each rank of a hung attempt, by default the latest; empty if it did not hang."""
    attempt = _attempt_numbered(job, attempt_number)
    if attempt is None:
        return []
    try:
        stack_texts = cluster(attempt.backend).stacks(attempt.run_name)
    except RuntimeFault:
        return []
    return [
        {"rank": rank, "node": rank // job.workers_per_node, "text": text} for rank, text in sorted(stack_texts.items())
    ]


def capacity_now(cluster_name: str = "") -> Capacity | None:
    """Return a cluster's capacity, by default that of the first cluster; None if the cluster does not answer."""
    # The stored status is read first, because a call to a cluster that does not answer keeps the page waiting.
    return _capacity(cluster_name) if clusters.does_answer(cluster_name) else None


def capacities_now() -> dict[str, Capacity]:
    """Return the capacity of every cluster that answers, by its name."""
    unavailable = clusters.unavailable_clusters()
    capacities = {name: _capacity(name) for name in cluster_names() if name not in unavailable}
    return {name: capacity for name, capacity in capacities.items() if capacity}


def _capacity(cluster_name: str) -> Capacity | None:
    """Return what the cluster answers; None if it does not answer."""
    try:
        return cluster(cluster_name).capacity()
    except RuntimeFault:
        return None


def _latest_attempt(job: Job) -> Attempt | None:
    """Return the latest attempt, without a query if the attempts are prefetched."""
    attempts = list(job.attempts.all())
    return attempts[-1] if attempts else None


def _require_rank(job: Job, rank: int) -> None:
    """Raise NotFound if the job has no such rank."""
    if not 0 <= rank < job.nodes * job.workers_per_node:
        raise NotFound(_("Choose a rank from 0 to %(last)d.") % {"last": job.nodes * job.workers_per_node - 1})


def _detail(job: Job, attempts: Sequence[Attempt]) -> str:
    """Return the first cause of the job's failure in the reader's language, or why an administrator stopped it."""
    # A job that is cancelled, or is being cancelled, has the message of its last attempt or an administrator's reason.
    is_last_message = bool(attempts) and attempts[-1].detail == job.detail
    if job.detail and job.reason in ("", EndReason.CANCELLED) and not is_last_message:
        return operator_stop_sentence(job.detail)
    if not attempts:
        return job.detail  # a job without an attempt failed because of its packages: the installer's message
    # Without `detail`, no failure ended the job: it may have been cancelled while it waited for a retry.
    failure = attempts[-1].failure if job.detail else None
    return failure_sentence(failure) if failure else ""


def _attempt(job: Job, attempt: Attempt) -> dict[str, Any]:
    """Return an attempt as the API shows it."""
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


def _eta_seconds(job: Job, p50_seconds: float) -> int | None:
    """Estimate the seconds left: from the finished epochs, else from the quote's estimate; for a notebook its deadline.

    None if the job is not running, or has run longer than the estimate or the deadline.
    """
    if job.state != JobState.RUNNING or job.started_at is None:
        return None
    elapsed = (timezone.now() - job.started_at) / timedelta(seconds=1)
    if job.is_notebook:
        total = float(job.deadline_seconds)
    else:
        total = elapsed / job.progress if job.progress > 0 else p50_seconds
    remaining = min(total, job.deadline_seconds) - elapsed
    return math.ceil(remaining) if remaining > 0 else None


def _thinned(points: list[list[float]]) -> list[list[float]]:
    """Return every nth point, so that at most about POINTS_SHOWN remain, and always the last one."""
    if len(points) <= POINTS_SHOWN:
        return points
    stride = math.ceil(len(points) / POINTS_SHOWN)
    return [*points[:-1:stride], points[-1]]
