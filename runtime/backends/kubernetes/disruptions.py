"""Distinguish Pods that the Job controller deleted from those that somebody else deleted. Pure.

When one Pod of a run fails, the Job controller deletes the others. When somebody deletes one Pod, the others fail,
because their peer is gone. The first case is billed, and the second is free of charge. Afterwards both cases look
alike, and timestamps do not help, since they come from the clocks of different machines. Two sources distinguish them:

- A watch delivers the changes of all Pods in one order. `DeletionTracker` reports a Pod that was deleted before any Pod
  of its run failed.
- The Job controller records an event for each Pod that it deletes. `DeletionEvents` shows which Pods it did not delete.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from runtime.backends.kubernetes.objects import (
    TERMINAL_PHASES,
    Object,
    controller_uid,
    is_deleting,
    pod_phase,
    timestamp,
)
from runtime.backends.kubernetes.state import JobState, PodState

_EVENTS_COMPLETE_SECONDS = 3000.0
"""How long after the Job's failure its events count as complete. API servers delete events after 3600 s by default; 600
s are a reserve for differences between clocks."""
_MAX_NODES = 10
"""The largest run whose events count as complete. Kubernetes' event recorder merges similar events for one object from
the tenth on, and drops events beyond a burst of 25. Of ten Pods, the Job controller deletes nine at most, after the
tenth failed. With ten creations and the Job's failure, that is fewer than 25."""
_COMBINED_EVENTS = "(combined from similar events)"
"""How the message of merged events begins. Only the last of their own messages follows."""
_LAST_EVENT_SECONDS = 30.0
"""How long to wait for the Job controller's last event. It arrives within seconds; after 30 s it counts as dropped."""


class DeletionTracker:
    """Follows a watch of Pods and reports those that were deleted before any Pod of their run failed.

    It reports only Pods that were alive in the last list or later: a list does not show in which order earlier changes
    happened.
    """

    def __init__(self) -> None:
        self._live_pod_uids: set[str] = set()
        self._failed_job_uids: set[str] = set()

    def reset(self, pods: Iterable[Object]) -> None:
        """Start again from a list of all Pods. Jobs with a failed Pod stay known until `forget`."""
        self._live_pod_uids.clear()
        for pod in pods:
            if pod_phase(pod) == "Failed":
                self._failed_job_uids.add(controller_uid(pod))
            elif pod_phase(pod) not in TERMINAL_PHASES and not is_deleting(pod):
                self._live_pod_uids.add(pod["metadata"]["uid"])

    def observe(self, change: str, pod: Object) -> bool:
        """Process one watch event of type `change`; return True if it deletes a Pod of a run without failed Pods."""
        uid, job_uid = pod["metadata"]["uid"], controller_uid(pod)
        if pod_phase(pod) in TERMINAL_PHASES:
            self._live_pod_uids.discard(uid)
            if pod_phase(pod) == "Failed":
                self._failed_job_uids.add(job_uid)
            return False
        if change == "DELETED" or is_deleting(pod):
            was_alive = uid in self._live_pod_uids
            self._live_pod_uids.discard(uid)
            return was_alive and job_uid not in self._failed_job_uids
        self._live_pod_uids.add(uid)
        return False

    def forget(self, job_uid: str) -> None:
        """Drop the state of this Job, which has ended or was deleted."""
        self._failed_job_uids.discard(job_uid)


@dataclass(frozen=True)
class DeletionEvents:
    """What the events of a failed run show about the end of its Pods."""

    deleted_by_controller: frozenset[int] = frozenset()
    """Nodes whose Pod the Job controller deleted."""
    is_complete: bool = False
    """Whether `deleted_by_controller` has every node whose Pod the Job controller deleted."""
    wait_until: float = 0.0
    """When to stop waiting for further events, in Unix seconds; 0 if none are expected."""
    not_ready_at: Mapping[int, float] = field(default_factory=dict)
    """By node: when its machine became NotReady while the Pod was on it (Unix seconds)."""

    def deleted_externally(self, nodes: Iterable[int]) -> set[int]:
        """Return the deleted `nodes` whose Pod the Job controller did not delete; none if that is not certain."""
        return set(nodes) - self.deleted_by_controller if self.is_complete else set()

    def are_expected(self, nodes: Iterable[int], now: float) -> bool:
        """Return whether an event may still arrive for one of the deleted `nodes`. `now`: Unix seconds."""
        return now < self.wait_until and bool(set(nodes) - self.deleted_by_controller)


def unexplained_deletions(job: JobState, pods: Mapping[int, PodState]) -> set[int]:
    """Return the nodes whose Pod is deleted or being deleted, and whose status does not say why."""
    return {
        node
        for node in range(job.nodes)
        if node not in pods or (pods[node].deletion_deadline is not None and not pods[node].disruption)
    }


def event_selectors(job: JobState) -> tuple[str, str]:
    """Return the field selectors of the two lists of events that `read_events` takes, in this order."""
    return f"involvedObject.uid={job.uid}", "involvedObject.kind=Pod,reason=NodeNotReady"


def read_events(
    job: JobState, job_events: Iterable[Object], pod_events: Iterable[Object], *, now: float
) -> DeletionEvents:
    """Read the events of a run's Job, and the NodeNotReady events of any Pods in its namespace. `now`: Unix seconds."""
    pod_name = re.compile(rf"^{re.escape(job.name)}-(\d+)-[a-z0-9]+$")
    messages: dict[str, list[str]] = {}
    for event in job_events:
        at = timestamp(event.get("lastTimestamp") or event.get("eventTime"))
        # Kueue may have suspended the Job before, and so deleted its Pods. `start_time` is when Kueue resumed it.
        if at is not None and job.start_time is not None and at < job.start_time:
            continue
        messages.setdefault(str(event.get("reason")), []).append(str(event.get("message", "")))
    deletion_messages = messages.get("SuccessfulDelete", [])
    deletions = [pod_name.match(message.removeprefix("Deleted pod: ")) for message in deletion_messages]
    are_combined = any(message.startswith(_COMBINED_EVENTS) for message in deletion_messages)
    not_ready_at: dict[int, float] = {}
    for event in pod_events:
        match = pod_name.match(str((event.get("involvedObject") or {}).get("name", "")))
        at = timestamp(event.get("firstTimestamp") or event.get("eventTime"))
        # Events from before the Job's start may be about an earlier run of the same name.
        if match is not None and at is not None and (job.start_time is None or at >= job.start_time):
            node = int(match.group(1))
            not_ready_at[node] = min(at, not_ready_at.get(node, at))
    failed_at = job.failed_at or 0.0
    # `causes` uses no deletion events of an elastic run, whose Pods may fail without failing the Job.
    are_reliable = job.nodes <= _MAX_NODES and not (are_combined or job.is_elastic) and job.failed_at is not None
    # The controller records the Job's failure with the end condition, after it has deleted all Pods. `failed_at` may be
    # earlier, since the condition FailureTarget comes before the deletions.
    has_last_event = bool(job.end_condition) and job.failure_reason in messages
    return DeletionEvents(
        deleted_by_controller=frozenset(int(match.group(1)) for match in deletions if match is not None),
        is_complete=are_reliable and has_last_event and now < failed_at + _EVENTS_COMPLETE_SECONDS,
        wait_until=failed_at + _LAST_EVENT_SECONDS if are_reliable and not has_last_event else 0.0,
        not_ready_at=not_ready_at,
    )
