"""What a cluster's events tell of a run that has failed, when some of its pods are gone. PURE.

The one rule: events come late, are kept for an hour, and not each is delivered. That the Job's own controller deleted a
pod is certain where an event says so. That it did not is believed only once its last word on the Job is there, which it
says after all others, and only while none can have been left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.backends.kubernetes_facts import JobFact, seconds

Object = Mapping[str, Any]

_KEPT_SECONDS = 3000.0
"""API servers keep events for an hour, unless they are told otherwise."""
_MOST_NODES = 10
"""The tenth event of a kind about one object is told together with later ones, and the 26th of any kind not at all."""
_LATE_SECONDS = 30.0
"""So long the last word is waited for."""


@dataclass(frozen=True)
class History:
    """`deleted`: nodes whose pods the Job's controller has told to go; `whole`: no other's has it told.

    `late_until`: when whatever is not there by then is waited for no longer (Unix seconds; 0: nothing is waited for).
    `unready`: nodes whose machine was found not ready while their pod was there, and when.
    """

    deleted: frozenset[int] = frozenset()
    whole: bool = False
    late_until: float = 0.0
    unready: Mapping[int, float] = field(default_factory=dict)

    def by_others(self, nodes: Iterable[int]) -> set[int]:
        """Of nodes whose pods were told to go, or are gone: those that the Job's controller did not send."""
        return set(nodes) - self.deleted if self.whole else set()

    def is_awaited(self, nodes: Iterable[int], now: float) -> bool:
        """Whether it may still be told that the Job's controller sent these."""
        return now < self.late_until and bool(set(nodes) - self.deleted)


def selectors(job: JobFact) -> tuple[str, str]:
    """The events that `read` needs, as two field selectors: of the Job, and of pods."""
    return f"involvedObject.uid={job.uid}", "involvedObject.kind=Pod,reason=NodeNotReady"


def read(job: JobFact, told: Iterable[Object], unready: Iterable[Object], *, now: float) -> History:
    """What these events say of the run's nodes. `told` are about its Job, `unready` about any pods."""
    pods = re.compile(rf"^{re.escape(job.name)}-(\d+)-[a-z0-9]+$")
    by_reason: dict[str, list[str]] = {}
    for event in told:
        by_reason.setdefault(str(event.get("reason")), []).append(str(event.get("message", "")))
    deletions = by_reason.get("SuccessfulDelete", [])
    sent = [pods.match(message.removeprefix("Deleted pod: ")) for message in deletions]
    found: dict[int, float] = {}
    for event in unready:
        named = pods.match(str((event.get("involvedObject") or {}).get("name", "")))
        at = seconds(event.get("firstTimestamp") or event.get("eventTime"))
        if named is not None and at is not None and (job.begun_at is None or at >= job.begun_at):
            node = int(named.group(1))
            found[node] = min(at, found.get(node, at))
    tells = job.nodes <= _MOST_NODES and not job.elastic and job.failed_at is not None
    is_last = bool(job.ended_as) and job.end_reason in by_reason
    return History(
        deleted=frozenset(int(one.group(1)) for one in sent if one is not None),
        whole=tells and is_last and now < (job.failed_at or 0.0) + _KEPT_SECONDS,
        late_until=(job.failed_at or 0.0) + _LATE_SECONDS if tells and not is_last else 0.0,
        unready=found,
    )
