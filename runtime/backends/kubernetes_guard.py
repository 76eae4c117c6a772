"""Whether a run that did not come to run as one is to be taken down, and as what. PURE.

The one rule: a run holds machines only while it runs whole, or is about to. What is taken down here never ran, and so
is never paid; whose fault it was decides whether it is tried again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.backends.kubernetes_config import ClusterConfig
from runtime.backends.kubernetes_facts import JobFact, PodFact
from runtime.specs import FailureCode, Outcome, RunPhase, RunStatus, Waiting, WaitingCode

HOPELESS_SECONDS = 60.0
"""A name or credentials that a registry has refused for so long will not do."""
_IMAGE = {
    WaitingCode.IMAGE_NAME: FailureCode.IMAGE_NAME,
    WaitingCode.IMAGE_CREDENTIALS: FailureCode.IMAGE_CREDENTIALS,
    WaitingCode.IMAGE_NETWORK: FailureCode.IMAGE_NETWORK,
}


def taken_down(outcome: Outcome, code: FailureCode, message: str, at: float, **data: Any) -> dict[str, Any]:
    """What is written on a Job that is taken down; `kubernetes_outcome` reads it."""
    return {"kind": outcome.value, "code": code.value, "message": message, "at": at, "data": data}


def verdict(
    job: JobFact,
    pods: Mapping[int, PodFact],
    status: RunStatus,
    waiting: Waiting | None,
    *,
    config: ClusterConfig,
    now: float,
) -> dict[str, Any] | None:
    """Why the run is to be taken down now; None where it is to go on. `waiting` is there while it has not started."""
    if job.taken_down is not None or status.phase is RunPhase.ENDED:
        return None
    if status.started_at is not None:
        if not job.suspended:
            return None
        # Kueue takes its quota back so. It would run the same again; a new attempt is ours to begin.
        message = "The queue took the run's quota back for another."
        return taken_down(Outcome.NODE_LOST, FailureCode.PREEMPTED, message, now)
    if job.suspended or job.begun_at is None or waiting is None or job.failing:
        return None
    placed = [pod for pod in pods.values() if pod.machine]
    return _gang(job, placed, waiting, config, now) or _stuck(job, placed, waiting, config, now)


def _gang(
    job: JobFact, placed: list[PodFact], waiting: Waiting, config: ClusterConfig, now: float
) -> dict[str, Any] | None:
    late = job.begun_at is not None and now > job.begun_at + config.gang_seconds
    if not (config.gang_guard and placed and len(placed) < job.nodes and late):
        return None
    message = f"Only {len(placed)} of {job.nodes} nodes were placed in {config.gang_seconds} s. {waiting.sentence}"
    told = {"placed": len(placed), "nodes": job.nodes, "seconds": config.gang_seconds}
    code = FailureCode.NODES_NOT_PLACED
    return taken_down(Outcome.NO_CAPACITY, code, message, now, waiting_code=waiting.code.value, **told)


def _stuck(
    job: JobFact, placed: list[PodFact], waiting: Waiting, config: ClusterConfig, now: float
) -> dict[str, Any] | None:
    """Every node has its machine, and they do not run: the image, the storage, or the machine."""
    since = [pod.placed_at or pod.created_at for pod in placed if pod.started_at is None]
    hopeless = waiting.code in {WaitingCode.IMAGE_NAME, WaitingCode.IMAGE_CREDENTIALS}
    patience = HOPELESS_SECONDS if hopeless else float(config.start_seconds)
    if not since or now < max(since) + patience or (len(placed) < job.nodes and not hopeless):
        return None
    code = _IMAGE.get(waiting.code, FailureCode.NODE_NOT_STARTED)
    theirs = hopeless and not job.told.get("builtin")
    outcome = Outcome.CODE_FAILED if theirs else Outcome.PLATFORM_ERROR
    node = min(pod.node for pod in placed if pod.started_at is None)
    return taken_down(outcome, code, waiting.sentence, now, **{**waiting.data, "node": node})
