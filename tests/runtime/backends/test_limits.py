from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from runtime.backends import watchdog
from runtime.backends.cgroups import Group
from runtime.backends.limits import CALM_SECONDS, Limits
from runtime.backends.tree import Tree
from runtime.launcher import disk
from runtime.launcher.node_limits import TICK_SECONDS
from runtime.launcher.record import Record


@pytest.mark.parametrize(
    ("held", "started", "files", "tick"),
    [
        (True, True, 0, CALM_SECONDS),
        (False, True, 0, TICK_SECONDS),
        (True, False, 0, TICK_SECONDS),
        (True, True, 20_000, TICK_SECONDS),
    ],
    ids=["held", "watched", "starting", "surveying"],
)
def test_a_node_that_the_kernel_holds_is_looked_at_seldom(
    tmp_path: Path, held: bool, started: bool, files: int, tick: float
) -> None:
    folders = {name: tmp_path / name for name in ("run", "checkpoints", "nodes")}
    for folder in folders.values():
        folder.mkdir()
    for number in range(files):
        (folders["run"] / str(number)).touch()
    order: dict[str, Any] = {
        "nodes": 1,
        "elastic": False,
        "disk_bytes": 1 << 30,
        "written": {name: str(folders[name]) for name in ("run", "checkpoints")},
    }
    record = Record(tmp_path, None, node=0, address="")
    tree = Tree(order, tmp_path / "note")
    limits = Limits(order, record, tree)
    if held:
        (tmp_path / "memory.oom_control").touch()
        tree.group = Group({"memory": tmp_path, "pids": tmp_path}, unified=False)
    else:
        tree.init = 0
    if started:
        record.data["started_at"] = 1.0
    assert limits.due(100.0)
    assert limits.look(100.0) is None
    assert limits.tick_seconds == tick
    assert limits.patience(100.0) == tick
    assert not limits.due(100.0 + tick / 2)
    assert limits.due(100.0 + tick)


@pytest.mark.parametrize(("free_mib", "blamed"), [(100, True), (10_000, False)], ids=["full before", "full since"])
def test_in_doubt_a_disk_was_filled_by_the_run_unless_it_was_full_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_mib: int, blamed: bool
) -> None:
    """A run may end before anything was measured."""
    free = free_mib << 20
    monkeypatch.setattr(disk, "free_bytes", lambda _folder: free)
    for name in ("run", "checkpoints"):
        (tmp_path / name).mkdir()
    order: dict[str, Any] = {
        "nodes": 1,
        "elastic": False,
        "disk_bytes": 1 << 30,
        "written": {name: str(tmp_path / name) for name in ("run", "checkpoints")},
    }
    limits = Limits(order, Record(tmp_path, None, node=0, address=""), Tree(order, tmp_path / "note"))
    free = 0
    verdict = limits.last_look()
    assert (verdict is not None) == blamed
    assert verdict is None or (verdict.kind, verdict.code) == ("platform_error", "disk_full")


def a_crowd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasks: int) -> Limits:
    """The limits of a node whose launcher has wanted a core for three looks, and was given none."""
    for name in ("run", "checkpoints", "nodes"):
        (tmp_path / name).mkdir()
    order: dict[str, Any] = {"nodes": 1, "elastic": False, "disk_bytes": 1 << 30}
    order["written"] = {name: str(tmp_path / name) for name in ("run", "checkpoints")}
    tree = Tree(order, tmp_path / "note")
    tree.init, tree.group = 1, Group({"memory": tmp_path, "pids": tmp_path}, unified=False)
    (tmp_path / "pids.current").write_text(f"{tasks}\n")
    record = Record(tmp_path, None, node=0, address="")
    record.data["started_at"] = 1.0
    monkeypatch.setattr(watchdog, "turn", lambda _pid: watchdog.Turn(wanting=True, ran_seconds=1.0, waited_seconds=2.0))
    limits = Limits(order, record, tree)
    begun = time.monotonic()
    for second in range(1, 4):
        assert limits.look(begun + second) is None
    return limits


def test_a_crowd_that_starves_its_launcher_is_no_lost_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = a_crowd(tmp_path, monkeypatch, tasks=1900)
    silent = limits.look(time.monotonic() + 13)
    lost = limits.explain({"kind": "node_lost", "node": 1}, time.monotonic() + 3)
    assert silent is not None
    assert (silent.kind, silent.code, silent.data) == ("code_failed", "too_many_processes", {"tasks": 1900})
    assert lost == silent, "what it says of others follows from its own silence"


@pytest.mark.parametrize("tasks", [20, 300], ids=["few", "the threads of honest training"])
def test_a_launcher_that_is_silent_without_a_crowd_is_a_lost_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasks: int
) -> None:
    limits = a_crowd(tmp_path, monkeypatch, tasks)
    silent = limits.look(time.monotonic() + 13)
    assert silent is not None
    assert silent.kind == "node_lost"
    assert limits.explain({"kind": "node_lost", "node": 1}, time.monotonic() + 3) is None
