from __future__ import annotations

from pathlib import Path

import pytest

from runtime.launcher import kernel


@pytest.mark.parametrize("name", ["memory.events", "memory/memory.oom_control"])
def test_kills_are_read_in_both_generations(tmp_path: Path, name: str) -> None:
    assert kernel.oom_kills(str(tmp_path)) == 0
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("oom 7\noom_kill 3\noom_group_kill 1\n")
    assert kernel.oom_kills(str(tmp_path)) == 3
    path.write_text("oom_kill many\n")
    assert kernel.oom_kills(str(tmp_path)) == 0


@pytest.mark.parametrize("folder", ["", "pids"])
def test_refused_processes_are_read_in_both_generations(tmp_path: Path, folder: str) -> None:
    assert (kernel.refusals(str(tmp_path)), kernel.process_limit(str(tmp_path))) == (0, None)
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / "pids.events").write_text("max 5\nmax.imposed 7\n")
    (tmp_path / folder / "pids.max").write_text("512\n")
    assert (kernel.refusals(str(tmp_path)), kernel.process_limit(str(tmp_path))) == (5, 512)
    (tmp_path / folder / "pids.max").write_text("max\n")
    assert kernel.process_limit(str(tmp_path)) is None


def test_a_counter_knows_when_it_last_rose() -> None:
    counter = kernel.Counter(2)
    counter.count(2, 1.0)
    assert counter.at is None
    counter.count(3, 2.0)
    counter.count(3, 3.0)
    assert counter.at == 2.0
