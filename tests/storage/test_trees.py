from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest

from storage import trees
from storage.errors import FileMissing


def nest(folder: Path, depth: int, content: bytes = b"") -> None:
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


def test_folders_nested_without_end_are_measured_and_removed(root: Path, scratch: Path) -> None:
    (root / "tree").mkdir()
    nest(root / "tree", 3000)
    (root / "tree" / "file").write_bytes(b"x" * 100)
    assert trees.measure(root=root) == 100
    assert trees.remove_tree(folder=root / "tree", scratch=scratch) == 100
    assert list(root.iterdir()) == []
    assert list(scratch.iterdir()) == []


def held_open(folder: Path) -> list[Path]:
    """What this process has open in there; other threads open and close meanwhile."""
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(each.readlink())
    return [path for path in found if path.is_relative_to(folder.resolve())]


def test_nobody_gets_room_for_nothing_by_going_deep(root: Path, scratch: Path) -> None:
    beside = root / "beside"
    (root / "tree").mkdir()
    for number in range(3):
        (beside / str(number)).mkdir(parents=True)
        (beside / str(number) / "file").write_bytes(b"x" * 100)
    nest(root / "tree", 3000, b"y" * 1000)
    assert trees.measure(root=root) == 1300
    assert not held_open(root)
    trees.remove_tree(folder=root / "tree", scratch=scratch)  # pytest could not


def test_a_folder_that_is_moved_while_it_is_measured_leads_nowhere_else(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = root.parent / "elsewhere"
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / "file").write_bytes(b"x" * 100)
    outside.mkdir()
    (outside / "file").write_bytes(b"x" * 5000)
    (outside / "more").mkdir()
    (outside / "more" / "file").write_bytes(b"x" * 5000)
    measure = trees._measure

    def move(folder: int) -> tuple[int, list[str]]:
        found = measure(folder)
        if found == (100, []):
            (root / "a" / "b").rename(outside / "b")
        return found

    monkeypatch.setattr(trees, "_measure", move)
    assert trees.measure(root=root) == 100


def test_removing_is_safe_to_repeat(root: Path, scratch: Path) -> None:
    assert trees.remove_tree(folder=root / "gone", scratch=scratch) == 0
    assert trees.remove_tree(folder=root / "gone" / "deeper", scratch=scratch) == 0
    assert list(scratch.iterdir()) == []


def test_a_tree_without_permissions_is_removed(root: Path, scratch: Path) -> None:
    (root / "tree" / "closed").mkdir(parents=True)
    (root / "tree" / "closed" / "file").write_text("x")
    trees.make_read_only(folder=root / "tree")
    (root / "tree" / "closed").chmod(0)
    trees.remove_tree(folder=root / "tree", scratch=scratch)
    assert list(root.iterdir()) == []
    assert list(scratch.iterdir()) == []


def test_a_process_that_goes_on_writing_does_not_keep_the_removal_going(root: Path, scratch: Path) -> None:
    (root / "tree").mkdir()
    handle = os.open(root / "tree", os.O_RDONLY)
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            try:
                os.close(os.open(str(number), os.O_CREAT | os.O_WRONLY, dir_fd=handle))
            except OSError:
                return

    thread = threading.Thread(target=write)
    thread.start()
    try:
        trees.remove_tree(folder=root / "tree", scratch=scratch)
        assert list(root.iterdir()) == []
    finally:
        stop.set()
        thread.join()
        os.close(handle)


def test_measure_counts_files_and_neither_links_nor_holes(root: Path) -> None:
    (root / "a").write_bytes(b"x" * 10)
    (root / "folder").mkdir()
    (root / "folder" / "b").write_bytes(b"x" * 5)
    (root / "link").symlink_to("../outside")
    with (root / "sparse").open("wb") as file:
        file.truncate(10 * 1024**3)
    assert trees.measure(root=root) == 15
    with pytest.raises(FileMissing):
        trees.measure(root=root / "gone")


def test_make_read_only_keeps_what_is_executable(root: Path) -> None:
    (root / "run.sh").write_text("x")
    (root / "run.sh").chmod(0o700)
    (root / "data").write_text("x")
    (root / "data").chmod(0o600)
    (root / "folder").mkdir(mode=0o700)
    (root / "link").symlink_to("../secret.txt")
    before = (root.parent / "secret.txt").stat().st_mode
    trees.make_read_only(folder=root)
    assert [(root / name).stat().st_mode & 0o7777 for name in ("run.sh", "data", "folder", ".")] == [
        0o555,
        0o444,
        0o555,
        0o555,
    ]
    assert (root.parent / "secret.txt").stat().st_mode == before
