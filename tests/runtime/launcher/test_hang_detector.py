"""When a run counts as hung: never while it may still work, and always in the end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.launcher.telemetry.hang_detector import (
    BUSY_SHARE,
    MIN_HANG_SECONDS,
    NOT_WAITING,
    WAITING,
    WAITING_IF_IDLE,
    Activity,
    HangDetector,
    NodeProgress,
    ProgressTracker,
    RankState,
    is_rank_parked,
)

IDLE = Activity(
    seconds=1.0,
    has_milestone=False,  # a line of output, a metric or a step of training
    cpu_shares={2: 0.01},
    max_runnable_share=0.0,
    disk_rate=0.0,
    network_rate=0.0,
    is_blocked=False,
    gpu_percent=0.0,
    gpu_memory_percent=0.0,
)
HANG = 120.0
"""Seconds without a sign of progress (`hang_seconds`)."""


def waiting(where="all_reduce"):
    """Return the state of a rank that waits for the others; `where` stands for its stacks."""
    return RankState(where, WAITING, "train.py, line 3, train")


def working(where="loss"):
    return RankState(where, NOT_WAITING, "train.py, line 9, evaluate")


MAY_WAIT = RankState("backward", WAITING_IF_IDLE, "")
PARKED = working()._replace(is_parked=True)  # it has done nothing since the inspection before
BUSY = {"is_busy": True}
NEVER = float("inf")

# The progress of one node


@pytest.mark.parametrize(
    ("activity", "ends_stall"),
    [
        (IDLE._replace(has_milestone=True), True),
        (IDLE._replace(disk_rate=1 << 20), True),
        (IDLE._replace(network_rate=4 << 20), True),
        (IDLE._replace(is_blocked=True), True),
        (IDLE._replace(gpu_memory_percent=20.0), True),
        (IDLE._replace(seconds=60.0), True),  # the check came late, so it proves nothing
        (IDLE._replace(cpu_shares={2: 0.01, 3: 0.5}), False),
        (IDLE._replace(cpu_shares=dict.fromkeys(range(20), 0.03)), False),  # together more than half a core
        (IDLE._replace(max_runnable_share=0.9), False),
        (IDLE._replace(gpu_percent=100.0), False),
        (IDLE._replace(is_using_cpu=True), False),
    ],
)
def test_each_sign_of_progress_is_recognized(activity, ends_stall):
    """Each sign ends the idle time. Computing alone does not end the stalled time, since a wait may be a busy loop."""
    tracker = ProgressTracker(0.0, HANG)
    assert tracker.add_activity(10.0, IDLE, interval=1.0)[:3] == (10.0, 10.0, False), (
        "idle and stalled for 10 s, not begun"
    )
    progress = tracker.add_activity(20.0, activity, interval=1.0)
    assert progress.idle_seconds == 0.0
    assert progress.stalled_seconds == (0.0 if ends_stall else 20.0)
    assert progress.has_begun is activity.has_milestone


def test_a_blocked_disk_stops_counting_as_progress():
    tracker = ProgressTracker(0.0, HANG)
    blocked = IDLE._replace(is_blocked=True)
    reports = [tracker.add_activity(float(second), blocked, interval=1.0) for second in range(1, 1000)]
    assert reports[int(4 * HANG) - 1].idle_seconds == 0.0, "storage may stall for four times as long as a hang takes"
    assert reports[-1].idle_seconds > HANG


def test_constant_cpu_use_is_background_activity():
    tracker = ProgressTracker(0.0, HANG)
    assert tracker.busy_share(7) == BUSY_SHARE
    for second in range(1, 20):
        share = 0.9 if second % 2 else 0.06  # 0.06 while it waits
        tracker.add_activity(float(second), IDLE._replace(has_milestone=True, cpu_shares={7: share}), interval=1.0)
    assert tracker.busy_share(7) == pytest.approx(2 * 0.06)
    for second in range(20, 60):
        progress = tracker.add_activity(float(second), IDLE._replace(cpu_shares={7: 0.08}), interval=1.0)
    assert progress.idle_seconds > 30, "less than twice the background activity is idle"
    assert tracker.add_activity(60.0, IDLE._replace(cpu_shares={7: 0.2}), interval=1.0).idle_seconds == 0.0


# The hub's decision. NodeProgress(10.0, 20.0, True): idle for 10 s, no sign but computing for 20 s, has begun.


class Run:
    """A run as the hub sees it, second by second. Each node has one rank, whose state an inspection finds."""

    def __init__(self, states, hang=HANG):
        self.states = states
        self.detector = HangDetector(hang, range(len(states)))
        self.inspections = 0

    def find_hang(self, now, progress):
        """Return the hang, if one is found. `progress` holds for every node, or is a list by node."""
        nodes = range(len(self.states))
        for node, own in enumerate(progress if isinstance(progress, list) else [progress] * len(nodes)):
            self.detector.add_progress(node, own)
        if self.detector.should_inspect(now):
            self.inspections += 1
            for node in nodes:
                self.detector.add_inspection(node, {node: self.states[node]}, now)
        return self.detector.find_hang(now)


def seconds_until_hang(run, *, has_begun=True, is_busy=False):
    """Return when a run that makes no progress counts as hung, or infinity. If `is_busy`, its processes compute."""
    for second in map(float, range(1000)):
        if run.find_hang(second, NodeProgress(0.0 if is_busy else second, second, has_begun)) is not None:
            return second
    return NEVER


@pytest.mark.parametrize(
    ("states", "hang", "options", "earliest", "latest"),
    [
        pytest.param([waiting(), MAY_WAIT], HANG, {}, MIN_HANG_SECONDS, MIN_HANG_SECONDS, id="idle, all wait: sooner"),
        pytest.param([waiting()] * 2, HANG, {"has_begun": False}, HANG, HANG, id="never worked: after hang_seconds"),
        pytest.param([waiting()], 0, {}, NEVER, NEVER, id="detection is off"),
        pytest.param([waiting("a"), waiting("b")], HANG, BUSY, HANG, 2 * HANG, id="all wait actively, none moves"),
        pytest.param([waiting(), PARKED], HANG, BUSY, HANG, 2 * HANG, id="they wait actively for a parked rank"),
        pytest.param([PARKED] * 2, HANG, BUSY, NEVER, NEVER, id="parked ranks, nobody waits for them"),
        pytest.param([waiting(), working()], HANG, BUSY, NEVER, NEVER, id="busy, one rank works"),
        pytest.param([waiting(), MAY_WAIT], HANG, BUSY, NEVER, NEVER, id="busy, one rank may be in backward"),
        pytest.param([waiting(), RankState("", NOT_WAITING, "")], HANG, BUSY, NEVER, NEVER, id="busy, one is unknown"),
    ],
)
def test_when_a_run_counts_as_hung(states, hang, options, earliest, latest):
    run = Run(states, hang)
    assert earliest <= seconds_until_hang(run, **options) <= latest
    assert (1 if hang else 0) <= run.inspections < 60, "each that finds work doubles the pause before the next"


def test_a_run_with_long_idle_periods_may_be_idle_for_longer():
    run = Run([waiting(), waiting()])
    for second in map(float, range(13)):
        assert run.find_hang(second, NodeProgress(second, second, True)) is None
    run.find_hang(13.0, NodeProgress(0.0, 0.0, True))
    # It has recovered from 12 idle seconds, so four times as many are a hang.
    assert run.detector.allowed_idle_seconds == seconds_until_hang(run) == 4 * 12.0


def test_a_rank_that_is_parked_briefly_does_not_hang():
    run = Run([waiting(), working()])
    has_worked, inspections = False, 0
    for second in range(3000):
        # It works for 10 s of every 100. It is parked if it has done nothing since the inspection before.
        has_worked = (has_worked and inspections == run.inspections) or second % 100 < 10
        inspections = run.inspections
        run.states = [waiting(), working()._replace(is_parked=not has_worked)]
        assert run.find_hang(float(second), NodeProgress(0.0, float(second), True)) is None


@pytest.mark.parametrize(
    ("first", "others", "processes", "is_parked"),
    [
        pytest.param(0.0, [], [], True, id="nothing is used"),
        pytest.param(0.01, [0.1, 0.1], [0.01], True, id="other threads may do what background threads do"),
        pytest.param(0.03, [], [], False, id="the first thread works"),
        pytest.param(0.0, [0.2], [], False, id="another thread works"),
        pytest.param(0.0, [], [0.06], False, id="another process works"),
    ],
)
def test_a_rank_is_parked_if_its_threads_and_processes_do_nothing(first, others, processes, is_parked):
    """Shares of a core. They stay below 0.02 (the first thread), 0.15 (another thread), 0.05 (another process)."""
    assert is_rank_parked(first, others, processes, BUSY_SHARE) is is_parked


def test_no_hang_is_found_before_every_node_has_reported():
    detector = HangDetector(HANG, {0, 1})
    detector.add_progress(0, NodeProgress(1e6, 1e6, True))
    assert detector.find_hang(1e6) is None
    assert not detector.should_inspect(1e6)
    detector.remove_node(1)
    assert detector.find_hang(1e6) is not None


@given(
    hang=st.integers(5, 300),
    gaps=st.lists(st.integers(1, 400), max_size=6),
    waits=st.lists(st.sampled_from([NOT_WAITING, WAITING_IF_IDLE, WAITING]), min_size=1, max_size=4),
)
def test_a_run_counts_as_hung_in_time_and_never_before(hang, gaps, waits):
    """A hang is found after `hang` seconds at the latest, whatever pauses came before; sooner if every rank waits."""
    run = Run([RankState(str(node), how, "") for node, how in enumerate(waits)], hang)
    now = 0.0
    for gap in [*(gap for gap in gaps if gap < min(hang, MIN_HANG_SECONDS)), 10 * hang]:
        for second in range(gap + 1):
            now += 1
            found_hang = run.find_hang(now, NodeProgress(float(second), float(second), True))
            if found_hang is not None:
                assert gap == 10 * hang
                assert min(hang, MIN_HANG_SECONDS) <= second <= hang
                assert second == hang or NOT_WAITING not in waits
                assert found_hang.seconds == second
                return
    raise AssertionError("The hang was not found.")


@given(
    hang=st.integers(5, 200), signs_at=st.lists(st.integers(1, 50), min_size=1, max_size=40), nodes=st.integers(1, 4)
)
def test_a_run_in_which_one_node_shows_signs_never_hangs(hang, signs_at, nodes):
    """One node always shows a sign before the time without signs is over; the others never do."""
    run = Run([waiting()] * nodes, hang)
    now = 0.0
    for pause in signs_at:
        for second in range(min(pause, int(min(hang, MIN_HANG_SECONDS)) - 1) + 1):
            now += 1
            active = NodeProgress(float(second), float(second), True)
            assert run.find_hang(now, [*[NodeProgress(now, now, True)] * (nodes - 1), active]) is None


# Descriptions


def test_cpu_time_since_the_last_progress_is_summed_over_all_nodes():
    idle_processes = IDLE._replace(cpu_shares=dict.fromkeys(range(2, 12), 0.04))
    trackers = {node: ProgressTracker(0.0, HANG) for node in (0, 1)}
    detector = HangDetector(HANG, trackers)
    for second in range(1, 101):
        for node, own in trackers.items():
            # On node 1 the supervisor has counted more than the processes' shares, 0.45 s in each second.
            activity = idle_processes._replace(has_milestone=second <= 50, counted_cpu_seconds=0.45 if node else 0.0)
            detector.add_progress(node, own.add_activity(float(second), activity, interval=1.0))
    assert detector.idle_seconds == 50.0, "ten processes of 0.04 of a core are idle"
    assert detector.cpu_seconds == pytest.approx(50 * (0.4 + 0.45), abs=1.0)
    assert all(detector._cpu_seconds_at_last_sign.values()), "both nodes used CPU time before, which does not count"
