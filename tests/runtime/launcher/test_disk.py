from __future__ import annotations

import os
from pathlib import Path

from runtime.launcher import disk
from runtime.launcher.record import Record


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


def test_files_that_have_no_name_any_more_are_found_by_who_holds_them(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file, (tmp_path / "other").open("wb") as other:
        for each in (file, other):
            os.posix_fallocate(each.fileno(), 0, 1 << 20)
        (tmp_path / "file").unlink()
        again = os.dup(file.fileno())
        paths = [f"/proc/self/fd/{number}" for number in (file.fileno(), again, other.fileno(), 0, 999)]
        found = disk.Unlinked(iter(paths), [tmp_path])
        elsewhere = disk.Unlinked(iter(paths), [Path("/proc")])
        assert found.step(10)
        assert elsewhere.step(10)
        os.close(again)
    assert found.result is not None
    assert 1 << 20 <= found.result.bytes < 2 << 20, "once, and not the one that has a name"
    assert elsewhere.result == disk.Measured(0, 0.0), "on another disk"


def gauge(tmp_path: Path, *, limit: int, room: int) -> disk.Gauge:
    """One that knows what there was at the beginning."""
    for name in ("run", "checkpoints", "nodes"):
        (tmp_path / name).mkdir()
    folders = {name: str(tmp_path / name) for name in ("run", "checkpoints")}
    made = disk.Gauge(limit, folders, room_bytes=room, again=False)
    assert made.has_filled_the_disk(), "in doubt"
    assert made.look(1.0, Record(tmp_path, None, node=0, address="")) is None
    return made


def test_who_takes_all_that_a_disk_has_has_filled_it(tmp_path: Path) -> None:
    made = gauge(tmp_path, limit=1 << 30, room=2 << 20)
    assert not made.has_filled_the_disk()
    (tmp_path / "run" / "half").write_bytes(bytes(1 << 20))
    assert not made.has_filled_the_disk()
    (tmp_path / "checkpoints" / "half").write_bytes(bytes(1 << 20))
    assert made.has_filled_the_disk()


def test_a_disk_that_was_full_before_was_filled_by_others(tmp_path: Path) -> None:
    made = gauge(tmp_path, limit=1 << 30, room=-5)
    (tmp_path / "run" / "some").write_bytes(bytes(1 << 20))
    assert not made.has_filled_the_disk()


def test_a_name_costs_its_part_of_the_disk(tmp_path: Path) -> None:
    state = os.statvfs(tmp_path)
    whole = disk.entry_bytes(tmp_path) * max(1, state.f_files)
    assert disk.entry_bytes(tmp_path) >= 512
    assert whole <= max(512 * max(1, state.f_files), state.f_blocks * state.f_frsize)
    assert disk.entry_bytes(tmp_path / "nowhere") == 512
