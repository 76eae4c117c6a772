"""Files of a workspace, whose paths and links customers choose: nothing outside it is read or changed."""

import errno
import io
import os
import stat
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from console.core.errors import InvalidInput
from storage import files
from storage.errors import (
    FileChanged,
    FileMissing,
    NameTaken,
    NotText,
    StorageError,
    StorageFull,
    TooLarge,
    Unreadable,
    UnsafePath,
    WrongKind,
)
from storage.paths import Kind, translate_os_errors
from storage.trees import Usage

MIB = 1024**2
ESCAPES = [
    "..", "../secret.txt", "a/../../secret.txt", "a/..", "/etc/passwd", "//etc/passwd", "a\0b", "é" * 128,
    "/".join(["abcdefghi"] * 500), "\ud800",
]  # fmt: skip
"""Paths that lead outside, and paths that no file can have: with NUL, a lone surrogate, or too many bytes."""


def put(root, scratch, path, content=b"x", limit=MIB):
    return files.write(root=root, path=path, stream=io.BytesIO(content), scratch=scratch, limit_bytes=limit)


def every_operation(root, scratch, path):
    """Try every operation that takes a path. Return the type of each error, or None where there was none."""
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
    refused = []
    for act in acts:
        try:
            act()
        except StorageError as error:
            refused.append(type(error))
        else:
            refused.append(None)
    return refused


def test_every_operation_refuses_a_path_outside(root, scratch):
    (root / "there.txt").write_text("x")
    for path in ESCAPES:
        assert set(every_operation(root, scratch, path)) == {UnsafePath}, path
    assert (root.parent / "secret.txt").read_text() == "secret"


@pytest.mark.parametrize("target", ["/", "..", "../outside", ".", "inside"])
def test_no_operation_follows_a_link_to_a_folder(root, scratch, target):
    (root / "inside").mkdir()
    (root / "inside" / "secret.txt").write_text("secret")
    (root / "there.txt").write_text("x")
    (root / "link").symlink_to(target)
    assert set(every_operation(root, scratch, "link/secret.txt")) == {UnsafePath}
    assert set(every_operation(root, scratch, "link/new/deep.txt")) == {UnsafePath}
    assert (root / "inside" / "secret.txt").read_text() == "secret"
    assert (root.parent / "outside" / "secret.txt").read_text() == "secret"


def test_links_and_pipes_are_not_read_and_can_be_replaced(root, scratch):
    (root / "link").symlink_to("../secret.txt")
    os.mkfifo(root / "pipe")
    for name, kind, error in (("link", Kind.LINK, UnsafePath), ("pipe", Kind.OTHER, WrongKind)):
        assert files.stat(root=root, path=name).kind is kind
        for read in (files.read, files.read_text):
            with pytest.raises(error):
                read(root=root, path=name)
        written = put(root, scratch, name, b"mine")
        assert (written.created, written.replaced_bytes) == (False, 0)
        assert not (root / name).is_symlink()
        assert (root / name).read_bytes() == b"mine"
    assert (root.parent / "secret.txt").read_text() == "secret"


def test_deleting_a_link_keeps_its_target(root, scratch):
    (root / "link").symlink_to("../outside")
    (root / "folder").mkdir()
    (root / "folder" / "link").symlink_to("../../outside")
    Path(os.fsdecode(os.fsencode(root) + b"/folder/\xff\xfe.txt")).touch()  # a name that no request can have
    files.delete(root=root, path="link", scratch=scratch)
    files.delete(root=root, path="folder", scratch=scratch)
    assert list(root.iterdir()) == []
    assert (root.parent / "outside" / "secret.txt").exists()
    assert list(scratch.iterdir()) == []


def test_a_link_created_while_writing_is_not_followed(root, scratch):
    """One thread turns a folder into a link and back while the other reads, writes and deletes through it."""
    folder = root / "folder"
    (root / "aside").mkdir()
    stop = threading.Event()

    def flip():
        number = 0
        while not stop.is_set():
            number += 1
            with suppress(OSError):  # a write may have created the folder again
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
    assert seen <= {"mine", ""}  # empty between the creation of the file and its first write
    assert sorted(path.name for path in (root.parent / "outside").iterdir()) == ["secret.txt"]


def test_write_creates_folders_and_reports_the_result(root, scratch):
    first = put(root, scratch, "a/b/c.txt", b"12345")
    assert (first.created, first.size, first.replaced_bytes) == (True, 5, 0)
    assert (root / "a/b/c.txt").stat().st_mode & 0o777 == 0o644
    (root / "a/b/c.txt").chmod(0o755)
    second = put(root, scratch, "./a//b/c.txt", b"1")
    assert (second.created, second.size, second.replaced_bytes) == (False, 1, 5)
    assert (root / "a/b/c.txt").read_bytes() == b"1"
    assert (root / "a/b/c.txt").stat().st_mode & 0o777 == 0o755, "a script stays executable"
    assert list(scratch.iterdir()) == []
    assert [files.make_folder(root=root, path=path) for path in ("a/d", "a/d", "")] == [True, False, False]


