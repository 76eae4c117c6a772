"""Verdicts about a node: on its disk, on a launcher that is silent, and on memory."""

import time

import pytest

from runtime.backends.supervision import resource_limits
from runtime.backends.supervision.cgroups import Group
from runtime.backends.supervision.limits import Limits
from runtime.backends.supervision.process_tree import ProcessTree
from runtime.launcher import disk
from runtime.launcher.record import Record


@pytest.fixture
def limits(tmp_path):
    """The limits of a node whose code has written nothing."""
    folders = {name: tmp_path / name for name in ("run", "checkpoints", "nodes")}
    for folder in folders.values():
        folder.mkdir()
    written = {name: str(folders[name]) for name in ("run", "checkpoints")}
    plan = {"nodes": 1, "elastic": False, "disk_bytes": 1 << 30, "written": written}
    return Limits(plan, Record(tmp_path, None, node=0, address=""), ProcessTree(plan, tmp_path / "note"))


@pytest.mark.parametrize(
    ("free_mib", "is_platform_fault"), [(100, True), (10_000, False)], ids=["full before", "filled since"]
)
def test_in_doubt_a_disk_was_filled_by_the_run_unless_it_was_full_before(
    limits, monkeypatch, free_mib, is_platform_fault
):
    """A run may end before the first measurement of what it wrote."""
    monkeypatch.setattr(disk, "free_bytes", lambda _folder: free_mib << 20)
    started = Limits(limits._plan, limits._record, limits._tree)  # notes how much is free at the start
    monkeypatch.setattr(disk, "free_bytes", lambda _folder: 0)
    verdict = started.check_after_end()
    assert (verdict is not None) == is_platform_fault
    assert verdict is None or (verdict.kind, verdict.code) == ("platform_error", "disk_full")


def starve(limits, tmp_path, monkeypatch, tasks):
    """Let the launcher want a core for three checks, and get none. The node has `tasks` processes and threads."""
    limits._tree.init_pid = 1
    limits._tree.group = Group({"memory": tmp_path, "pids": tmp_path}, unified=False)
    (tmp_path / "pids.current").write_text(f"{tasks}\n")
    limits._record.data["started_at"] = 1.0
    schedule = resource_limits.CpuSchedule(is_runnable=True, ran_seconds=1.0, waited_seconds=2.0)
    monkeypatch.setattr(resource_limits, "cpu_schedule", lambda _pid: schedule)
    begun = time.monotonic()
    for second in range(1, 4):
        assert limits.check(begun + second) is None


def check_until_verdict(limits, since=None):
    """Check once a second until the launcher has been silent for 12 seconds, and return the first verdict."""
    begun = time.monotonic() if since is None else since
    verdicts = (limits.check(begun + second) for second in range(4, 14))
    return next((verdict for verdict in verdicts if verdict is not None), None)


def test_processes_that_starve_their_launcher_are_no_lost_node(limits, tmp_path, monkeypatch):
    starve(limits, tmp_path, monkeypatch, tasks=1900)  # from 500 on, they count as the cause
    verdict = check_until_verdict(limits)
    assert (verdict.kind, verdict.code, verdict.data) == ("code_failed", "too_many_processes", {"tasks": 1900})
    lost = limits.explain_failure({"kind": "node_lost", "node": 1}, time.monotonic() + 3)
    assert lost == verdict, "the other node seems lost because this launcher starves"


def test_a_silent_launcher_beside_a_live_supervisor_is_the_codes_fault(limits, tmp_path, monkeypatch):
    starve(limits, tmp_path, monkeypatch, tasks=300)  # the threads of honest training
    verdict = check_until_verdict(limits)
    assert (verdict.kind, verdict.code) == ("code_failed", "launcher_killed")
    assert limits.explain_failure({"kind": "node_lost", "node": 1}, time.monotonic() + 3) is None


def test_a_launcher_silent_before_code_began_or_with_its_supervisor_is_the_platforms_fault(
    limits, tmp_path, monkeypatch
):
    starve(limits, tmp_path, monkeypatch, tasks=20)
    assert limits.check(time.monotonic() + 600) is None, "the machine was suspended, so its time begins anew"
    limits._record.data["started_at"] = None
    verdict = check_until_verdict(limits, since=time.monotonic() + 600)
    assert verdict.kind == "platform_error", "it did not start in time"


@pytest.mark.parametrize("is_unified", [False, True], ids=["v1", "v2"])
@pytest.mark.parametrize(("reached", "kind"), [(0, "platform_error"), (3, "out_of_memory")])
def test_a_kill_for_memory_below_the_limit_is_the_fault_of_others(limits, tmp_path, reached, kind, is_unified):
    """Version 2 counts how often the limit was reached. Version 1 has the maximum used: 70 or 99.7 % of the limit."""
    limits._tree.group = Group({"memory": tmp_path, "pids": tmp_path}, unified=is_unified)
    limits._plan["memory_bytes"] = 1 << 30
    for name, text in {
        "memory.limit_in_bytes": "1000000",
        "memory.max_usage_in_bytes": str(700_000 + 99_000 * reached),
        "memory.oom_control": "oom_kill 1",
        "memory.events": f"max {reached}\noom_kill 1",
        "pids.events": "max 0",
    }.items():
        (tmp_path / name).write_text(text + "\n")
    failed = limits.explain_failure({"kind": "code_failed", "rank": 1}, time.monotonic())
    assert limits.find_memory_kill().kind == failed.kind == kind
