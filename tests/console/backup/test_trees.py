"""Folders to tar files and back: whatever customers put in, comes out; nothing they do stops it."""

import hashlib
import io
import os
import subprocess
import tarfile

import pytest

from console.backup import trees


def described(root):
    """All that must be the same again: kinds, bytes, modes, times, where links point."""
    found = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        name = os.fsencode(path.relative_to(root))
        if path.is_symlink():
            found[name] = ("link", str(path.readlink()))
        elif path.is_dir():
            found[name] = ("folder", status.st_mode, status.st_mtime_ns)
        else:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            found[name] = ("file", status.st_mode, status.st_mtime_ns, digest)
    return found


def there_and_back(root, tmp_path):
    packed = trees.pack(root, tmp_path / "it.tar")
    into = tmp_path / "back"
    into.mkdir()
    assert trees.unpack(tmp_path / "it.tar", into) == packed.files
    return packed, into


@pytest.fixture
def root(tmp_path):
    made = tmp_path / "root"
    made.mkdir()
    return made


def test_a_tree_comes_back_as_it_was(root, tmp_path):
    (root / "datasets" / "a" / "empty").mkdir(parents=True)
    (root / "datasets" / "a" / "data.bin").write_bytes(os.urandom(3_000_000))
    (root / "datasets" / "a" / "empty.txt").write_bytes(b"")
    (root / "datasets" / ("long" * 60)).write_text("a long name")
    (root / "workspaces").mkdir()
    (root / "workspaces" / "run.sh").write_text("echo")
    (root / "workspaces" / "run.sh").chmod(0o755)
    (root / "workspaces" / "训练.py").write_text("print()")
    (root / "workspaces" / os.fsdecode(b"no-utf8-\xff")).write_text("x")
    (root / "workspaces" / "out").symlink_to("/etc/passwd")
    (root / "workspaces" / "dangling").symlink_to("nowhere")
    for number, path in enumerate(sorted(root.rglob("*"), reverse=True)):
        os.utime(path, (1_600_000_000.25, 1_600_000_000.25 + number), follow_symlinks=False)
    (root / "datasets" / "a").chmod(0o555)
    packed, back = there_and_back(root, tmp_path)
    assert described(back) == described(root)
    assert packed.files == 8
    assert packed.folders == 4
    assert not packed.left_out
    assert packed.sha256 == hashlib.sha256((tmp_path / "it.tar").read_bytes()).hexdigest()
    assert packed.bytes == (tmp_path / "it.tar").stat().st_size
    (root / "datasets" / "a").chmod(0o755)


def test_a_file_of_holes_costs_what_it_takes(root, tmp_path):
    with (root / "huge").open("wb") as file:
        file.seek(5 << 20)
        file.write(b"one")
        file.seek(200 << 30)
        file.write(b"two")
        file.truncate(300 << 30)
    (root / "all-hole").touch()
    os.truncate(root / "all-hole", 1 << 40)
    packed, back = there_and_back(root, tmp_path)
    assert packed.bytes < 1 << 20
    assert (back / "huge").stat().st_size == 300 << 30
    assert (back / "huge").stat().st_blocks * 512 < 1 << 20
    with (back / "huge").open("rb") as file:
        assert os.pread(file.fileno(), 4, (5 << 20) - 1) == b"\0one"
        assert os.pread(file.fileno(), 5, (200 << 30) - 1) == b"\0two\0"
    assert (back / "all-hole").stat().st_size == 1 << 40
    other = tmp_path / "by-tar"
    other.mkdir()
    subprocess.run(["tar", "-xf", tmp_path / "it.tar", "-C", other], check=True)
    with (other / "huge").open("rb") as file:
        assert os.pread(file.fileno(), 5, (200 << 30) - 1) == b"\0two\0"