def test_a_write_too_large_changes_nothing(root, scratch):
    put(root, scratch, "a.txt", b"before")
    for path in ("a.txt", "new/b.txt"):
        with pytest.raises(TooLarge):
            put(root, scratch, path, b"12345", limit=4)
    assert (root / "a.txt").read_bytes() == b"before"
    assert not (root / "new").exists()
    assert list(scratch.iterdir()) == []
    assert put(root, scratch, "a.txt", b"1234", limit=4).size == 4


@pytest.mark.parametrize(
    ("fault", "error"),
    [(ConnectionError(), ConnectionError), (OSError(28, "No space left on device"), StorageFull)],
    ids=["the connection breaks", "the disk is full"],
)
def test_an_interrupted_write_changes_nothing(root, scratch, fault, error):
    class Broken(io.RawIOBase):
        calls = 0

        def read(self, size=-1):
            self.calls += 1
            if self.calls > 1:
                raise fault
            return b"half"

    put(root, scratch, "a.txt", b"before")
    with pytest.raises(error):
        files.write(root=root, path="a.txt", stream=Broken(), scratch=scratch, limit_bytes=MIB)
    assert (root / "a.txt").read_bytes() == b"before"
    assert list(scratch.iterdir()) == []


def test_files_and_folders_do_not_replace_each_other(root, scratch):
    (root / "folder").mkdir()
    for name in ("there.txt", "file"):
        (root / name).write_text("x")
    for path in ("", ".", "folder", "folder/"):
        for act in (lambda path=path: put(root, scratch, path), lambda path=path: files.read(root=root, path=path)):
            with pytest.raises(WrongKind):
                act()
    for act in (files.make_folder, files.list_folder):
        with pytest.raises(WrongKind):
            act(root=root, path="file")
    assert set(every_operation(root, scratch, "file/below")) == {WrongKind}


def test_os_errors_are_translated():
    for number, error in (
        (errno.ENOENT, FileMissing), (errno.ELOOP, UnsafePath), (errno.ENAMETOOLONG, UnsafePath),
        (errno.EACCES, Unreadable), (errno.EISDIR, WrongKind), (errno.ENOSPC, StorageFull),
        (errno.EDQUOT, StorageFull), (errno.EIO, OSError),
    ):  # fmt: skip
        with pytest.raises(error, match="refused" if error is OSError else None), translate_os_errors():
            raise OSError(number, "refused")


def test_list_shows_kinds_sizes_and_times(root):
    (root / "b.txt").write_text("12")
    (root / "a").mkdir()
    (root / "c").symlink_to("nowhere")
    os.mkfifo(root / "d")
    os.utime(root / "b.txt", (0, 86400))
    listing = files.list_folder(root=root)
    kinds = [("a", Kind.FOLDER, 0), ("b.txt", Kind.FILE, 2), ("c", Kind.LINK, 0), ("d", Kind.OTHER, 0)]
    assert [(entry.name, entry.kind, entry.size) for entry in listing.entries] == kinds
    assert listing.entries[1].modified.isoformat() == "1970-01-02T00:00:00+00:00"
    assert not listing.truncated
    short = files.list_folder(root=root, limit=3)
    assert ([entry.name for entry in short.entries], short.truncated) == (["a", "b.txt", "c"], True)


@pytest.mark.parametrize("folders_first", [False, True])
def test_pages_list_each_entry_once_while_others_come_and_go(root, folders_first):
    names = ["a", "b", os.fsdecode(b"b\xff"), "c", "é", "z", "数"]
    for name in names:
        (root / name).mkdir() if name in "cz" else (root / name).touch()
    seen, after = [], ""
    while after is not None:
        page = files.list_folder(root=root, limit=2, after=after, folders_first=folders_first)
        assert page.truncated == (page.next is not None)
        seen += page.entries
        after = page.next
        (root / f"a-new-{len(seen)}").touch()  # before the cursor
        first = root / seen[0].name
        first.rmdir() if first.is_dir() else first.unlink(missing_ok=True)
    folders = {"c", "z"} if folders_first else set()
    order = sorted(names, key=lambda name: (name not in folders, name))
    listed = [entry.name for entry in seen if not entry.name.startswith("a-new")]
    # A byte that is not UTF-8 is shown as the replacement character.
    assert listed == [name.encode(errors="surrogateescape").decode(errors="replace") for name in order]


def test_an_invalid_cursor_is_refused(root):
    for cursor in ("x", "2YQ==", "0!", "0é", "0YQ"):  # a valid cursor is 0 or 1, and a name in Base64: 0YQ==
        with pytest.raises(InvalidInput):
            files.list_folder(root=root, after=cursor)


