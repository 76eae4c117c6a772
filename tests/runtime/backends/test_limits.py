from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runtime.backends.cgroups import Group
from runtime.backends.limits import CALM_SECONDS, Limits
from runtime.backends.tree import Tree
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
