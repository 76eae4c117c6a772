"""Trees of files that customers' code may change meanwhile: measured, made read-only, removed."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime import trash
from runtime.backends.sandbox import find_bubblewrap
from storage import paths, trees
from storage.errors import FileMissing
from storage.trees import Measurement, Usage


def nest(folder, depth, content=b""):
    """A chain of folders, deeper than any path may be long."""
    handle = os.open(folder, os.O_RDONLY)
    for _level in range(depth):
        os.mkdir("deeper", dir_fd=handle)
        below = os.open("deeper", os.O_RDONLY, dir_fd=handle)
        os.close(handle)
        handle = below
    file = os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=handle)
    os.write(file, content)
    os.close(file)
    os.close(handle)


def held_open(folder):
    """Return the paths below a folder that this process has open. Other threads may close a file meanwhile."""
    paths = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            paths.append(each.readlink())
    return [path for path in paths if path.is_relative_to(folder.resolve())]


def test_deep_folders_count_against_the_quota(root, scratch):
    beside = root / "beside"
    (root / "tree").mkdir()
    for number in range(3):
        (beside / str(number)).mkdir(parents=True)
        (beside / str(number) / "file").write_bytes(b"x" * 100)
    nest(root / "tree", 1500, b"y" * 1000)  # more than sys.getrecursionlimit()
    # Entries: three folders with a file each, their parent, the tree's 1501 folders and its file, and the root.
    assert trees.measure(root=root) == Measurement(Usage(1300, 1510))
    assert not held_open(root)
    with paths.open_folder(root=root, parts=()) as parent:
        assert trees.remove_folder(parent_fd=parent, name="tree", scratch=scratch) == Usage(1000, 1502)
    assert [path.name for path in root.iterdir()] == ["beside"]
    assert list(scratch.iterdir()) == []


def test_a_folder_moved_while_measured_leads_nowhere_else(root, monkeypatch):
    outside = root.parent / "elsewhere"
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / "file").write_bytes(b"x" * 100)
    outside.mkdir()
    (outside / "file").write_bytes(b"x" * 5000)
    (outside / "more").mkdir()
    (outside / "more" / "file").write_bytes(b"x" * 5000)
    measure = trees._measure_entries

    def move(folder):
        result = measure(folder)
        if result == (Measurement(Usage(100, 1)), []):  # `b` was measured, and its `..` comes next
            (root / "a" / "b").rename(outside / "b")
        return result

    monkeypatch.setattr(trees, "_measure_entries", move)
    assert trees.measure(root=root) == Measurement(Usage(100, 4), is_complete=False)


def test_closed_folders_count_and_those_that_stay_closed_make_a_measurement_incomplete(root):
    for name in ("closed", "inner"):
        (root / name / "b").mkdir(parents=True)
        (root / name / "b" / "file").write_bytes(b"x" * 100)
    code = f"""
import os, pathlib; from storage import trees
root = pathlib.Path({str(root)!r})
grant = trees.trash.grant_owner_access
for mode in (0o000, 0o300, 0o400, 0o600):
    for each in (root / "closed", root / "inner" / "b", root):
        each.chmod(mode)
    print(trees.measure(root=root))
    # Whenever the measurement has given itself the right to read the folder, another process closes it again.
    trees.trash.grant_owner_access = lambda *name: [grant(*name), (root / "closed").chmod(mode)]
    print(trees.measure(root=root).is_complete)
    trees.trash.grant_owner_access = grant
"""
    # Without root's right to read every folder.
    command = [find_bubblewrap(), "--dev-bind", "/", "/", "--cap-drop", "ALL", sys.executable, "-c", code]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert output == f"{Measurement(Usage(200, 7))}\nFalse\n" * 4


def test_measure_ignores_link_targets_and_holes(root):
    (root / "a").write_bytes(b"x" * 10)
    (root / "folder").mkdir()
    (root / "folder" / "b").write_bytes(b"x" * 5)
    (root / "link").symlink_to("../outside")
    with (root / "sparse").open("wb") as file:
        file.truncate(10 * 1024**3)
    assert trees.measure(root=root).usage == Usage(15, 6)
    with pytest.raises(FileMissing):
        trees.measure(root=root / "missing")


def test_make_read_only_keeps_executable_bits(root):
    for name, mode in (("run.sh", 0o700), ("data", 0o600)):
        (root / name).write_text("x")
        (root / name).chmod(mode)
    (root / "folder").mkdir(mode=0o700)
    (root / "link").symlink_to("../secret.txt")
    before = (root.parent / "secret.txt").stat().st_mode
    trees.make_read_only(folder=root)
    modes = [(root / name).stat().st_mode & 0o7777 for name in ("run.sh", "data", "folder", ".")]
    assert modes == [0o555, 0o444, 0o555, 0o555]
    assert (root.parent / "secret.txt").stat().st_mode == before


@pytest.mark.parametrize("swap", ["link", "nothing"])
# The removal opens the folders of the top folder; those further down it renames into the top folder first.
@pytest.mark.parametrize("look", [("open", "a"), ("rename", "outer/a")])
def test_a_folder_replaced_meanwhile_does_not_stop_the_removal(root, scratch, monkeypatch, swap, look):
    """Code that still runs in a folder may swap what is in it between two looks of the removal."""
    call, path = look
    tree = root / "tree"
    (tree / path).mkdir(parents=True)
    (tree / "b").write_text("b")
    real, measure, measured, swapped = getattr(os, call), trees.measure, [], []

    def measure_and_note(**options):
        measured.append(measure(**options))
        return measured[-1]

    def meddle(name, *args, **options):
        if name == "a" and measured and not swapped:
            (folder,) = scratch.glob(f"*/{path}")
            folder.rmdir()
            if swap == "link":
                folder.symlink_to(root)
            swapped.append(folder)
        return real(name, *args, **options)

    monkeypatch.setattr(trees, "measure", measure_and_note)
    monkeypatch.setattr(trash.os, call, meddle)
    trees.remove_tree(folder=tree, scratch=scratch)
    assert swapped
    assert list(root.iterdir()) == []
    assert list(scratch.iterdir()) == []
