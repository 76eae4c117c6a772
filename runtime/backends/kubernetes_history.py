"""What a cluster's events tell of a run that has failed, when some of its pods are gone. PURE.

The one rule: events are kept for an hour, and not each is delivered. That the Job's own controller deleted a pod is
certain where an event says so; that it did not is believed only while none of them can have been left out.
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


@dataclass(frozen=True)
class History:
    """`deleted`: nodes whose pods the Job's controller has told to go; `whole`: no other's has it told.

    `unready`: nodes whose machine was found not ready while their pod was there, and when (Unix seconds).
    """

    deleted: frozenset[int] = frozenset()
    whole: bool = False
    unready: Mapping[int, float] = field(default_factory=dict)

    def by_others(self, nodes: Iterable[int]) -> set[int]:
        """Of nodes whose pods were told to go, or are gone: those that the Job's controller did not send."""
        return set(nodes) - self.deleted if self.whole else set()


def selectors(job: JobFact) -> tuple[str, str]:
    """The events that `read` needs, as two field selectors: of the Job, and of pods."""
    return f"involvedObject.uid={job.uid},reason=SuccessfulDelete", "involvedObject.kind=Pod,reason=NodeNotReady"


def read(job: JobFact, deletions: Iterable[Object], unready: Iterable[Object], *, now: float) -> History:
    """What these events say of the run's nodes. `deletions` are about its Job, `unready` about any pods."""
    pods = re.compile(rf"^{re.escape(job.name)}-(\d+)-[a-z0-9]+$")
    sent = [pods.match(str(event.get("message", "")).removeprefix("Deleted pod: ")) for event in deletions]
    found: dict[int, float] = {}
    for event in unready:
        named = pods.match(str((event.get("involvedObject") or {}).get("name", "")))
        at = seconds(event.get("firstTimestamp") or event.get("eventTime"))
        if named is not None and at is not None and (job.begun_at is None or at >= job.begun_at):
            node = int(named.group(1))
            found[node] = min(at, found.get(node, at))
    return History(
        deleted=frozenset(int(one.group(1)) for one in sent if one is not None),
        whole=job.nodes <= _MOST_NODES and job.failed_at is not None and now < job.failed_at + _KEPT_SECONDS,
        unready=found,
    )