def test_a_write_replaces_only_an_expected_version(root, scratch):
    def save(content, expected):
        options = {"scratch": scratch, "limit_bytes": MIB, "expected_versions": expected}
        return files.write(root=root, path="a", stream=io.BytesIO(content), **options).version

    for expected in (["1-2-3"], ["*"]):  # an old version, and any version: but there is no file
        with pytest.raises(FileChanged):
            save(b"x", expected)
    first = save(b"1", [])  # [] means that there must be no file
    assert first == files.read_versioned_text(root=root, path="a").version == files.stat(root=root, path="a").version
    second = save(b"2", ["1-2-3", first])
    for expected in ([first], []):
        with pytest.raises(FileChanged):
            save(b"lost", expected)
    assert (root / "a").read_bytes() == b"2"
    (root / "a").write_bytes(b"22")  # a run writes in place
    with pytest.raises(FileChanged):
        save(b"lost", [second])
    assert save(b"3", ["*"]) != second
    assert list(scratch.iterdir()) == []


def test_a_time_beyond_the_calendar_is_shown_as_the_epoch():
    assert files._to_datetime(float("inf")).year == 1970


def test_read_ignores_bytes_appended_meanwhile(root):
    (root / "log").write_bytes(b"first")
    opened = files.read(root=root, path="log")
    with (root / "log").open("ab") as log:
        log.write(b" and more")
    assert b"".join(opened) == b"first"
    opened.close()
    assert opened.stream.closed


def test_text_is_read_as_it_is_unless_it_is_binary_or_too_long(root):
    (root / "a.py").write_bytes("print('é')\r\n".encode())
    assert files.read_text(root=root, path="a.py") == "print('é')\r\n"
    for content in (b"a\0b", b"\xff\xfe", b"x" * (files.TEXT_LIMIT + 1)):
        (root / "b").write_bytes(content)
        with pytest.raises(NotText):
            files.read_text(root=root, path="b")
    (root / "b").write_bytes(b"x" * files.TEXT_LIMIT)
    assert len(files.read_text(root=root, path="b")) == files.TEXT_LIMIT


def test_a_move_creates_folders_and_replaces_nothing(root, scratch):
    put(root, scratch, "a.txt", b"a")
    put(root, scratch, "b.txt", b"b")
    files.move(root=root, source="a.txt", target="new/place/a.txt")
    assert (root / "new/place/a.txt").read_bytes() == b"a"
    for source, target, error in (
        ("b.txt", "new/place/a.txt", NameTaken), ("gone.txt", "c.txt", FileMissing),
        ("new", "new/place/below", UnsafePath), ("", "x", UnsafePath),
    ):  # fmt: skip
        with pytest.raises(error):
            files.move(root=root, source=source, target=target)
    (root / "new/place").chmod(0o500)  # only root can rename such a folder, unless the move makes it writable
    files.move(root=root, source="new/place", target="place")
    assert (root / "place/a.txt").exists()
    assert stat.S_IMODE((root / "place").stat().st_mode) == 0o700


def test_delete_returns_the_freed_usage(root, scratch):
    put(root, scratch, "folder/a", b"1" * 10)
    put(root, scratch, "folder/deep/er/b", b"1" * 5)
    put(root, scratch, "c", b"1" * 3)
    assert files.delete(root=root, path="c", scratch=scratch) == Usage(3, 1)
    assert files.delete(root=root, path="folder", scratch=scratch) == Usage(15, 5)
    assert list(root.iterdir()) == []
    with pytest.raises(FileMissing):
        files.delete(root=root, path="folder", scratch=scratch)
    with pytest.raises(WrongKind):
        files.delete(root=root, path="", scratch=scratch)


NAMES = st.text(st.characters(exclude_characters="/"), min_size=1, max_size=12)
PATHS = st.lists(st.one_of(st.sampled_from(["..", ".", "", "link", "folder"]), NAMES), max_size=6).map("/".join)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=PATHS)
def test_no_path_touches_anything_outside(root, scratch, path):
    for entry in root.iterdir():
        files.delete(root=root, path=entry.name, scratch=scratch)  # left by the example before
    (root / "folder").mkdir(exist_ok=True)
    (root / "there.txt").write_text("x")
    if not (root / "link").is_symlink():
        (root / "link").symlink_to("../outside")
    every_operation(root, scratch, path)
    assert (root.parent / "secret.txt").read_text() == "secret"
    assert (root.parent / "outside/secret.txt").read_text() == "secret"
    assert {entry.name for entry in root.parent.iterdir()} == {"secret.txt", "outside", "workspace", "scratch"}
    assert {entry.name for entry in (root.parent / "outside").iterdir()} == {"secret.txt"}
