"""Archive folders as tar files and restore them. All customer data is restored, and customers cannot stop a backup."""

import errno
import hashlib
import io
import os
import shutil
import socket
import subprocess
import tarfile

import pytest

from console.backup import trees


def described(root):
    """Return everything that must be restored: kinds, bytes, modes, times, targets of links."""
    entries = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        if path.is_symlink():
            kind = ("link", str(path.readlink()))
        elif path.is_dir():
            kind = ("folder", status.st_mode, status.st_mtime_ns)
        else:
            kind = ("file", status.st_mode, status.st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        entries[os.fsencode(path.relative_to(root))] = kind
    return entries


def pack_and_unpack(root, tmp_path):
    """Archive the folder and restore it elsewhere. Return what was packed, and the restored folder."""
    packed = trees.pack(root, tmp_path / "it.tar")
    into = tmp_path / "back"
    into.mkdir()
    assert trees.unpack(tmp_path / "it.tar", into) == packed.files
    return packed, into


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


def test_a_tree_is_restored_as_it_was(root, tmp_path):
    (root / "datasets" / "a" / "empty").mkdir(parents=True)
    (root / "workspaces").mkdir()
    (root / "datasets" / "a" / "data.bin").write_bytes(os.urandom(3_000_000))
    for name in ("datasets/a/empty.txt", f"datasets/{'long' * 60}", "workspaces/训练.py", "workspaces/run.sh"):
        (root / name).write_text("" if "empty" in name else name)
    (root / "workspaces" / "run.sh").chmod(0o755)
    (root / "workspaces" / os.fsdecode(b"no-utf8-\xff")).write_text("x")
    (root / "workspaces" / "out").symlink_to("/etc/passwd")
    (root / "workspaces" / "dangling").symlink_to("nowhere")
    for number, path in enumerate(sorted(root.rglob("*"), reverse=True)):
        os.utime(path, (1_600_000_000.25, 1_600_000_000.25 + number), follow_symlinks=False)
    (root / "datasets" / "a").chmod(0o555)
    packed, back = pack_and_unpack(root, tmp_path)
    assert described(back) == described(root)
    assert (packed.files, packed.folders, packed.left_out) == (8, 4, [])  # links count as files
    assert packed.sha256 == hashlib.sha256((tmp_path / "it.tar").read_bytes()).hexdigest()
    assert packed.bytes == (tmp_path / "it.tar").stat().st_size
    (root / "datasets" / "a").chmod(0o755)  # writable again, so that it can be removed


def test_holes_in_files_take_no_space(root, tmp_path):
    with (root / "huge").open("wb") as file:
        for offset, text in ((5 << 20, b"one"), (200 << 30, b"two")):
            file.seek(offset)
            file.write(text)
        file.truncate(300 << 30)
    (root / "all-hole").touch()
    os.truncate(root / "all-hole", 1 << 40)
    packed, back = pack_and_unpack(root, tmp_path)
    assert packed.bytes < 1 << 20
    assert (back / "huge").stat().st_size == 300 << 30
    assert (back / "huge").stat().st_blocks * 512 < 1 << 20
    assert (back / "all-hole").stat().st_size == 1 << 40
    by_tar = tmp_path / "by-tar"
    by_tar.mkdir()
    subprocess.run(["tar", "-xf", tmp_path / "it.tar", "-C", by_tar], check=True)
    for folder in (back, by_tar):
        with (folder / "huge").open("rb") as file:
            assert os.pread(file.fileno(), 4, (5 << 20) - 1) == b"\0one"
            assert os.pread(file.fileno(), 5, (200 << 30) - 1) == b"\0two\0"


def test_pipes_and_too_deep_folders_are_named_and_left_out(root, tmp_path):
    os.mkfifo(root / "pipe")
    (root / "kept").write_text("kept")
    deep = os.open(root, os.O_RDONLY)
    for _number in range(300):
        os.mkdir("d" * 200, dir_fd=deep)
        inner = os.open("d" * 200, os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = inner
    os.close(deep)
    packed, back = pack_and_unpack(root, tmp_path)
    assert (back / "kept").read_text() == "kept"
    assert packed.missing == 2  # the pipe, and the folder at which the depth is exceeded
    assert {line.partition(": ")[2] for line in packed.left_out} == {"no file, folder or link", "nested too deep"}


def test_of_the_roots_hidden_entries_only_outputs_are_packed_and_a_missing_root_is_empty(root, tmp_path):
    (root / ".warm_pool").mkdir()
    (root / ".outputs" / "job-1").mkdir(parents=True)
    (root / "run").mkdir()
    (root / "run" / ".kept").touch()
    _, back = pack_and_unpack(root, tmp_path)
    assert sorted(path.name for path in back.rglob("*")) == [".kept", ".outputs", "job-1", "run"]
    assert trees.pack(tmp_path / "none", tmp_path / "none.tar").files == 0


def act_while_reading(monkeypatch, acts):
    """Perform one act after each read of a file."""
    read = os.pread

    def pread(handle, size, offset):
        data = read(handle, size, offset)
        if acts:
            acts.pop(0)()
        return data

    monkeypatch.setattr(trees.os, "pread", pread)


@pytest.mark.parametrize(
    ("act", "content"),
    [
        (lambda log: log.write_text("new, and longer" * 9), "new, and longer" * 9),
        (lambda log: os.truncate(log, 3), "old"),
    ],
    ids=["it grows", "it shrinks"],
)
def test_a_file_that_changes_while_it_is_read_is_read_again(root, tmp_path, monkeypatch, act, content):
    log = root / "log"
    log.write_text("old" * 10_000)
    act_while_reading(monkeypatch, [lambda: act(log)])
    packed, back = pack_and_unpack(root, tmp_path)
    assert (back / "log").read_text() == content
    assert (packed.files, packed.left_out) == (1, [])


def test_a_file_that_always_changes_is_kept_and_named(root, tmp_path, monkeypatch):
    log = root / "log"
    log.write_text("0")
    act_while_reading(monkeypatch, [lambda: log.write_text(log.read_text() + "1")] * 10)
    packed, back = pack_and_unpack(root, tmp_path)
    assert (back / "log").read_text().startswith("0")
    assert packed.left_out == ["log: changed during each read; the copy may mix old and new data"]


def test_a_file_that_is_deleted_while_others_are_read_is_left_out(root, tmp_path, monkeypatch):
    (root / "a").write_text("a")
    (root / "b").write_text("b")
    act_while_reading(monkeypatch, [(root / "b").unlink])
    _, back = pack_and_unpack(root, tmp_path)
    assert [path.name for path in back.iterdir()] == ["a"]


def test_a_changed_file_that_cannot_be_read_again_is_named_and_a_broken_disk_stops_the_backup(
    root, tmp_path, monkeypatch
):
    def break_disk():
        raise OSError(errno.EIO, "broken disk")

    log = root / "log"
    log.write_text("0")
    (root / "z").write_text("z")
    act_while_reading(monkeypatch, [lambda: log.write_text("01"), log.unlink])
    packed, back = pack_and_unpack(root, tmp_path)
    assert (back / "log").read_text() == "0"
    assert (packed.missing, packed.left_out[0].partition(":")[0]) == (1, "log")
    log.write_text("0")
    act_while_reading(monkeypatch, [lambda: log.write_text("01"), lambda: None, break_disk])
    with pytest.raises(OSError, match="broken disk"):
        trees.pack(root, tmp_path / "broken.tar")


def to_file(path):
    path.write_text("a file")


def to_folder(path):
    path.mkdir()
    (path / "inner").write_text("inner")


def to_link(path):
    path.symlink_to("nowhere")


def to_pipe(path):
    os.mkfifo(path)


def to_socket(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"/proc/self/cwd/{path.name}")  # the full path may exceed a socket's 107 bytes


def to_nothing(path):
    """Leave the name free."""


PACKED_KINDS = {to_file, to_folder, to_link}
"""What an archive can contain. Pipes and sockets are left out."""
KINDS = [to_file, to_folder, to_link, to_pipe, to_socket]


def swap_after_stat(monkeypatch, path, kinds):
    """Replace `path` by the next kind right after each `stat` of it."""
    stat = os.stat

    def swapping(name, **options):
        status = stat(name, **options)
        if name == path.name and kinds:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
            kinds.pop(0)(path)
        return status

    monkeypatch.setattr(trees.os, "stat", swapping)


@pytest.mark.parametrize("after", [*KINDS, to_nothing])
@pytest.mark.parametrize("before", KINDS)
def test_an_entry_that_is_replaced_while_it_is_read_stops_nothing(root, tmp_path, monkeypatch, before, after):
    monkeypatch.chdir(root)  # for `to_socket`
    before(root / "swapped")
    (root / "z").write_text("what comes after it")
    with monkeypatch.context() as patched:
        swap_after_stat(patched, root / "swapped", [after])
        packed, back = pack_and_unpack(root, tmp_path)
    assert (back / "z").read_text() == "what comes after it"
    if {before, after} <= PACKED_KINDS:
        assert described(back).keys() == described(root).keys()
        assert packed.left_out == []


def test_an_entry_that_is_replaced_each_time_is_named_and_left_out(root, tmp_path, monkeypatch):
    to_file(root / "swapped")
    (root / "z").write_text("what comes after it")
    swap_after_stat(monkeypatch, root / "swapped", [to_link, to_folder] * 10)
    packed, back = pack_and_unpack(root, tmp_path)
    assert [path.name for path in back.iterdir()] == ["z"]
    assert packed.left_out == ["swapped: was replaced during each attempt to read it"]


def member(name, kind=tarfile.REGTYPE, **fields):
    """Return the header of an entry in a tar file."""
    info = tarfile.TarInfo(name)
    info.type = kind
    for field, value in fields.items():
        setattr(info, field, value)
    return info


@pytest.mark.parametrize(
    "forged",
    [
        *(member(name, size=3) for name in ("../out", "/etc/out", "a/../../out", "link/out", "./out")),
        member("null", tarfile.CHRTYPE, devmajor=1, devminor=3),
        member("link", tarfile.DIRTYPE, mode=0o777),
    ],
    ids=lambda forged: forged.name,
)
def test_a_forged_archive_writes_nothing_outside_and_no_device(tmp_path, forged):
    with tarfile.open(tmp_path / "it.tar", "w") as tar:
        tar.addfile(member("link", tarfile.SYMTYPE, linkname=str(tmp_path)))
        tar.addfile(forged, io.BytesIO(b"out"))
    (tmp_path / "back").mkdir()
    with pytest.raises(trees.BrokenTree):
        trees.unpack(tmp_path / "it.tar", tmp_path / "back")
    assert not (tmp_path / "out").exists()
