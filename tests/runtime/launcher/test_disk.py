from __future__ import annotations

import os
from pathlib import Path

from runtime.launcher import disk


def test_what_lies_in_folders_is_summed_without_following_links(tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(bytes(1 << 20))
    inside = tmp_path / "inside"
    (inside / "deep").mkdir(parents=True)
    (inside / "deep" / "file").write_bytes(bytes(100 << 10))
    (inside / "link").symlink_to(tmp_path / "outside")
    (inside / "folder").symlink_to(tmp_path)
    result = disk.measure([inside], 10)
    assert result is not None
    assert 100 << 10 <= result.bytes < 200 << 10
    assert result.newest == (inside / "deep" / "file").stat().st_mtime


def test_holes_cost_nothing(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    result = disk.measure([tmp_path], 10)
    assert result is not None
    assert result.bytes < 1 << 20


def test_a_walk_goes_on_where_it_was(tmp_path: Path) -> None:
    for number in range(1000):
        (tmp_path / str(number)).touch()
    survey = disk.Survey([tmp_path])
    steps = 1
    while not survey.step(0):
        steps += 1
        assert survey.result is None
    assert steps > 3
    assert survey.result is not None
    assert disk.measure([tmp_path], 0) is None


def test_what_is_too_deep_to_measure_is_said(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    for _ in range(disk.DEEPEST + 5):
        os.mkdir("d", dir_fd=descriptor)
        below = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    os.close(descriptor)
    before = len(list(Path("/proc/self/fd").iterdir()))
    result = disk.measure([tmp_path], 10)
    assert result is not None
    assert result.too_deep
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    assert disk.measure([tmp_path / "nowhere"], 10) == disk.Measured(0, 0.0)
    assert disk.free_bytes(tmp_path / "nowhere") is None
    free = disk.free_bytes(tmp_path)
    assert free is not None
    assert free > 0
