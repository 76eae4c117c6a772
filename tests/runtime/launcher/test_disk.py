"""Measurements of disk usage, which code can make difficult: deep or closed folders, sparse and unlinked files."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.backends.sandbox import find_bubblewrap
from runtime.launcher import disk
from runtime.launcher.record import Record


def test_folders_are_measured_without_following_links(tmp_path):
    (tmp_path / "outside").write_bytes(bytes(1 << 20))
    inside = tmp_path / "inside"
    (inside / "deep").mkdir(parents=True)
    (inside / "deep" / "file").write_bytes(bytes(100 << 10))
    (inside / "link").symlink_to(tmp_path / "outside")
    (inside / "folder").symlink_to(tmp_path)
    with (inside / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    os.utime(inside / "sparse", (1, 1))  # older than `file`
    result = disk.measure([inside], 10)
    assert 100 << 10 <= result.bytes < 200 << 10, "the file, and a few KiB for each entry, but nothing outside"
    assert result.newest_mtime == (inside / "deep" / "file").stat().st_mtime


def test_a_measurement_continues_in_steps(tmp_path):
    for number in range(1000):
        (tmp_path / str(number)).touch()
    measurement = disk.FolderMeasurement([tmp_path])
    steps = 1
    while not measurement.step(0):  # it pauses as soon as it may, which is after every 128 entries
        steps += 1
        assert measurement.usage is None
    assert steps > 3
    assert measurement.usage is not None
    assert disk.measure([tmp_path], 0) is None, "it would take longer than 0 s"


def test_folders_too_deep_to_measure_exceed_the_limit(tmp_path):
    descriptor = os.open(tmp_path, os.O_RDONLY)
    for _ in range(disk.MAX_DEPTH + 5):
        os.mkdir("d", dir_fd=descriptor)
        below = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    os.close(descriptor)
    result = disk.measure([tmp_path], 10)
    assert result.is_incomplete, "for which `DiskLimit` ends the run, as if it had passed its limit"
    descriptors = Path("/proc/self/fd").iterdir()
    assert not [path for path in descriptors if os.path.realpath(path).startswith(str(tmp_path))], "all are closed"


def measure_without_privileges(code, folder):
    """Run code without root's right to read every file; return its output. It has the variables `folder` and `disk`."""
    start = f"import os, pathlib; from runtime.launcher import disk; folder = pathlib.Path({str(folder)!r})\n"
    command = [find_bubblewrap(), "--dev-bind", "/", "/", "--cap-drop", "ALL", sys.executable, "-c", start + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_files_in_folders_that_their_owner_has_closed_count(tmp_path):
    """Each measured folder has a file of 1 MiB two levels below. It is closed itself, or its folder `-inner` is."""
    modes = {f"{mode:03o}{inner}": (mode, inner) for mode in (0o000, 0o300, 0o400, 0o600) for inner in ("", "-inner")}
    for name, (mode, inner) in modes.items():
        measured = tmp_path / name
        (measured / "-inner" / "deep").mkdir(parents=True)
        (measured / "-inner" / "deep" / "file").write_bytes(bytes(1 << 20))
        (measured / inner).chmod(mode)
    code = """
for name in sorted(os.listdir(folder)):
    usage = disk.measure([folder / name], 10)
    print(name, usage.bytes >> 20, usage.is_incomplete)
"""
    seen = measure_without_privileges(code, tmp_path).splitlines()
    assert seen == [f"{name} 1 False" for name in sorted(modes)], "1 MiB each, and none is incomplete"


def test_folders_that_are_closed_again_during_a_measurement_make_it_incomplete(tmp_path):
    (tmp_path / "closed").mkdir()
    for number in range(9):
        (tmp_path / "closed" / f"file{number}").touch()
    # Whenever the measurement has given itself the right to read the folder, another process closes it again.
    close_again = "grant = disk._grant_read_access\ndisk._grant_read_access = lambda *name: [grant(*name), {}]\n"
    for close in ("os.chmod(folder / 'closed', 0o300)", "os.chmod(folder / 'closed', 0o400)"):
        walk = "print(list(disk._walk_entries(folder)).count(None), disk.measure([folder], 10).is_incomplete)"
        # Not once for each file: the walk pauses only at entries that it can read.
        assert measure_without_privileges(close_again.format(close) + walk, tmp_path) == "1 True\n"


def test_open_unlinked_files_are_measured(tmp_path):
    with (tmp_path / "file").open("wb") as file, (tmp_path / "other").open("wb") as other:
        for each in (file, other):
            os.posix_fallocate(each.fileno(), 0, 1 << 20)
        (tmp_path / "file").unlink()
        second = os.dup(file.fileno())
        # 0 is no regular file, and 999 is not open.
        paths = [f"/proc/self/fd/{number}" for number in (file.fileno(), second, other.fileno(), 0, 999)]
        result = disk.DeletedFileMeasurement(iter(paths), [tmp_path])
        elsewhere = disk.DeletedFileMeasurement(iter(paths), [Path("/proc")])
        assert result.step(10)
        assert elsewhere.step(10)
        os.close(second)
    assert 1 << 20 <= result.usage.bytes < 2 << 20, "the unlinked file counts once, the other not at all"
    assert elsewhere.usage == disk.FolderUsage(0, 0.0), "the folder is on another disk"


def test_room_for_the_platforms_files_is_no_room_for_the_runs(tmp_path):
    for name in ("run", "checkpoints"):
        (tmp_path / name).mkdir()
    folders = {name: str(tmp_path / name) for name in ("run", "checkpoints")}
    disk_limit = disk.DiskLimit(1 << 20, folders, platform_bytes=4 << 20)
    record = Record(tmp_path, None, node=0, address="")

    def verdict_after(now, name, mebibytes):
        with (tmp_path / name / "file").open("ab") as file:
            file.write(bytes(mebibytes << 20))
        return disk_limit.check(now, record)

    disk_limit.measure_folders()
    assert verdict_after(10.0, "run", 2) is None
    assert not disk_limit.has_filled_the_disk()
    assert verdict_after(20.0, "checkpoints", 2).data == {"used_mib": 2, "limit_mib": 1}
    assert disk_limit.has_filled_the_disk()
    (tmp_path / "checkpoints" / "file").unlink()
    assert verdict_after(30.0, "run", 4).data == {"used_mib": 2, "limit_mib": 1}


@pytest.mark.parametrize(("available_mib", "is_filled"), [(2, True), (-5, False)], ids=["by the run", "before the run"])
def test_a_run_has_filled_a_disk_if_it_used_all_that_was_free(tmp_path, available_mib, is_filled):
    """The free space is less a reserve, so it is negative if the disk was full before the run.

    The run writes 2 MiB. That is all of 2 MiB that were free, but little of its own limit of 1 GiB, which holds if
    nothing was free.
    """
    for name in ("run", "checkpoints", "nodes"):
        (tmp_path / name).mkdir()
    folders = {name: str(tmp_path / name) for name in ("run", "checkpoints")}
    disk_limit = disk.DiskLimit(1 << 30, folders, available_bytes=available_mib << 20, repeats=False)
    assert disk_limit.has_filled_the_disk(), "nothing was measured before the run, so in doubt it has"
    disk_limit.measure_folders()
    for name in ("run", "checkpoints"):
        assert not disk_limit.has_filled_the_disk()
        (tmp_path / name / "half").write_bytes(bytes(1 << 20))
    assert disk_limit.has_filled_the_disk() is is_filled


def test_what_the_code_writes_at_once_counts_against_its_limit(tmp_path, monkeypatch):
    folders = {name: str(tmp_path / name) for name in ("run", "checkpoints", "workspace")}
    for folder in (*folders.values(), tmp_path / "nodes"):
        Path(folder).mkdir()
    (tmp_path / "checkpoints" / "earlier").write_bytes(bytes(4 << 20))
    disk_limit = disk.DiskLimit(1 << 20, folders)
    disk_limit.measure_folders()
    (tmp_path / "checkpoints" / "at-once").write_bytes(bytes(2 << 20))
    verdict = disk_limit.check(1.0, Record(tmp_path, None, node=0, address=""))
    assert (verdict.code, verdict.data) == ("disk_full", {"used_mib": 2, "limit_mib": 1})
    monkeypatch.setattr(disk, "_INITIAL_SECONDS", 0.0)
    for number in range(200):  # too many for a time limit of 0 s
        (tmp_path / "workspace" / str(number)).touch()
    large = disk.DiskLimit(1 << 20, folders)
    large.measure_folders()
    for number in range(200):
        (tmp_path / "workspace" / str(number)).write_bytes(bytes(1 << 16))
    assert large.check(1.0, Record(tmp_path, None, node=0, address="")) is None
    verdict = large.check(2.0, Record(tmp_path, None, node=0, address=""))
    assert verdict.code == "disk_full", "the files that were counted before the start have grown"
    unrepeated = disk.DiskLimit(1 << 20, folders, repeats=False)
    unrepeated.measure_folders()
    assert (unrepeated.is_measuring, unrepeated.check(1.0, Record(tmp_path, None, node=0, address=""))) == (False, None)
    assert large.has_filled_the_disk(), "the workspace was too large to be measured before the run, so in doubt it has"


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
@pytest.mark.parametrize("call", ["open", "scandir", "next"])
def test_a_folder_that_the_disk_does_not_show_is_neither_empty_nor_the_runs_fault(tmp_path, monkeypatch, call, number):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    disk_limit = disk.DiskLimit(1 << 20, {"checkpoints": str(folder)})
    disk_limit.measure_folders()
    (folder / "file").write_bytes(bytes(2 << 20))
    record = Record(tmp_path, None, node=0, address="")

    class Entries:
        __next__ = close = lambda *_: None
        __iter__ = lambda self: self

    def fail(*_arguments, **_options):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        if call == "next":
            Entries.__next__ = fail
            patch.setattr(os, "scandir", lambda _descriptor: Entries())
        else:
            patch.setattr(os, call, fail)
        assert disk_limit.check(10.0, record) is None
        assert disk_limit.has_filled_the_disk(), "in doubt"
    assert disk_limit.check(20.0, record).data == {"used_mib": 2, "limit_mib": 1}


def test_a_disk_that_loses_more_than_the_run_may_add_is_measured_sooner_and_faster(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_STEP_SECONDS", 0.0)  # a step then ends after 128 entries
    monkeypatch.setattr(disk, "_FIRST_STEP_SECONDS", 60.0)
    monkeypatch.setattr(disk, "_PAUSE_FACTOR", 1e9)  # as for a folder that takes long to measure
    free_mib = 100
    monkeypatch.setattr(disk, "free_bytes", lambda _folder: free_mib << 20)
    for number in range(300):
        (tmp_path / str(number)).touch()
    disk_limit = disk.DiskLimit(2 << 20, {"checkpoints": str(tmp_path)})
    record = Record(tmp_path, None, node=0, address="")
    disk_limit.measure_folders()

    def measuring_after(now):
        assert disk_limit.check(now, record) is None
        return disk_limit.is_measuring

    assert [measuring_after(now) for now in (0.0, 0.25, 0.5, 5.0)] == [True, True, False, False]
    free_mib -= 1  # less than the run may add
    assert not measuring_after(6.0)
    (tmp_path / "large").write_bytes(bytes(3 << 20))
    free_mib -= 3
    assert disk_limit.check(7.0, record).data == {"used_mib": 3, "limit_mib": 2}
