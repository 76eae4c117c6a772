from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.launcher import kernel, pod_guard
from runtime.launcher.node_limits import SILENCE_SECONDS
from runtime.launcher.pod_guard import Guard
from runtime.launcher.pod_limits import START_MARGIN_SECONDS, PodLimits
from runtime.launcher.processes import Exit
from runtime.launcher.record import Record

ORDER: dict[str, Any] = {"start_seconds": 30, "deadline_seconds": 100, "grace_seconds": 10, "memory_bytes": 1 << 30}
KILLED = Exit(7, None, "SIGKILL")


class Clock:
    """`time.monotonic`, as a test says."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made)
    return made


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Say how many processes the kernel has killed for want of memory."""
    count = [0]
    monkeypatch.setattr(kernel, "oom_kills", lambda: count[0])

    def say(number: int) -> None:
        count[0] = number

    return say


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record(tmp_path, None, node=1, address="10.0.0.1")


def look_on(limits: PodLimits, clock: Clock, seconds: float, step: float = 1.0) -> tuple[str, str] | None:
    """Look once every step; the kind and code of what is found, if anything."""
    end = clock.now + seconds
    while clock.now < end:
        clock.now += step
        verdict = limits.look(clock.now)
        if verdict is not None:
            return verdict.kind, verdict.code
    return None


def test_names_are_waited_for_as_long_as_ordered(clock: Clock, record: Record) -> None:
    limits = PodLimits(ORDER, record)
    assert look_on(limits, clock, 30) is None
    assert look_on(limits, clock, 2) == ("platform_error", "nodes_not_met")


def test_a_launcher_that_says_nothing_at_first_is_no_code_of_the_customers(clock: Clock, record: Record) -> None:
    limits = PodLimits(ORDER, record)
    clock.now += 20
    assert limits.start_seconds == 10
    assert look_on(limits, clock, SILENCE_SECONDS + 2) == ("platform_error", "node_silent")


def test_a_launcher_that_never_starts_its_ranks_is_given_up(clock: Clock, record: Record) -> None:
    limits = PodLimits(ORDER, record)
    assert limits.start_seconds == 30
    while clock.now < 1000 + 30 + START_MARGIN_SECONDS:
        limits.heard()
        assert look_on(limits, clock, 1) is None
    limits.heard()
    assert look_on(limits, clock, 2) == ("platform_error", "node_not_started")


def test_a_launcher_that_falls_silent_later_was_stopped(clock: Clock, record: Record) -> None:
    limits = PodLimits(ORDER, record)
    limits.running({})
    record.data["started_at"] = 1.0
    assert look_on(limits, clock, SILENCE_SECONDS) is None
    assert look_on(limits, clock, 2) == ("code_failed", "launcher_killed")


def test_a_pod_that_stood_still_whole_is_given_its_time_again(clock: Clock, record: Record) -> None:
    limits = PodLimits(ORDER, record)
    record.data["started_at"] = 1.0
    assert look_on(limits, clock, 5) is None
    clock.now += 600
    assert look_on(limits, clock, SILENCE_SECONDS) is None
    assert look_on(limits, clock, 2) == ("code_failed", "launcher_killed")


def test_the_deadline_begins_once_and_keeps_the_grace(clock: Clock, record: Record) -> None:
    limits = PodLimits(ORDER, record)
    limits.running({})
    assert (limits.term_at, limits.kill_at) == (1090.0, 1099.75)
    record.data["started_at"] = 1.0
    clock.now += 50
    limits.running({})
    assert limits.kill_at == 1099.75, "a later round begins no new one"
    limits.kill_by(1060.0)
    limits.kill_by(1070.0)
    assert limits.kill_at == 1060.0


def test_without_a_deadline_there_is_none(clock: Clock, record: Record) -> None:
    limits = PodLimits({**ORDER, "deadline_seconds": 0}, record)
    limits.running({})
    assert (limits.term_at, limits.kill_at) == (None, None)


def test_a_failure_soon_after_a_kill_for_memory_is_put_down_to_it(
    clock: Clock, record: Record, kills: Callable[[int], None]
) -> None:
    kills(3)
    limits = PodLimits(ORDER, record)
    failure = {"kind": "code_failed", "rank": 2}
    assert limits.explain(failure, clock.now) is None, "what was killed before is of another run"
    kills(4)
    verdict = limits.explain(failure, clock.now)
    assert verdict is not None
    assert (verdict.kind, verdict.rank, verdict.data) == ("out_of_memory", 2, {"limit_mib": 1024})
    assert limits.explain({"kind": "node_lost"}, clock.now) is None
    clock.now += 31
    assert limits.explain(failure, clock.now) is None


def test_a_failure_soon_after_a_refused_process_is_put_down_to_it(
    clock: Clock, record: Record, kills: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, failure = [2], {"kind": "code_failed", "rank": 2}
    monkeypatch.setattr(kernel, "refusals", lambda: refused[0])
    monkeypatch.setattr(kernel, "process_limit", lambda: None)
    limits = PodLimits(ORDER, record)
    assert limits.explain(failure, clock.now) is None, "what was refused before is of another run"
    refused[0] = 3
    verdict = limits.explain(failure, clock.now)
    assert verdict is not None
    assert (verdict.kind, verdict.code, verdict.rank, verdict.data) == ("code_failed", "too_many_processes", 2, {})
    monkeypatch.setattr(kernel, "process_limit", lambda: 512)
    verdict = limits.explain(failure, clock.now)
    assert verdict is not None
    assert verdict.data == {"limit": 512}
    kills(1)
    verdict = limits.explain(failure, clock.now)
    assert verdict is not None
    assert verdict.kind == "out_of_memory", "a kill says more"
    clock.now += 31
    assert limits.explain(failure, clock.now) is None


def test_why_the_launcher_went(clock: Clock, record: Record, kills: Callable[[int], None]) -> None:
    limits = PodLimits(ORDER, record)
    assert limits.why(KILLED).code == "node_not_started"
    record.data["started_at"] = 1.0
    assert (limits.why(KILLED).kind, limits.why(KILLED).code) == ("code_failed", "launcher_killed")
    assert "SIGKILL" in limits.why(KILLED).message
    kills(1)
    assert limits.why(KILLED).kind == "out_of_memory"
    assert limits.why(Exit(7, 1, "")).code == "launcher_killed"


def test_the_guard_acts_only_when_the_other_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_guard, "LATE_SECONDS", 0.1)
    monkeypatch.setattr(pod_guard, "_LOOK_SECONDS", 0.01)
    did: list[str] = []
    left = threading.Event()

    def leave() -> None:
        did.append("left")
        left.set()

    guard = Guard(lambda: did.append("killed"), leave)
    guard.watch()
    guard.kill_at = time.monotonic()
    assert left.wait(10)
    assert did == ["killed", "left"]
    in_time = Guard(lambda: did.append("killed too soon"), leave)
    in_time.kill_at = in_time.leave_at = time.monotonic() + 1000
    in_time.watch()
    in_time.stop()
    assert did == ["killed", "left"]
