"""Choose the first of several causes of a run's end. Pure."""

from __future__ import annotations

from typing import Any, Dict, Optional, Sequence

Cause = Dict[str, Any]
"""One cause; `protocol` documents its fields."""

# Signals by which a rank may end as an effect of another failure: a rank that lost a connection may abort, and the
# launcher ends ranks by SIGTERM. "" is a rank that no signal ended. Any other signal is more likely the first cause.
_EFFECT_SIGNALS = ("", "SIGABRT", "SIGTERM")
_SIMULTANEOUS_SECONDS = 1.0
"""Two failures of the same moment may be reported this far apart, because of clocks and the order of reaping."""
# Kinds of causes that are about one rank. The supervisor changes the first to the second after an OOM kill.
_KINDS_OF_A_RANK = ("code_failed", "out_of_memory")


def first_cause(causes: Sequence[Cause]) -> Optional[Cause]:
    """Return the cause that came first; the others are its effects.

    None if there are no causes. A cause has `kind` and `at` (Unix seconds), and `signal` if a signal ended the rank. A
    cause that is marked as an `echo` comes first only if there are no other causes.

    The times of two failures are not exact. A rank may seem to fail up to a second before the failure that caused its
    error, and `runtime.launcher.echoes` may not recognize that error as an echo. If the earliest cause is not
    `code_failed`, it comes first, because only a rank's error can be such an effect. Otherwise it is compared
    with the causes of the next second: a rank killed by a signal comes first (but see `_EFFECT_SIGNALS`), then a lost
    node, then the earliest.
    """
    # A cause that another node reported (`heard`) is left out if its own node has reported it too.
    reported_by_own_node = {
        (candidate.get("node"), candidate.get("rank")) for candidate in causes if not candidate.get("heard")
    }
    distinct = [
        candidate
        for candidate in causes
        if not candidate.get("heard") or (candidate.get("node"), candidate.get("rank")) not in reported_by_own_node
    ]
    by_time = sorted(distinct, key=lambda candidate: (bool(candidate.get("echo")), float(candidate["at"])))
    if not by_time:
        return None
    earliest = by_time[0]
    if earliest["kind"] != "code_failed" or earliest.get("echo"):
        return earliest
    simultaneous = [
        candidate
        for candidate in by_time
        if not candidate.get("echo") and candidate["at"] - earliest["at"] <= _SIMULTANEOUS_SECONDS
    ]
    for candidate in simultaneous:
        if candidate["kind"] in _KINDS_OF_A_RANK and (candidate.get("signal") or "") not in _EFFECT_SIGNALS:
            return candidate
    return next((candidate for candidate in simultaneous if candidate["kind"] == "node_lost"), earliest)