def test_what_is_no_file_and_what_is_too_deep_is_named_and_left_out(root, tmp_path):
    os.mkfifo(root / "pipe")
    (root / "kept").write_text("kept")
    deep = os.open(root, os.O_RDONLY)
    for _number in range(300):
        os.mkdir("d" * 200, dir_fd=deep)
        inner = os.open("d" * 200, os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = inner
    os.close(deep)
    packed, back = there_and_back(root, tmp_path)
    assert (back / "kept").read_text() == "kept"
    assert packed.missing == 2
    assert {line.partition(": ")[2] for line in packed.left_out} == {"no file, folder or link", "nested too deep"}


def test_what_is_hidden_at_the_top_is_the_installations_own(root, tmp_path):
    (root / ".nursery").mkdir()
    (root / "run").mkdir()
    (root / "run" / ".kept").touch()
    _, back = there_and_back(root, tmp_path)
    assert [path.name for path in back.rglob("*")] == ["run", ".kept"]


def test_a_root_that_is_not_there_is_an_empty_one(tmp_path):
    packed, back = there_and_back(tmp_path / "none", tmp_path)
    assert (packed.files, list(back.iterdir())) == (0, [])


class Meddling:
    """A file that something happens to while it is read."""

    def __init__(self, monkeypatch, deeds):
        self.deeds, self.read = deeds, os.pread
        monkeypatch.setattr(trees.os, "pread", self)

    def __call__(self, handle, size, offset):
        data = self.read(handle, size, offset)
        if self.deeds:
            self.deeds.pop(0)()
        return data


def test_a_file_that_changes_is_read_again_and_the_last_copy_counts(root, tmp_path, monkeypatch):
    path = root / "log"
    path.write_text("old" * 100)
    Meddling(monkeypatch, [lambda: path.write_text("new, and longer" * 100)])
    packed, back = there_and_back(root, tmp_path)
    assert (back / "log").read_text() == "new, and longer" * 100
    assert (packed.files, packed.left_out) == (1, [])


def test_a_file_that_shrinks_breaks_nothing(root, tmp_path, monkeypatch):
    path = root / "log"
    path.write_bytes(b"x" * 100_000)
    Meddling(monkeypatch, [lambda: os.truncate(path, 7)])
    packed, back = there_and_back(root, tmp_path)
    assert (back / "log").read_bytes() == b"x" * 7
    assert not packed.left_out


def test_a_file_that_never_holds_still_is_kept_and_named(root, tmp_path, monkeypatch):
    path = root / "log"
    path.write_text("0")
    Meddling(monkeypatch, [lambda: path.write_text(path.read_text() + "1")] * 10)
    packed, back = there_and_back(root, tmp_path)
    assert (back / "log").read_text().startswith("0")
    assert packed.left_out == ["log: never held still; the copy may mix old and new"]


def test_a_file_that_went_is_not_in_it(root, tmp_path, monkeypatch):
    (root / "a").write_text("a")
    (root / "b").write_text("b")
    Meddling(monkeypatch, [(root / "b").unlink])
    _, back = there_and_back(root, tmp_path)
    assert [path.name for path in back.iterdir()] == ["a"]


@pytest.mark.parametrize("name", ["../out", "/etc/out", "a/../../out", "link/out", "./out"])
def test_a_forged_archive_leads_nowhere(tmp_path, name):
    with tarfile.open(tmp_path / "it.tar", "w") as tar:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path)
        tar.addfile(link)
        out = tarfile.TarInfo(name)
        out.size = 3
        tar.addfile(out, io.BytesIO(b"out"))
    (tmp_path / "back").mkdir()
    with pytest.raises(trees.BrokenTree):
        trees.unpack(tmp_path / "it.tar", tmp_path / "back")
    assert not (tmp_path / "out").exists()


def test_devices_are_refused(tmp_path):
    with tarfile.open(tmp_path / "it.tar", "w") as tar:
        device = tarfile.TarInfo("null")
        device.type, device.devmajor, device.devminor = tarfile.CHRTYPE, 1, 3
        tar.addfile(device)
    (tmp_path / "back").mkdir()
    with pytest.raises(trees.BrokenTree):
        trees.unpack(tmp_path / "it.tar", tmp_path / "back")
