"""When a run counts as hung: never in doubt, and always in the end."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.launcher.progress import (
    BUSY_SHARE,
    NOT_WAITING,
    SURE_SECONDS,
    WAITING,
    WAITING_IF_IDLE,
    Judge,
    Pulse,
    Signs,
    Stand,
    Verdict,
    Work,
    is_parked,
    sentence,
)

IDLE = Work(
    seconds=1.0,
    milestone=False,
    shares={2: 0.01},
    starving=0.0,
    disk=0.0,
    network=0.0,
    blocked=False,
    gpu=0.0,
    gpu_memory=0.0,
)
HANG = 120.0


def waiting(where: str = "all_reduce") -> Stand:
    return Stand(where, WAITING, "train.py, line 3, train")


def working(where: str = "loss") -> Stand:
    return Stand(where, NOT_WAITING, "train.py, line 9, evaluate")


# One node's signs


@pytest.mark.parametrize(
    ("work", "silent_too"),
    [
        (IDLE._replace(milestone=True), True),
        (IDLE._replace(disk=1 << 20), True),
        (IDLE._replace(network=4 << 20), True),
        (IDLE._replace(blocked=True), True),
        (IDLE._replace(gpu_memory=20.0), True),
        (IDLE._replace(seconds=60.0), True),
        (IDLE._replace(shares={2: 0.01, 3: 0.5}), False),
        (IDLE._replace(shares=dict.fromkeys(range(20), 0.03)), False),
        (IDLE._replace(starving=0.9), False),
        (IDLE._replace(gpu=100.0), False),
        (IDLE._replace(working=True), False),
    ],
)
def test_what_is_a_sign(work: Work, silent_too: bool) -> None:
    signs = Signs(0.0, HANG)
    assert signs.see(10.0, IDLE, 1.0) == (10.0, 10.0, False)
    pulse = signs.see(20.0, work, 1.0)
    assert pulse.quiet == 0.0
    assert pulse.silent == (0.0 if silent_too else 20.0)
    assert pulse.begun is work.milestone


def test_a_little_of_everything_is_no_sign() -> None:
    signs = Signs(0.0, HANG)
    little = IDLE._replace(shares={2: 0.04, 3: 0.04, 4: 0.04}, starving=0.3, disk=4096, network=100_000)
    for second in range(1, 50):
        pulse = signs.see(float(second), little, 1.0)
    assert pulse == (49.0, 49.0, False)


def test_a_disk_that_never_answers_is_no_sign_for_ever() -> None:
    signs = Signs(0.0, HANG)
    pulses = [signs.see(float(second), IDLE._replace(blocked=True), 1.0) for second in range(1, 1000)]
    assert pulses[int(4 * HANG) - 1].quiet == 0.0
    assert pulses[-1].quiet > HANG


def test_what_a_process_never_stops_doing_is_its_background() -> None:
    signs = Signs(0.0, HANG)
    assert signs.threshold(7) == BUSY_SHARE
    for second in range(1, 20):
        share = 0.9 if second % 2 else 0.06
        signs.see(float(second), IDLE._replace(milestone=True, shares={7: share}), 1.0)
    assert signs.threshold(7) == pytest.approx(0.12)
    for second in range(20, 60):
        pulse = signs.see(float(second), IDLE._replace(shares={7: 0.08}), 1.0)
    assert pulse.quiet > 30, "a little above what it always does is not work"
    assert signs.see(60.0, IDLE._replace(shares={7: 0.2}), 1.0).quiet == 0.0


def test_a_slow_start_is_not_learnt_as_background() -> None:
    signs = Signs(0.0, HANG)
    for second in range(1, 60):
        pulse = signs.see(float(second), IDLE._replace(shares={7: 0.06}), 1.0)
    assert pulse.quiet == 0.0


def test_a_process_that_always_computes_has_no_background() -> None:
    signs = Signs(0.0, HANG)
    for second in range(1, 20):
        signs.see(float(second), IDLE._replace(milestone=True, shares={7: 0.95}), 1.0)
    assert signs.threshold(7) == BUSY_SHARE


# The hub's verdict


@dataclass
class Seen:
    """A run as the hub sees it, second by second."""

    judge: Judge
    stands: dict[int, Stand]
    looks: int = 0

    def until(self, pulses: dict[int, Pulse], now: float) -> Verdict | None:
        for node, pulse in pulses.items():
            self.judge.hear(node, pulse)
        if self.judge.wants_look(now):
            self.looks += 1
            for node in pulses:
                self.judge.stood(node, {node: self.stands[node]}, now)
        return self.judge.verdict(now)


def run_still(judge: Judge, stands: dict[int, Stand], *, begun: bool = True, cpu: bool = False) -> tuple[float, Seen]:
    """When a run without any sign (or with computing alone) is called hung; infinity where never."""
    seen = Seen(judge, stands)
    for second in range(1000):
        quiet = 0.0 if cpu else float(second)
        if seen.until({node: Pulse(quiet, float(second), begun) for node in stands}, float(second)) is not None:
            return float(second), seen
    return float("inf"), seen


def test_a_quiet_run_has_hung_when_its_time_is_over() -> None:
    at, seen = run_still(Judge(HANG, {0, 1}), {0: working(), 1: waiting()})
    assert at == HANG
    assert seen.looks > 0


def test_it_has_hung_sooner_where_everybody_waits() -> None:
    at, _seen = run_still(Judge(HANG, {0, 1}), {0: waiting(), 1: Stand("x", WAITING_IF_IDLE, "")})
    assert at == SURE_SECONDS


def test_before_it_ever_worked_it_gets_all_its_time() -> None:
    at, _seen = run_still(Judge(HANG, {0, 1}), {0: waiting(), 1: waiting()}, begun=False)
    assert at == HANG


def test_a_run_with_long_quiet_times_gets_longer() -> None:
    judge = Judge(HANG, {0, 1})
    seen = Seen(judge, {0: waiting(), 1: waiting()})
    for second in range(13):
        assert seen.until(dict.fromkeys((0, 1), Pulse(float(second), float(second), True)), float(second)) is None
    seen.until(dict.fromkeys((0, 1), Pulse(0.0, 0.0, True)), 13.0)
    assert judge.patience == 4 * 12.0
    at, _seen = run_still(judge, {0: waiting(), 1: waiting()})
    assert at == 4 * 12.0


def test_computing_that_waits_has_hung_when_seen_at_the_same_place_all_the_time() -> None:
    at, seen = run_still(Judge(HANG, {0, 1}), {0: waiting("a"), 1: waiting("b")}, cpu=True)
    assert HANG <= at <= 2 * HANG
    assert seen.looks >= 4


@pytest.mark.parametrize("other", [working(), Stand("backward", WAITING_IF_IDLE, ""), Stand("", NOT_WAITING, "")])
def test_computing_has_not_hung_where_one_rank_may_be_at_work(other: Stand) -> None:
    at, seen = run_still(Judge(HANG, {0, 1}), {0: waiting(), 1: other}, cpu=True)
    assert at == float("inf")
    assert seen.looks < 60, "the less there is to find, the less it is looked for"


def test_computing_has_hung_where_the_one_that_does_not_wait_is_parked() -> None:
    parked = working()._replace(parked=True)
    at, _seen = run_still(Judge(HANG, {0, 1}), {0: waiting(), 1: parked}, cpu=True)
    assert HANG <= at <= 2 * HANG
    assert run_still(Judge(HANG, {0, 1}), {0: parked, 1: parked}, cpu=True)[0] == float("inf"), "nobody waits for it"


def test_who_was_parked_only_for_a_while_has_not_hung() -> None:
    seen = Seen(Judge(HANG, {0, 1}), {0: waiting(), 1: working()})
    worked, looks = False, 0
    for second in range(3000):
        # Parked is who has done nothing since the look before.
        worked = (worked and looks == seen.looks) or second % 100 < 10
        looks = seen.looks
        seen.stands = {0: waiting(), 1: working()._replace(parked=not worked)}
        assert seen.until(dict.fromkeys((0, 1), Pulse(0.0, float(second), True)), float(second)) is None


@pytest.mark.parametrize(
    ("first", "others", "processes", "parked"),
    [
        (0.0, [], [], True),
        (0.01, [0.1, 0.1], [0.01], True),
        (0.03, [], [], False),
        (0.0, [0.2], [], False),
        (0.0, [], [0.06], False),
    ],
)
def test_parked(first: float, others: list[float], processes: list[float], parked: bool) -> None:
    assert is_parked(first, others, processes, BUSY_SHARE) is parked


def test_computing_has_not_hung_where_a_rank_moves() -> None:
    seen = Seen(Judge(HANG, {0}), {0: waiting()})
    for second in range(1000):
        seen.stands = {0: waiting(f"call {second // 50}")}
        assert seen.until({0: Pulse(0.0, float(second), True)}, float(second)) is None


def test_nothing_is_decided_before_every_node_has_spoken() -> None:
    judge = Judge(HANG, {0, 1})
    judge.hear(0, Pulse(1e6, 1e6, True))
    assert judge.verdict(1e6) is None
    assert not judge.wants_look(1e6)
    judge.leave(1)
    assert judge.verdict(1e6) is not None


def test_a_run_that_is_not_watched_never_hangs() -> None:
    assert run_still(Judge(0, {0}), {0: waiting()})[0] == float("inf")


def test_a_short_patience_is_kept() -> None:
    assert run_still(Judge(6, {0}), {0: working()})[0] == 6.0


shares = st.floats(0, 1)
moments = st.lists(
    st.tuples(st.booleans(), shares, st.floats(0, 1 << 20), st.booleans(), st.floats(0, 100)), min_size=1, max_size=300
)


@given(moments, st.integers(5, 200))
def test_a_node_is_never_quieter_than_silent_nor_than_time(
    history: list[tuple[bool, float, float, bool, float]], hang: int
) -> None:
    signs = Signs(0.0, hang)
    for second, (milestone, share, disk, blocked, gpu) in enumerate(history, 1):
        work = IDLE._replace(milestone=milestone, shares={2: share}, disk=disk, blocked=blocked, gpu=gpu)
        pulse = signs.see(float(second), work, 1.0)
        assert 0 <= pulse.quiet <= pulse.silent <= second
        assert BUSY_SHARE <= signs.threshold(2) <= 0.15
        if milestone or share > 0.15:
            assert pulse.quiet == 0


@given(
    hang=st.integers(5, 300),
    gaps=st.lists(st.integers(1, 400), max_size=6),
    waits=st.lists(st.sampled_from([NOT_WAITING, WAITING_IF_IDLE, WAITING]), min_size=1, max_size=4),
)
def test_a_run_is_hung_in_time_and_never_before(hang: int, gaps: list[int], waits: list[int]) -> None:
    """Whatever quiet times it came back from: hung at the latest after `hang_seconds`, at the soonest when sure."""
    judge = Judge(hang, range(len(waits)))
    seen = Seen(judge, {node: Stand(str(node), how, "") for node, how in enumerate(waits)})
    now = 0.0
    for gap in [*(gap for gap in gaps if gap < min(hang, SURE_SECONDS)), 10 * hang]:
        for second in range(gap + 1):
            now += 1
            verdict = seen.until(dict.fromkeys(range(len(waits)), Pulse(float(second), float(second), True)), now)
            if verdict is not None:
                assert gap == 10 * hang
                assert min(hang, SURE_SECONDS) <= second <= hang
                assert second == hang or NOT_WAITING not in waits
                assert verdict.seconds == second
                return
    raise AssertionError("it was never found")


@given(
    hang=st.integers(5, 200),
    signs_at=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    nodes=st.integers(1, 4),
)
def test_a_run_in_which_one_node_shows_signs_never_hangs(hang: int, signs_at: list[int], nodes: int) -> None:
    """One node does something now and then, at least as often as the run may be quiet; all others never do."""
    judge = Judge(hang, range(nodes))
    seen = Seen(judge, {node: waiting() for node in range(nodes)})
    now = 0.0
    for pause in signs_at:
        for second in range(min(pause, int(min(hang, SURE_SECONDS)) - 1) + 1):
            now += 1
            pulses = {node: Pulse(now, now, True) for node in range(nodes)}
            pulses[nodes - 1] = Pulse(float(second), float(second), True)
            assert seen.until(pulses, now) is None


# Words


def test_a_verdict_names_the_rank_that_the_others_wait_for() -> None:
    verdict = Verdict(121.7, {0: waiting(), 1: working(), 2: waiting()})
    assert sentence(verdict) == (
        "No sign of progress for 121 seconds. Ranks 0, 2 wait for the others; rank 1 does not: "
        "it is in train.py, line 9, evaluate."
    )
    assert sentence(Verdict(20.0, {0: waiting()})) == (
        "No sign of progress for 20 seconds. Every rank waits for the others."
    )
    assert sentence(Verdict(20.0, {0: working()})) == "No sign of progress for 20 seconds."
    many = {rank: waiting() for rank in range(20)}
    assert "Ranks 0, 1, 2, 3, 4, 5, 6, 7 and others wait" in sentence(Verdict(20.0, {**many, 20: Stand("", 0, "")}))
