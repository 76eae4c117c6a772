from __future__ import annotations

import io
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage import files
from storage.errors import (
    FileMissing,
    NameTaken,
    NotText,
    StorageError,
    StorageFull,
    TooLarge,
    UnsafePath,
    WrongKind,
)
from storage.paths import Kind, split

MIB = 1024**2
ESCAPES = [
    "..",
    "../secret.txt",
    "a/../../secret.txt",
    "a/..",
    "/etc/passwd",
    "//etc/passwd",
    "a\0b",
    "\0",
    "x" * 256,
    "é" * 128,
    "/".join(["abcdefghi"] * 500),
    "\ud800",
    "\udc80",
    "./../secret.txt",
]


def put(root: Path, scratch: Path, path: str, content: bytes = b"x", limit: int = MIB) -> files.Written:
    return files.write(root=root, path=path, stream=io.BytesIO(content), scratch=scratch, limit_bytes=limit)


def every_act(root: Path, scratch: Path, path: str) -> list[object]:
    """Try all that takes a path; what was refused and how."""
    acts = [
        lambda: files.stat(root=root, path=path),
        lambda: files.read(root=root, path=path).close(),
        lambda: files.read_text(root=root, path=path),
        lambda: files.list_folder(root=root, path=path),
        lambda: put(root, scratch, path),
        lambda: files.make_folder(root=root, path=path),
        lambda: files.delete(root=root, path=path, scratch=scratch),
        lambda: files.move(root=root, source=path, target="elsewhere"),
        lambda: files.move(root=root, source="there.txt", target=path),
    ]
    refused: list[object] = []
    for act in acts:
        try:
            act()
        except StorageError as error:
            refused.append(type(error))
        else:
            refused.append(None)
    return refused


@pytest.mark.parametrize("path", ESCAPES)
def test_every_act_refuses_a_path_that_leaves(root: Path, scratch: Path, path: str) -> None:
    (root / "there.txt").write_text("x")
    assert set(every_act(root, scratch, path)) == {UnsafePath}
    assert (root.parent / "secret.txt").read_text() == "secret"


@pytest.mark.parametrize("target", ["/", "..", "../outside", ".", "inside"])
def test_no_act_goes_through_a_link_to_a_folder(root: Path, scratch: Path, target: str) -> None:
    (root / "inside").mkdir()
    (root / "inside" / "secret.txt").write_text("secret")
    (root / "there.txt").write_text("x")
    (root / "link").symlink_to(target)
    assert set(every_act(root, scratch, "link/secret.txt")) == {UnsafePath}
    assert set(every_act(root, scratch, "link/new/deep.txt")) == {UnsafePath}
    assert (root / "inside" / "secret.txt").read_text() == "secret"
    assert (root.parent / "outside" / "secret.txt").read_text() == "secret"


def test_a_link_to_a_file_is_never_followed(root: Path, scratch: Path) -> None:
    (root / "link").symlink_to("../secret.txt")
    assert files.stat(root=root, path="link").kind is Kind.LINK
    with pytest.raises(UnsafePath):
        files.read(root=root, path="link")
    with pytest.raises(UnsafePath):
        files.read_text(root=root, path="link")
    written = put(root, scratch, "link", b"mine")
    assert (written.created, written.replaced_bytes) == (False, 0)
    assert not (root / "link").is_symlink()
    assert (root / "link").read_bytes() == b"mine"
    assert (root.parent / "secret.txt").read_text() == "secret"


def test_deleting_a_link_leaves_what_it_leads_to(root: Path, scratch: Path) -> None:
    (root / "link").symlink_to("../outside")
    (root / "folder").mkdir()
    (root / "folder" / "link").symlink_to("../../outside")
    files.delete(root=root, path="link", scratch=scratch)
    files.delete(root=root, path="folder", scratch=scratch)
    assert list(root.iterdir()) == []
    assert (root.parent / "outside" / "secret.txt").exists()
    assert list(scratch.iterdir()) == []


def test_a_link_swapped_in_while_writing_never_leads_out(root: Path, scratch: Path) -> None:
    """One thread turns a folder into a link and back while the other reads, writes and deletes through it."""
    folder = root / "folder"
    (root / "aside").mkdir()
    stop = threading.Event()

    def flip() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            with suppress(OSError):  # a write has made the folder anew
                folder.mkdir()
                (folder / "secret.txt").write_text("mine")
            with suppress(OSError):
                folder.rename(root / "aside" / str(number))
                folder.symlink_to("../outside")
            with suppress(OSError):
                folder.unlink()

    thread = threading.Thread(target=flip)
    thread.start()
    seen, refused = set(), 0
    try:
        for number in range(500):
            path = f"folder/new-{number}.txt"
            for act in (
                lambda: seen.add(files.read_text(root=root, path="folder/secret.txt")),
                lambda path=path: put(root, scratch, path),
                lambda path=path: files.delete(root=root, path=path, scratch=scratch),
            ):
                try:
                    act()
                except (FileMissing, UnsafePath, WrongKind):
                    refused += 1
    finally:
        stop.set()
        thread.join()
    assert refused
    assert seen <= {"mine", ""}
    assert sorted(path.name for path in (root.parent / "outside").iterdir()) == ["secret.txt"]


