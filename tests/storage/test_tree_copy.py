"""Copies of trees that customers' code wrote, and may change meanwhile."""

import hashlib
import os
import socket
import subprocess

import pytest

from storage import tree_copy
from storage.errors import FileMissing, SourceChanged, TooLarge, UnsafePath, WrongKind
from storage.trees import ENTRY_BYTES, Usage


class Budget:
    """A counter with a limit, like a reservation of quota."""

    def __init__(self, most=10**9):
        self.most = most
        self.counted = 0

    def count(self, *, size_bytes=0, entries=0):
        if self.counted + size_bytes + entries * ENTRY_BYTES > self.most:
            raise TooLarge
        self.counted += size_bytes + entries * ENTRY_BYTES


@pytest.fixture
def target(tmp_path):
    """The folder that is copied to."""
    folder = tmp_path / "target"
    folder.mkdir()
    return folder


def copy(root, target, path="", *, counter=None, max_entries=100, keep_links=False):
    counter = counter or Budget()
    return tree_copy.copy_tree(
        root=root, path=path, target=target, counter=counter, max_entries=max_entries, keep_links=keep_links
    )


def fill_with_hostile_entries(root):
    """Fill `root`, the working directory, with what customers' code can leave beside two regular files."""
    (root / "deep").mkdir()
    (root / "deep" / "weights.bin").write_bytes(b"12345")
    (root / "run.sh").write_bytes(b"#!")
    (root / "run.sh").chmod(0o4755)
    os.utime(root / "run.sh", (1_000_000_000, 1_000_000_000))
    (root / "link").symlink_to("/etc/passwd")
    (root / "folder-link").symlink_to("../outside")
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind("socket")  # a relative path, since a socket's path has at most 107 bytes
    for name in (b"caf\xe9", b"line\nbreak\\"):
        with open(os.path.join(os.fsencode(root), name), "wb") as file:  # noqa: PTH118, PTH123 - pathlib takes no bytes
            file.write(b"x")


def test_only_regular_files_and_folders_are_copied(root, target, monkeypatch):
    monkeypatch.chdir(root)
    fill_with_hostile_entries(root)
    counter = Budget()
    copied = copy(root, target, counter=counter)
    names = {os.fsencode(path.relative_to(target)) for path in target.rglob("*")}
    assert names == {b"deep", b"deep/weights.bin", b"run.sh", b"caf\xe9", b"line\nbreak\\"}
    # Six entries with the target itself. Two links, the pipe and the socket are left out.
    assert (copied.usage, copied.file_count, copied.skipped_count) == (Usage(9, 6), 4, 4)
    assert counter.counted == copied.usage.counted_bytes
    script = (target / "run.sh").stat()
    assert (script.st_mode & 0o7777, script.st_mtime) == (0o755, 1_000_000_000)
    assert script.st_ino != (root / "run.sh").stat().st_ino
    # The hash is that of the list that sha256sum writes.
    names = sorted(os.fsencode(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
    listed = subprocess.run(["sha256sum", "--", *names], cwd=target, capture_output=True, check=True).stdout
    assert copied.sha256 == hashlib.sha256(listed).hexdigest()


def test_links_are_kept_as_they_are_on_request(root, target, monkeypatch):
    monkeypatch.chdir(root)
    fill_with_hostile_entries(root)
    assert copy(root, target, keep_links=True).usage.entry_count == 8  # the two links too
    assert (target / "link").readlink().as_posix() == "/etc/passwd"


def test_a_path_names_a_folder_or_a_file(root, target):
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / "best.pt").write_bytes(b"weights")
    assert copy(root, target, "a/b").usage == Usage(7, 2)
    assert copy(root, target / "..", "a/b/best.pt").usage == Usage(7, 2)
    assert (target / "best.pt").read_bytes() == (target.parent / "best.pt").read_bytes() == b"weights"


def test_a_path_never_leads_outside(root, target):
    (root / "file").write_text("")
    (root / "link").symlink_to("../outside")
    os.mkfifo(root / "pipe")
    for path, error in (
        ("missing", FileMissing), ("missing/x", FileMissing), ("file/x", WrongKind), ("../outside", UnsafePath),
        ("link", UnsafePath), ("link/secret.txt", UnsafePath), ("pipe", WrongKind), ("/etc", UnsafePath),
    ):  # fmt: skip
        with pytest.raises(error):
            copy(root, target, path)
        assert list(target.iterdir()) == [], path


def test_limits_hold_before_anything_is_written(root, target):
    (root / "big").write_bytes(b"x" * 10_000)
    with pytest.raises(TooLarge):
        copy(root, target, counter=Budget(2 * ENTRY_BYTES + 9_999))
    assert (target / "big").stat().st_size == 0  # the file exists already, but without a byte
    (root / "more").write_bytes(b"")
    (target / "big").unlink()
    with pytest.raises(TooLarge, match="more than 2"):
        copy(root, target, max_entries=2)
    (root / "/".join("d" * 70)).mkdir(parents=True)
    with pytest.raises(TooLarge, match="64 levels"):
        copy(root, target, "d")


@pytest.mark.parametrize("change", ["grows", "shrinks", "is rewritten"])
def test_a_file_that_changes_meanwhile_is_refused(root, target, change):
    (root / "file").write_bytes(b"1234")

    class Changing(Budget):
        def count(self, *, size_bytes=0, entries=0):
            if size_bytes:
                data = {"grows": b"12345", "shrinks": b"1", "is rewritten": b"4321"}[change]
                (root / "file").write_bytes(data)
                os.utime(root / "file", (1, 1))  # its time differs, however soon it was written

    with pytest.raises(SourceChanged):
        copy(root, target, counter=Changing())


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_is_replaced_by_a_link_meanwhile_is_not_followed(root, target, kind):
    """A run's code may replace an entry at the moment between the listing of the folder and the opening."""
    if kind == "folder":
        (root / "victim").mkdir()
    else:
        (root / "victim").write_text("")

    class Replacing(Budget):
        def count(self, *, size_bytes=0, entries=0):
            super().count(size_bytes=size_bytes, entries=entries)
            if self.counted == 2 * ENTRY_BYTES:  # the entry was listed, and is not opened yet
                (root / "victim").rmdir() if kind == "folder" else (root / "victim").unlink()
                (root / "victim").symlink_to("../outside" if kind == "folder" else "../secret.txt")

    with pytest.raises(SourceChanged):
        copy(root, target, counter=Replacing())
    assert "secret.txt" not in {path.name for path in target.rglob("*")}
