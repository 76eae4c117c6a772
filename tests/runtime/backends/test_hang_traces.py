"""Hang detection on recorded runs: what each node observed and what each rank was doing, replayed into the detector.

A trace in `hang_traces` has the observations of both nodes of a real run, in the order of their times (seconds since
the first node began): each check of a node with its `Activity`, each inspection with the stacks of its ranks, and the
time at which a node finished. Of each stack it has the digest, the innermost frames and the first frame of the script.
Real hangs, end to end, are in `test_hangs.py`.
"""

import json
from pathlib import Path

import pytest

from runtime.launcher.telemetry.hang_detector import Activity, HangDetector, ProgressTracker, describe_hang
from runtime.launcher.telemetry.stacks import rank_state

TRACES = {path.stem: json.loads(path.read_text()) for path in Path(__file__).parent.glob("hang_traces/*.json")}
HUNG = sorted(name for name, trace in TRACES.items() if trace["hang"])
HEALTHY = sorted(name for name, trace in TRACES.items() if not trace["hang"])


def replay(trace):
    """Return when the detector finds a hang in a trace, and the hang; None if it lets the run go on to its end."""
    hang_seconds = trace["hang_seconds"]
    trackers = {
        # `busy_share`: the share of a core from which a process counts as busy.
        int(node): ProgressTracker(begun, hang_seconds, trace["busy_share"])
        for node, begun in trace["begun"].items()
    }
    detector = HangDetector(hang_seconds, trackers)
    inspections = [(at, node, rest[0]) for at, node, kind, *rest in trace["events"] if kind == "inspection"]
    for at, node, kind, *rest in trace["events"]:
        if kind == "check":
            interval, (seconds, has_milestone, shares, *others) = rest
            # `has_milestone`: the run printed output, wrote a metric or took a step. `others`: the other fields.
            activity = Activity(seconds, has_milestone, {int(pid): share for pid, share in shares.items()}, *others)
            detector.add_progress(node, trackers[node].add_activity(at, activity, interval))
        elif kind == "finished":
            detector.remove_node(node)
        if detector.should_inspect(at):
            for other in trackers:
                # The first answer of the node `other` at or after this time, else its last answer.
                answers = [(when, ranks) for when, who, ranks in inspections if who == other]
                ranks = next((ranks for when, ranks in answers if when >= at), answers[-1][1] if answers else {})
                detector.add_inspection(other, {int(rank): state(trace, *known) for rank, known in ranks.items()}, at)
        hang = detector.find_hang(at)
        if hang is not None:
            return at, hang
    return None


def state(trace, stack, is_parked):
    """Return the state of a rank with this stack. `is_parked`: it has done nothing since the last inspection."""
    return rank_state(trace["stacks"][stack])._replace(digest=stack, is_parked=is_parked)


@pytest.mark.parametrize("name", HUNG)
def test_a_recorded_hang_is_detected_when_it_was(name):
    trace = TRACES[name]
    at, hang = replay(trace)
    assert at == pytest.approx(trace["hang"]["at"], abs=2)
    assert hang.seconds == pytest.approx(trace["hang"]["seconds"], abs=2)
    # The texts begin with the number of seconds, which may differ a little.
    assert describe_hang(hang).partition(" seconds.")[2] == trace["hang"]["text"].partition(" seconds.")[2]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_recorded_healthy_run_is_left_alone(name):
    assert replay(TRACES[name]) is None
