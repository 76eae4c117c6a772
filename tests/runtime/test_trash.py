"""Removal of folders that customers' code filled."""

import errno
import fcntl
import os

from runtime import trash
from runtime.trash import Trash, remove_tree


def test_a_tree_is_removed_and_nothing_outside_it(tmp_path):
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


def test_a_link_in_the_place_of_the_folder_is_not_followed(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "kept")
    remove_tree(tmp_path / "run")
    assert (tmp_path / "kept").is_dir()


def test_a_folder_that_cannot_be_removed_blocks_no_other(tmp_path, monkeypatch):
    bin_ = Trash(tmp_path / ".trash")
    for name in ("stuck", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("x")
        bin_.move_in(tmp_path / name)
    unlink = os.unlink

    def refuse(name, *, dir_fd=None):
        if name == "stuck":
            raise OSError(errno.EIO, "broken disk")
        unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr(trash.os, "unlink", refuse)
    bin_.empty()
    (left,) = (tmp_path / ".trash").iterdir()
    assert [path.name for path in left.iterdir()] == ["stuck"]


def test_a_tree_that_another_process_removes_is_skipped(tmp_path):
    (tmp_path / "run" / "a").mkdir(parents=True)
    theirs = os.open(tmp_path / "run", os.O_RDONLY)
    fcntl.flock(theirs, fcntl.LOCK_EX)  # as a process holds it while it removes the tree
    remove_tree(tmp_path / "run")
    assert (tmp_path / "run" / "a").is_dir()
    os.close(theirs)
    remove_tree(tmp_path / "run")
    assert not (tmp_path / "run").exists()