@pytest.mark.parametrize("make", ["fifo", "socket", "device"])
def test_pipes_sockets_and_devices_are_no_files(
    root: Path, scratch: Path, make: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = root / "thing"
    if make == "fifo":
        os.mkfifo(path)
    elif make == "socket":
        server = socket.socket(socket.AF_UNIX)
        monkeypatch.chdir(root)  # a socket's path is short
        server.bind("thing")
        server.close()
    else:
        try:
            os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))
        except PermissionError:
            pytest.skip("only root makes devices")
    assert files.stat(root=root, path="thing").kind is Kind.OTHER
    for read in (files.read, files.read_text):
        with pytest.raises(WrongKind):
            read(root=root, path="thing")
    put(root, scratch, "thing", b"now a file")
    assert path.read_bytes() == b"now a file"


def test_write_makes_folders_and_says_what_it_did(root: Path, scratch: Path) -> None:
    assert put(root, scratch, "a/b/c.txt", b"12345") == files.Written(created=True, size=5)
    assert put(root, scratch, "./a//b/c.txt", b"1") == files.Written(created=False, size=1, replaced_bytes=5)
    assert (root / "a/b/c.txt").read_bytes() == b"1"
    assert (root / "a/b/c.txt").stat().st_mode & 0o777 == 0o644
    assert list(scratch.iterdir()) == []


def test_write_keeps_a_script_executable(root: Path, scratch: Path) -> None:
    put(root, scratch, "run.sh")
    (root / "run.sh").chmod(0o755)
    put(root, scratch, "run.sh", b"y")
    assert (root / "run.sh").stat().st_mode & 0o777 == 0o755


def test_a_write_too_large_changes_nothing(root: Path, scratch: Path) -> None:
    put(root, scratch, "a.txt", b"before")
    with pytest.raises(TooLarge):
        put(root, scratch, "a.txt", b"12345", limit=4)
    with pytest.raises(TooLarge):
        put(root, scratch, "new/b.txt", b"12345", limit=4)
    assert (root / "a.txt").read_bytes() == b"before"
    assert not (root / "new").exists()
    assert list(scratch.iterdir()) == []
    assert put(root, scratch, "a.txt", b"1234", limit=4).size == 4


def test_a_write_that_breaks_off_changes_nothing(root: Path, scratch: Path) -> None:
    class Broken(io.RawIOBase):
        calls = 0

        def read(self, size: int = -1) -> bytes:
            self.calls += 1
            if self.calls > 1:
                raise ConnectionError
            return b"half"

    put(root, scratch, "a.txt", b"before")
    with pytest.raises(ConnectionError):
        files.write(root=root, path="a.txt", stream=Broken(), scratch=scratch, limit_bytes=MIB)
    assert (root / "a.txt").read_bytes() == b"before"
    assert list(scratch.iterdir()) == []


