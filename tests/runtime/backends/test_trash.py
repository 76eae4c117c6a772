from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path

import pytest

from runtime.backends import trash
from runtime.backends.trash import Trash, remove_tree

DEEP = 4000
"""Deeper than Python calls itself, than a process has descriptors, and than a path has room for."""


def dig(folder: Path, depth: int = DEEP) -> None:
    """Folders in folders, with names that make the path far too long."""
    top = os.open(folder, os.O_RDONLY)
    for _level in range(depth):
        os.mkdir("d" * 20, dir_fd=top)
        below = os.open("d" * 20, os.O_RDONLY, dir_fd=top)
        os.close(top)
        top = below
    os.close(top)


def test_depth_does_not_matter(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    dig(folder)
    remove_tree(folder)
    assert list(tmp_path.iterdir()) == []


def test_anything_in_it_goes_and_nothing_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    beside = tmp_path / "beside"
    (folder / "a" / "b").mkdir(parents=True)
    beside.mkdir()
    (beside / "kept").write_text("kept")
    (folder / "link").symlink_to(beside)
    (folder / "a" / "loop").symlink_to("../a")
    (folder / "a" / "hard").hardlink_to(beside / "kept")
    os.mkfifo(folder / "a" / "pipe")
    for name in (b"\xff\n", b"x" * 255, b"-rf", b" "):
        (folder / os.fsdecode(name)).mkdir()
        (folder / os.fsdecode(name) / os.fsdecode(name)).touch()
    with (folder / "holes").open("wb") as file:
        file.truncate(1 << 40)
    (folder / "a" / "b").chmod(0)
    (folder / "a").chmod(0)
    remove_tree(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["beside"]
    assert (beside / "kept").read_text() == "kept"


def test_a_link_in_the_place_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "kept")
    remove_tree(tmp_path / "run")
    assert (tmp_path / "kept").is_dir()


def test_what_is_thrown_away_is_out_of_the_way_at_once_and_gone_later(tmp_path: Path) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    bin_ = Trash(tmp_path / ".trash")
    bin_.empty()
    bin_.take(tmp_path / "run")
    bin_.take(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    bin_.empty()
    assert list((tmp_path / ".trash").iterdir()) == []


def test_one_that_cannot_be_removed_is_in_nobodys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bin_ = Trash(tmp_path / ".trash")
    for name in ("stuck", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("x")
        bin_.take(tmp_path / name)
    unlink = os.unlink

    def refuse(name: str, *, dir_fd: int | None = None) -> None:
        if name == "stuck":
            raise OSError(errno.EIO, "broken disk")
        unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr(trash.os, "unlink", refuse)
    bin_.empty()
    (left,) = (tmp_path / ".trash").iterdir()
    assert [path.name for path in left.iterdir()] == ["stuck"]


def test_what_somebody_else_removes_is_left_to_them(tmp_path: Path) -> None:
    (tmp_path / "run" / "a").mkdir(parents=True)
    theirs = os.open(tmp_path / "run", os.O_RDONLY)
    fcntl.flock(theirs, fcntl.LOCK_EX)
    remove_tree(tmp_path / "run")
    assert (tmp_path / "run" / "a").is_dir()
    os.close(theirs)
    remove_tree(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_many_at_once_remove_everything_once(tmp_path: Path) -> None:
    bin_ = Trash(tmp_path / ".trash")
    for number in range(20):
        (tmp_path / str(number) / "a" / "b").mkdir(parents=True)
        bin_.take(tmp_path / str(number))
    everybody = [threading.Thread(target=bin_.empty) for _ in range(4)]
    for each in everybody:
        each.start()
    for each in everybody:
        each.join()
    bin_.empty()
    assert list((tmp_path / ".trash").iterdir()) == []