def test_a_full_disk_is_said_so(root: Path, scratch: Path) -> None:
    class Full(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            raise OSError(28, "No space left on device")

    with pytest.raises(StorageFull):
        files.write(root=root, path="a.txt", stream=Full(), scratch=scratch, limit_bytes=MIB)


def test_a_write_reads_in_pieces(root: Path, scratch: Path) -> None:
    class Zeros:
        left = 40 * MIB
        largest = 0

        def read(self, size: int, /) -> bytes:
            assert size > 0
            self.largest = max(self.largest, size)
            piece = bytes(min(size, self.left))
            self.left -= len(piece)
            return piece

    zeros = Zeros()
    files.write(root=root, path="big", stream=zeros, scratch=scratch, limit_bytes=64 * MIB)
    assert zeros.largest <= MIB
    assert (root / "big").stat().st_size == 40 * MIB


@pytest.mark.parametrize("path", ["", ".", "folder", "folder/"])
def test_a_file_cannot_take_the_place_of_a_folder(root: Path, scratch: Path, path: str) -> None:
    (root / "folder").mkdir()
    with pytest.raises(WrongKind):
        put(root, scratch, path)
    with pytest.raises(WrongKind):
        files.read(root=root, path=path)


def test_a_file_cannot_be_used_as_a_folder(root: Path, scratch: Path) -> None:
    (root / "there.txt").write_text("x")
    (root / "file").write_text("x")
    assert set(every_act(root, scratch, "file/below")) == {WrongKind}
    with pytest.raises(WrongKind):
        files.make_folder(root=root, path="file")
    with pytest.raises(WrongKind):
        files.list_folder(root=root, path="file")


def test_list_shows_kinds_sizes_and_times(root: Path) -> None:
    (root / "b.txt").write_text("12")
    (root / "a").mkdir()
    (root / "c").symlink_to("nowhere")
    os.mkfifo(root / "d")
    os.utime(root / "b.txt", (0, 86400))
    listing = files.list_folder(root=root)
    assert [(e.name, e.kind, e.size) for e in listing.entries] == [
        ("a", Kind.FOLDER, 0),
        ("b.txt", Kind.FILE, 2),
        ("c", Kind.LINK, 0),
        ("d", Kind.OTHER, 0),
    ]
    assert listing.entries[1].modified.isoformat() == "1970-01-02T00:00:00+00:00"
    assert not listing.truncated


def test_list_ends_somewhere(root: Path) -> None:
    for number in range(5):
        (root / str(number)).touch()
    listing = files.list_folder(root=root, limit=3)
    assert [entry.name for entry in listing.entries] == ["0", "1", "2"]
    assert listing.truncated


def test_names_that_are_no_text_are_shown_and_can_be_removed(root: Path, scratch: Path) -> None:
    (root / "folder").mkdir()
    Path(os.fsdecode(os.fsencode(root) + b"/folder/\xff\xfe.txt")).touch()
    (entry,) = files.list_folder(root=root, path="folder").entries
    assert entry.name.encode().decode() == "\ufffd\ufffd.txt"
    files.delete(root=root, path="folder", scratch=scratch)
    assert list(root.iterdir()) == []


def test_a_time_beyond_the_calendar_is_shown_as_the_epoch(root: Path) -> None:
    assert files._moment(1e18).year == 1970
    assert files._moment(float("inf")).year == 1970


def test_read_gives_no_more_than_was_there(root: Path) -> None:
    (root / "log").write_bytes(b"first")
    opened = files.read(root=root, path="log")
    with (root / "log").open("ab") as log:
        log.write(b" and more")
    assert b"".join(opened) == b"first"
    opened.close()
    assert opened.stream.closed


def test_read_text(root: Path) -> None:
    (root / "a.py").write_bytes("print('é')\r\n".encode())
    assert files.read_text(root=root, path="a.py") == "print('é')\r\n"
    for content in (b"a\0b", b"\xff\xfe", b"x" * (files.TEXT_LIMIT + 1)):
        (root / "b").write_bytes(content)
        with pytest.raises(NotText):
            files.read_text(root=root, path="b")
    (root / "b").write_bytes(b"x" * files.TEXT_LIMIT)
    assert len(files.read_text(root=root, path="b")) == files.TEXT_LIMIT


def test_make_folder(root: Path) -> None:
    assert files.make_folder(root=root, path="a/b/c")
    assert not files.make_folder(root=root, path="a/b/c")
    assert not files.make_folder(root=root, path="")
    assert (root / "a/b/c").is_dir()


def test_move(root: Path, scratch: Path) -> None:
    put(root, scratch, "a.txt", b"a")
    put(root, scratch, "b.txt", b"b")
    files.move(root=root, source="a.txt", target="new/place/a.txt")
    assert (root / "new/place/a.txt").read_bytes() == b"a"
    with pytest.raises(NameTaken):
        files.move(root=root, source="b.txt", target="new/place/a.txt")
    with pytest.raises(FileMissing):
        files.move(root=root, source="gone.txt", target="c.txt")
    with pytest.raises(UnsafePath):
        files.move(root=root, source="new", target="new/place/below")
    with pytest.raises(UnsafePath):
        files.move(root=root, source="", target="x")
    files.move(root=root, source="new/place", target="place")
    assert (root / "place/a.txt").exists()


def test_delete_says_what_it_freed(root: Path, scratch: Path) -> None:
    put(root, scratch, "folder/a", b"1" * 10)
    put(root, scratch, "folder/deep/er/b", b"1" * 5)
    put(root, scratch, "c", b"1" * 3)
    assert files.delete(root=root, path="c", scratch=scratch) == 3
    assert files.delete(root=root, path="folder", scratch=scratch) == 15
    assert list(root.iterdir()) == []
    with pytest.raises(FileMissing):
        files.delete(root=root, path="folder", scratch=scratch)
    with pytest.raises(WrongKind):
        files.delete(root=root, path="", scratch=scratch)


NAMES = st.text(st.characters(exclude_characters="/"), min_size=1, max_size=12)
PATHS = st.lists(st.one_of(st.sampled_from(["..", ".", "", "link", "folder"]), NAMES), max_size=6).map("/".join)


@given(path=PATHS)
def test_a_path_that_is_taken_stays_inside(path: str) -> None:
    try:
        parts = split(path)
    except UnsafePath:
        return
    assert ".." not in parts
    assert all(part and "/" not in part and "\0" not in part for part in parts)
    assert os.path.normpath("/root/" + "/".join(parts)).startswith("/root")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=PATHS)
def test_whatever_the_path_nothing_outside_is_touched(root: Path, scratch: Path, path: str) -> None:
    for entry in root.iterdir():
        files.delete(root=root, path=entry.name, scratch=scratch) if entry.name.isprintable() else None
    (root / "folder").mkdir(exist_ok=True)
    (root / "there.txt").write_text("x")
    if not (root / "link").is_symlink():
        (root / "link").symlink_to("../outside")
    every_act(root, scratch, path)
    assert (root.parent / "secret.txt").read_text() == "secret"
    assert (root.parent / "outside/secret.txt").read_text() == "secret"
    assert {entry.name for entry in root.parent.iterdir()} == {"secret.txt", "outside", "workspace", "scratch"}
    assert {entry.name for entry in (root.parent / "outside").iterdir()} == {"secret.txt"}
